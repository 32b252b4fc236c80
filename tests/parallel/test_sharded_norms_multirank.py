"""LARS, LAMB, NVLAMB and NovoGrad at sharding levels 2 and 3: norms are those of whole tensors, whoever has segments.

Sizes do not divide among 2, 3 or 4 ranks, some ranks hold nothing of small tensors, and a weight is tied.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tutti
from against_one import close
from harness import run_ranks
from parallel.shard_subjects import Branching, Tied, words
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.optim.large_batch import LAMB, LARS, NovoGrad, nvlamb, parameter_groups
from tutti.parallel.layout import gather_whole, local_tensors

MAKE: dict[str, Any] = {
    "lars": lambda p: LARS(p, 0.5, trust=0.1, nesterov=True, momentum_correction=True),
    "lamb": lambda p: LAMB(p, 0.05),
    "nvlamb": lambda p: nvlamb(p, 0.05),
    "novograd": lambda p: NovoGrad(p, 0.05),
}
SAVED_AT, STEPS = 3, 6
"""In the first and the second epoch of three steps; the rate is halved after the second and the fourth."""

States = dict[tuple[str, str], dict[str, torch.Tensor]]
"""By optimizer and model: every tensor, whole, after the last step."""


def plan_of(level: int, **mesh: int) -> Plan:
    """Offloaded where there are two axes."""
    offload = "optimizer" if len(mesh) > 1 else "none"
    batch = BatchPlan(global_batch_size=8, num_microbatches=2)
    return Plan(batch=batch, mesh=mesh, sharding=ShardingPlan(level=level, offload=offload))  # type: ignore[arg-type]


def train(plan: Plan, folder: Path, resume: Path | None = None) -> States:
    torch.set_default_dtype(torch.float64)
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.environ['RANK']}.json"))
    results = {}
    for kind in MAKE:
        for make in (Tied, Branching):
            name = f"{kind}-{make.__name__}"
            os.environ["TUTTI_RUN_FOLDER"] = str(folder / name)
            begin = None if resume is None else resume / name / "checkpoints" / f"step-{SAVED_AT:08d}"
            job = tutti.Job(global_batch_size=8, seed=2, keep_checkpoints=0, resume=begin, clip_norm=5.0)
            model: torch.nn.Module = make()
            optimizer = MAKE[kind](parameter_groups(model, 0.01))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            model, optimizer, loader = job.prepare(model, optimizer, words(), F.cross_entropy, scheduler=scheduler)
            run = job._run()
            assert run.state.progress.step == (0 if resume is None else SAVED_AT)
            while run.state.progress.step < STEPS:
                for batch in loader:
                    job.step(batch)
                    if run.state.progress.step == SAVED_AT:
                        job.save()
            results[kind, make.__name__] = gather_whole(
                run.parallel.layout, run.parallel.world, dict(local_tensors(model))
            )
    return results


def assert_equal(ranks: list[States], one: States) -> None:
    for rank, got in enumerate(ranks):
        for key, whole in one.items():
            assert got[key].keys() == whole.keys()
            for name, value in whole.items():
                close(got[key][name], value, 1e-12, f"rank {rank}, {key}: {name}")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[States, Path]:
    folder = tmp_path_factory.mktemp("one")
    return run_ranks(train, 1, plan_of(1, replicate=1), folder)[0], folder


QUICK = [plan_of(3, shard=3)]
PLANS = [plan_of(level, **mesh) for level in (2, 3) for mesh in ({"shard": 2}, {"shard": 3}, {"shard": 4})]
PLANS += [plan_of(level, replicate=2, shard=2) for level in (2, 3)]


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, marks=[] if plan in QUICK else pytest.mark.long) for plan in PLANS],
    ids=lambda plan: f"{plan.mesh}, level {plan.sharding.level}",
)
def test_whole_runs_and_resumed_ones_are_those_of_one_device(
    plan: Plan, one: tuple[States, Path], tmp_path: Path
) -> None:
    states, folder = one
    assert_equal(run_ranks(train, plan.world_size, plan, tmp_path), states)
    there = run_ranks(train, plan.world_size, plan, tmp_path / "there", folder)
    assert_equal(there, states)
    back = run_ranks(train, 1, plan_of(1, replicate=1), tmp_path / "back", tmp_path)
    assert_equal(back, states)
