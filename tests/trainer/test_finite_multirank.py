"""A gradient that is not finite while the loss is: no rank that steps alike makes the update, nothing remembers it."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.compression import parse_compression
from tutti.config.plan import BatchPlan, Plan, ShardingPlan, SyncPlan
from tutti.config.sync_notation import parse_sync
from tutti.parallel.layout import gather_whole, local_tensors, to_local

STEPS, SPOILT = 4, 2
"""Steps, and the one in which a gradient of the last rank is spoilt after the loss was computed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """`factor`: what the gradient is multiplied with; `plan`: its fields."""

    factor: float = torch.nan
    plan: dict[str, Any] = field(default_factory=dict)
    compress: str = ""
    sync: str = "synchronous"


CASES = {
    "one": Case(plan={"mesh": {"replicate": 1}}),
    "exact": Case(),
    "exact, infinite": Case(factor=torch.inf),
    "too large for the code": Case(factor=1e8, compress="float16"),
    "too large, kept": Case(factor=1e8, compress="float16,feedback=true"),
    "one-bit": Case(compress="one-bit"),
    "top-k": Case(compress="top-k,density=0.5"),
    "powersgd": Case(compress="powersgd,rank=1"),
    "factors": Case(compress="factors"),
    "ZeRO-1": Case(plan={"mesh": {"shard": 2}, "sharding": ShardingPlan(level=1)}),
    "ZeRO-2": Case(plan={"mesh": {"shard": 2}, "sharding": ShardingPlan(level=2)}),
    "ZeRO-3": Case(plan={"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3)}),
    "FSDP2": Case(plan={"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3, engine="fsdp2")}),
    "ZeRO-2 in code": Case(
        factor=1e8, compress="float16", plan={"mesh": {"shard": 2}, "sharding": ShardingPlan(level=2)}
    ),
    "split": Case(plan={"mesh": {"split": 2}}),
    "stage": Case(plan={"mesh": {"stage": 2}}),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(32, 6, generator=generator), torch.arange(32) % 3)


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if "adam" in case.compress:
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@dataclass
class Seen:
    """`states[step]`: whole tensors after the step (this rank's, if replicas differ); `kept`: what its codes keep."""

    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    kept: list[dict[str, torch.Tensor]] = field(default_factory=list)
    said: str = ""


def prepared(case: Case, on_nonfinite: Any) -> tuple[tutti.Job, nn.Module, Any]:
    mesh = {"replicate": int(os.environ["WORLD_SIZE"])}
    sync = parse_sync(case.sync)
    if case.compress:
        sync = SyncPlan(compress=parse_compression(case.compress))
    plan = Plan(**{"batch": BatchPlan(global_batch_size=8), "mesh": mesh, "sync": sync, **case.plan})
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{len(list(Path.cwd().glob('run-*')))}")
    job = tutti.Job(global_batch_size=8, on_nonfinite=on_nonfinite)
    built: Any = model()
    built, _, loader = job.prepare(built, _optimizer(case, built), data(), F.cross_entropy)
    return job, built, loader


def trained(case: Case, on_nonfinite: str = "skip") -> Seen:
    job, built, loader = prepared(case, on_nonfinite)
    run, seen = job._run(), Seen()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0])
        if run.state.progress.step == SPOILT and run.parallel.world.rank == run.parallel.world.world_size - 1:
            output.register_hook(lambda gradient: gradient * case.factor)
        return F.cross_entropy(output, batch[1])

    def look() -> None:
        parts = {name: to_local(tensor).clone() for name, tensor in local_tensors(built)}
        seen.states.append(
            parts if run.state.consistency.diverged else gather_whole(run.parallel.layout, run.parallel.world, parts)
        )
        compressor = run.parallel.replica.compressor
        exchanges = [] if compressor is None else [*compressor.exchanges.values()]
        exchanges += [one for part in compressor.parts for one in part._exchanges()] if compressor else []
        tensors = [(str(number), one.tensors()) for number, one in enumerate(exchanges)]
        seen.kept.append({n + name: value.clone() for n, some in tensors for name, value in some.items()})

    look()
    for batch in loader:
        try:
            seen.losses.append(job.forward_backward(loss, batch))
        except tutti.TuttiError as error:
            seen.said = str(error)
            look()
            return seen
        job.update()
        look()
    run.state.consistency.finish(run.parallel)
    run.state.consistency.on_exit(run.parallel)
    return seen


def all_trained(names: list[str]) -> dict[str, tuple[Seen, Seen]]:
    return {name: (trained(CASES[name]), trained(CASES[name], "stop")) for name in names}


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_no_rank_makes_an_update_from_a_gradient_that_is_not_finite(size: int) -> None:
    names = [name for name in CASES if (name == "one") == (size == 1)]
    ranks = run_ranks(all_trained, size, names)
    for name in names:
        for rank in ranks:
            skipped, stopped = rank[name]
            assert all(map(torch.isfinite, map(torch.tensor, skipped.losses))), name
            assert len(skipped.losses) == STEPS
            for step in range(STEPS):
                before, after = skipped.states[step : step + 2]
                moved = {key for key, value in after.items() if not torch.equal(value, before[key])}
                assert bool(moved) == (step != SPOILT), (name, step, moved)
            assert all(bool(value.isfinite().all()) for value in skipped.states[-1].values()), name
            before, after = skipped.kept[SPOILT : SPOILT + 2]
            assert all(torch.equal(value, before[key]) for key, value in after.items()), name
            assert stopped.said.startswith("the loss is finite, but the gradient of "), (name, stopped.said)
            assert f"at step {SPOILT + 1}" in stopped.said
            assert f"parameters are as they were after step {SPOILT}" in stopped.said
            assert stopped.said == ranks[0][name][1].said, name
            assert all(torch.equal(value, stopped.states[SPOILT][key]) for key, value in stopped.states[-1].items())


def diverged(sync: str) -> Seen:
    return trained(Case(sync=sync))


@pytest.mark.parametrize("sync", ["local:100", "ensemble"])
def test_a_replica_of_its_own_leaves_out_its_own_update(sync: str) -> None:
    first, second = run_ranks(diverged, 2, sync)
    for step in range(STEPS):
        for rank, seen in enumerate((first, second)):
            before, after = seen.states[step : step + 2]
            moved = any(not torch.equal(value, before[name]) for name, value in after.items())
            assert moved == ((rank, step) != (1, SPOILT)), (rank, step)
            assert all(bool(value.isfinite().all()) for value in after.values())


def zero_one(on_nonfinite: str) -> Seen:
    return trained(Case(compress="zero-one-adam,freeze_step=1"), on_nonfinite)


def test_replicas_of_zero_one_adam_are_equal_whenever_they_agree() -> None:
    """Here after every update: what a momentum stands for needs the same rates on all."""
    first, second = run_ranks(zero_one, 2, "skip")
    for step, (one, other) in enumerate(zip(first.states, second.states, strict=True)):
        weights = {name: value for name, value in one.items() if "running" not in name}
        assert all(torch.equal(value, other[name]) for name, value in weights.items()), step
        assert all(bool(value.isfinite().all()) for value in one.values()), step
    said = {seen.said for seen in run_ranks(zero_one, 2, "stop")}
    assert len(said) == 1
    assert "the gradient of " in said.pop()


def spoilt_losses(words: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], list[bool]]:
    """Losses, the state at the end and which steps left everything as it was; one sample is not a number."""
    job, built, loader = prepared(Case(**words), "skip")
    loader.shares.source.dataset.tensors[0][5] = torch.nan
    losses, same = [], []
    for _ in range(2):
        for batch in loader:
            before = {name: value.clone() for name, value in built.state_dict().items()}
            losses.append(job.step(batch))
            same.append(all(torch.equal(value, before[name]) for name, value in built.state_dict().items()))
    return losses, {name: value.clone() for name, value in built.state_dict().items()}, same


@pytest.mark.parametrize("words", [{}, {"compress": "one-bit"}, {"sync": "local:2"}], ids=str)
def test_running_statistics_know_nothing_of_a_step_that_is_left_out(words: dict[str, Any]) -> None:
    for losses, state, same in run_ranks(spoilt_losses, 2, words):
        bad = [not torch.tensor(loss).isfinite() for loss in losses]
        assert bad.count(True) == 2  # once an epoch
        assert same == bad or (words.get("sync") and all(s or not b for s, b in zip(same, bad, strict=True)))
        assert all(bool(value.isfinite().all()) for value in state.values())


def of_one_sample(sync: str, tracked: bool) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Global batches of as many samples as there are ranks."""
    plan = Plan(batch=BatchPlan(global_batch_size=2), mesh={"replicate": 2}, sync=parse_sync(sync))
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "run")
    job = tutti.Job(global_batch_size=2)
    built: Any = model()
    built[1] = nn.BatchNorm1d(8, track_running_stats=tracked)
    built, _, loader = job.prepare(built, torch.optim.SGD(built.parameters(), lr=0.01), data(), F.cross_entropy)
    losses = []
    for batch in loader:
        try:
            losses.append(job.step(batch))
        except tutti.TuttiError as error:
            return losses, {}, str(error)
    state = {name: value.clone() for name, value in built.state_dict().items()}
    job._run().state.consistency.finish(job._run().parallel)
    return losses, state, ""


def test_a_replica_with_one_sample_normalises_it_with_running_statistics() -> None:
    for losses, state, said in run_ranks(of_one_sample, 2, "local:4", True):
        assert not said
        assert len(losses) == 16
        assert torch.equal(state["1.running_mean"], torch.zeros(8))
        assert not torch.equal(state["1.weight"], torch.ones(8))
    for losses, _, said in run_ranks(of_one_sample, 2, "local:4", False):
        assert not losses
        assert "keeps no running statistics to do it with" in said
