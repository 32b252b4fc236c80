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
from tutti.runtime.layout import gather_whole, local, local_tensors
from tutti.spec import codec
from tutti.spec.compression import parse_compression
from tutti.spec.plan import BatchPlan, Plan, Sharding, Sync
from tutti.spec.sync_words import parse_sync

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
    "ZeRO-1": Case(plan={"mesh": {"shard": 2}, "sharding": Sharding(level=1)}),
    "ZeRO-2": Case(plan={"mesh": {"shard": 2}, "sharding": Sharding(level=2)}),
    "ZeRO-3": Case(plan={"mesh": {"shard": 2}, "sharding": Sharding(level=3)}),
    "ZeRO-2 in code": Case(factor=1e8, compress="float16", plan={"mesh": {"shard": 2}, "sharding": Sharding(level=2)}),
    "split": Case(plan={"mesh": {"split": 2}}),
    "stage": Case(plan={"mesh": {"stage": 2}}),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(32, 6, generator=generator), torch.arange(32) % 3)


@dataclass
class Seen:
    """`states[step]`: whole tensors after the step (this rank's, where replicas differ); `kept`: what its codes keep."""

    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    kept: list[dict[str, torch.Tensor]] = field(default_factory=list)
    said: str = ""


def prepared(case: Case, on_nonfinite: Any, **arguments: Any) -> tuple[tutti.Job, nn.Module, Any]:
    mesh = {"replicate": int(os.environ["WORLD_SIZE"])}
    sync = parse_sync(case.sync)
    if case.compress:
        sync = Sync(compress=parse_compression(case.compress))
    plan = Plan(**{"batch": BatchPlan(global_batch_size=8), "mesh": mesh, "sync": sync, **case.plan})
    os.environ["TUTTI_PLAN"] = str(codec.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{len(list(Path.cwd().glob('run-*')))}")
    job = tutti.Job(global_batch_size=8, on_nonfinite=on_nonfinite, **arguments)
    built: Any = model()
    built, _, loader = job.prepare(built, torch.optim.SGD(built.parameters(), lr=0.01, momentum=0.9), data())
    return job, built, loader


def trained(case: Case, on_nonfinite: str = "skip") -> Seen:
    job, built, loader = prepared(case, on_nonfinite)
    run, seen = job._run(), Seen()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0])
        if run.progress.step == SPOILT and run.world.rank == run.world.world_size - 1:
            output.register_hook(lambda gradient: gradient * case.factor)
        return F.cross_entropy(output, batch[1])

    def look() -> None:
        parts = {name: local(tensor).clone() for name, tensor in local_tensors(built)}
        seen.states.append(parts if run.consistency.apart else gather_whole(run.layout, run.world, parts))
        compressor = run.replica.compressor
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
    run.consistency.finish(run)
    run.consistency.left(run)
    return seen


def all_trained(names: list[str]) -> dict[str, tuple[Seen, Seen]]:
    return {name: (trained(CASES[name]), trained(CASES[name], "stop")) for name in names}


@pytest.mark.parametrize("size", [1, 2])
def test_no_rank_makes_an_update_from_a_gradient_that_is_not_finite(size: int) -> None:
    names = [name for name in CASES if (name == "one") == (size == 1)]
    ranks = run_ranks(all_trained, size, names, timeout_s=110)
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
            assert f"parameters are as after step {SPOILT}" in stopped.said
            assert stopped.said == ranks[0][name][1].said, name
            assert all(torch.equal(value, stopped.states[SPOILT][key]) for key, value in stopped.states[-1].items())
