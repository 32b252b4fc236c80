"""What a run's header says of a model that is divided among ranks."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.config.run_folder import RankInfo, RunFolder, RunHeader
from tutti.trainer import run_start


def said(mesh: dict[str, int], level: int) -> tuple[int, int]:
    """(parameters in the header, parameters of the script's model); 0 on other ranks than the first."""
    plan = Plan(batch=BatchPlan(global_batch_size=4), mesh=mesh, sharding=ShardingPlan(level=level))  # type: ignore[arg-type]
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=4, seed=0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[0].bias.requires_grad_(False)
    whole = sum(parameter.numel() for parameter in model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(8, 6), torch.arange(8) % 3)
    model, _, _ = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.functional.cross_entropy)
    if os.environ["RANK"] != "0":
        return 0, 0
    return serialization.load(RunHeader, RunFolder(Path(os.environ["TUTTI_RUN_FOLDER"])).header).parameters, whole


@pytest.mark.parametrize(("mesh", "level"), [({"replicate": 2}, 1), ({"shard": 2}, 3), ({"stage": 2}, 1)], ids=str)
def test_the_whole_models_parameters_are_counted(mesh: dict[str, int], level: int) -> None:
    (found, whole), _ = run_ranks(said, 2, mesh, level)
    assert found == whole == 6 * 9 + 9 + 9 * 8 + 8 + 16 + 8 * 3 + 3


def on_unequal_hosts() -> str:
    """Train with ranks that take themselves for two hosts with other versions; return what the header says of it."""
    rank, this_rank = os.environ["RANK"], run_start.this_rank

    def on_a_host_of_its_own(*given: object) -> RankInfo:
        return replace(this_rank(*given), host=f"node{rank}")  # type: ignore[arg-type]

    run_start.this_rank = on_a_host_of_its_own  # type: ignore[assignment]
    run_start.host_versions = lambda device: {"torch": f"2.{rank}", "NCCL": "2.28"}  # type: ignore[assignment]
    said({"replicate": 2}, 1)
    header = serialization.load(RunHeader, RunFolder(Path(os.environ["TUTTI_RUN_FOLDER"])).header)
    return header.extra["hosts_differ"] if rank == "0" else ""


def test_the_header_says_what_differs_between_hosts() -> None:
    assert run_ranks(on_unequal_hosts, 2)[0] == "torch"
