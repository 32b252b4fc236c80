"""TUTTI_SHARED_MEMORY=off: one rank that says it is enough, and all goes through the process group."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from harness import run_ranks
from tutti.comm.rendezvous import make_local_group, make_local_group_or_hierarchy
from tutti.comm.shared_memory import make_shared_memory_communicator
from tutti.comm.world import join_world
from tutti.config import serialization
from tutti.config.run_folder import RunFolder, RunHeader


def _set(said: tuple[str, ...]) -> int:
    rank = int(os.environ["RANK"])
    os.environ["TUTTI_SHARED_MEMORY"] = said[rank]
    return rank


def meetings(said: tuple[str, ...]) -> list[bool]:
    _set(said)
    join_world()
    return [
        make() is not None
        for make in (make_local_group, make_local_group_or_hierarchy, make_shared_memory_communicator)
    ]


@pytest.mark.parametrize("said", [("off", "off"), ("off", "on", ""), ("on", "on", "off"), ("on", ""), ("", "", "")])
def test_one_rank_that_may_not_share_memory_is_enough(said: tuple[str, ...]) -> None:
    assert run_ranks(meetings, len(said), said) == [[("off" not in said)] * 3] * len(said)


def refusal(said: tuple[str, ...]) -> str:
    _set(said)
    join_world()
    try:
        make_local_group()
    except Exception as error:  # what it is, the test looks at
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_word_that_is_neither_is_refused_by_all_ranks_alike() -> None:
    found = run_ranks(refusal, 3, ("on", "of", "off"))
    assert found == ["LaunchError: TUTTI_SHARED_MEMORY = 'of' on rank 1; set it to on or off"] * 3


def train(said: tuple[str, ...], mesh: str) -> tuple[list[float], str]:
    import tutti

    rank = _set(said)
    os.environ["TUTTI_MESH"] = mesh
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 3)).double()
    data = torch.utils.data.TensorDataset(torch.randn(44, 9).double(), torch.randint(3, (44,)))
    job = tutti.Job(global_batch_size=11, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, _, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy)
    losses = [job.step(batch) for _ in job.epochs(1) for batch in loader]
    header = (
        serialization.load(RunHeader, RunFolder(Path(os.environ["TUTTI_RUN_FOLDER"])).header) if rank == 0 else None
    )
    return losses, header.ranks[-1].sums if header else ""


@pytest.mark.parametrize("mesh", ["replicate=2", "stage=2", "shard=2"])
def test_training_is_the_same_and_the_header_says_how_gradients_are_summed(mesh: str) -> None:
    on, off = (run_ranks(train, 2, said, mesh) for said in (("on", "on"), ("on", "off")))
    assert on[0][0] == pytest.approx(off[0][0], rel=1e-12)
    expected = "shared memory" if mesh == "replicate=2" else ""
    assert on[0][1] == expected
    assert off[0][1] == f"{'process group' if expected else 'nothing'} (TUTTI_SHARED_MEMORY=off)"
