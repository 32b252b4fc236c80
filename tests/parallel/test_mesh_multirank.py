"""The mesh's process groups: opened when asked for, by their members, in one order on all ranks."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpoint.checkpoint_variants import PLANS, Way, train
from harness import run_ranks
from tutti.comm.world import gloo_thread_ids, join_world
from tutti.parallel.mesh import Mesh

GRID = {"replicate": 2, "split": 2}


def sums_over_groups() -> Any:
    """(sum of ranks by axes, whether each network thread yields) of groups that are opened one after another."""
    mesh = Mesh(GRID, join_world().rank)  # type: ignore[arg-type]
    sums: dict[str, float] = {}
    for axis in ("split", "replicate"):
        total = torch.tensor(float(mesh.rank))
        dist.all_reduce(total, group=mesh.group(axis))  # type: ignore[arg-type]
        sums[axis] = float(total)
    own = mesh.new_group("split")
    dist.barrier(group=own)
    return sums, mesh.opened, [os.sched_getscheduler(thread) for thread in gloo_thread_ids()]


def test_groups_opened_one_after_another_hold_the_ranks_of_their_axes() -> None:
    results = run_ranks(sums_over_groups, 4)
    assert [sums["split"] for sums, _, _ in results] == [1.0, 1.0, 5.0, 5.0]
    assert [sums["replicate"] for sums, _, _ in results] == [2.0, 4.0, 2.0, 4.0]
    assert all(opened == [("split",), ("replicate",), ("split",)] for _, opened, _ in results)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no batch threads")
def test_network_threads_of_groups_opened_later_interrupt_nobody() -> None:
    for _, _, policies in run_ranks(sums_over_groups, 4):
        assert len(policies) == 4
        assert set(policies) == {os.SCHED_BATCH}


def groups_of(way: Way, folder: Path) -> Any:
    """Sets of axes whose groups this rank opened, in order, in a run of two steps."""
    meshes: list[Mesh] = []
    init = Mesh.__init__

    def remembered(self: Mesh, *args: Any) -> None:
        init(self, *args)
        meshes.append(self)

    Mesh.__init__ = remembered  # type: ignore[method-assign]
    train(way, folder, 2)
    (opened,) = (mesh.opened for mesh in meshes if mesh.opened)
    return opened


OPENED = {
    "FSDP2": [("replicate", "shard"), ("replicate",), ("shard",)],
    "replicate 2 x shard 2": [("shard",), ("shard",), ("replicate",)],
    "split 2 x stage 2": [("split",), ("stage",), ("stage",), ("stage",)],
    "shard 2 x split 2": [("split",), ("shard",), ("shard",), ("shard",)],
}
FOUR_RANKS = [way for way in PLANS if way.plan.world_size == 4]


@pytest.mark.parametrize("way", FOUR_RANKS, ids=lambda way: way.name)
def test_all_ranks_of_a_plan_open_the_same_groups_in_one_order(way: Way, tmp_path: Path) -> None:
    expected = next(groups for mesh, groups in OPENED.items() if mesh in way.name)
    assert run_ranks(groups_of, 4, way, tmp_path) == [expected] * 4
