"""Steady steps of every plan on accelerators: no rank waits for its device, and values are those of CPUs.

Two ranks have the tests' second device, whose process group the host does not wait for.
"""

import contextlib
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from torch.utils.data import TensorDataset

import fakegpu
import tutti
from fakegpu import device_group, needs_fakegpu
from harness import run_ranks
from tutti.comm import world
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.environment import RankEnvironment
from tutti.trainer.state_check import is_checked

pytestmark = needs_fakegpu

STEPS = 12
STEADY = [step for step in range(3, STEPS) if not is_checked(step)]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inputs, self.head = nn.Embedding(20, 8), nn.Linear(8, 24, bias=False), nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inputs(self.embedding(tokens)).view(*tokens.shape, 3, 2, 4).permute(2, 0, 3, 1, 4)
        result = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(result.transpose(1, 2).flatten(2)).transpose(1, 2)


class _Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.large, self.head = nn.EmbeddingBag(40, 8, mode="sum"), nn.Embedding(400, 8), nn.Linear(16, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.bag(rows), self.large(rows).sum(1)], 1))


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def _convolutions() -> nn.Module:
    features = (nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Unflatten(1, (1, 8, 1)), *features, nn.Linear(4, 4))


def _mixture() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), tutti.nn.MixtureOfExperts(8, 8, experts=4), nn.Linear(8, 4))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan for two ranks.

    Attributes:
        tokens: whether a sample is eight tokens, and whether so many targets belong to it.
        awaits: times that the host waits for its device in a steady step; docs/accelerators.md says why.
    """

    mesh: dict[str, int]
    model: Callable[[], nn.Module] = _perceptron
    level: int | None = None
    microbatches: int | None = None
    tokens: tuple[bool, bool] = (False, False)
    job: dict[str, Any] = field(default_factory=dict)
    awaits: int = 0


CASES: dict[str, Case] = {
    "replicate": Case(mesh={"replicate": 2}, model=_normalised, job={"clip_norm": 0.5}),
    "shard 1": Case(mesh={"shard": 2}, level=1),
    "shard 2": Case(mesh={"shard": 2}, level=2, job={"clip_norm": 0.5}),
    "shard 3": Case(mesh={"shard": 2}, level=3, microbatches=2),
    "split": Case(mesh={"split": 2}, job={"clip_norm": 0.5}),
    "stage": Case(mesh={"stage": 2}, microbatches=2),
    "context": Case(mesh={"context": 2}, model=_Attention, tokens=(True, True)),
    "space": Case(mesh={"space": 2}, model=_convolutions),
    "expert": Case(mesh={"expert": 2}, model=_mixture, awaits=1),
    "table": Case(mesh={"table": 2}, model=_Tables, tokens=(True, False), awaits=5),
}


@dataclass
class Trained:
    """What a training gave on one rank."""

    losses: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    awaited: dict[int, int] = field(default_factory=dict)


def _data(case: Case) -> TensorDataset:
    numbers = torch.Generator().manual_seed(0)
    count = STEPS * 8
    inputs = torch.randn(count, 8, generator=numbers, dtype=torch.float64)
    if case.tokens[0]:
        inputs = torch.randint(0, 20, (count, 8), generator=numbers)
    shape, classes = ((count, 8), 20) if case.tokens[1] else ((count,), 4)
    return TensorDataset(inputs, torch.randint(0, classes, shape, generator=numbers))


def _train(case: Case, device: torch.device, folder: Path) -> Trained:
    world.choose_device = lambda local_rank: device
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TUTTI_RUN_FOLDER"] = str(folder)
    plan = Plan(
        mesh=case.mesh,  # type: ignore[arg-type]
        batch=BatchPlan(global_batch_size=8, num_microbatches=case.microbatches or 1),
        **({} if case.level is None else {"sharding": ShardingPlan(level=case.level)}),  # type: ignore[arg-type]
    )
    serialization.save(plan, folder / "given.json")
    os.environ.pop("TUTTI_PLAN", None)
    if case.mesh != {"replicate": 2}:  # without a plan, ranks also agree on a lack of memory
        os.environ["TUTTI_PLAN"] = str(folder / "given.json")
    torch.manual_seed(1)
    job = tutti.Job(global_batch_size=8, seed=1, num_microbatches=case.microbatches, **case.job)
    model = case.model().double()
    optimizer = AdamW(model.parameters(), lr=0.01)
    model, _, loader = job.prepare(model, optimizer, _data(case), nn.CrossEntropyLoss())
    seen, kept = Trained(), []
    for step, batch in enumerate(loader):
        before, hashes = fakegpu.synchronizations(), job._run().loop.guard.hashes
        compares = hashes.exact and step >= hashes.following  # replicas bit for bit, which reads one number
        refusing = device.type != "cpu" and step in STEADY and not case.awaits and not compares
        with fakegpu.no_synchronization() if refusing else contextlib.nullcontext():
            kept.append(job.step(batch))
        if step in STEADY and not compares:
            seen.awaited[step] = fakegpu.synchronizations() - before
    seen.losses = [float(loss) for loss in kept]
    seen.state = job.state_dict()
    return seen


def _initialise(environment: RankEnvironment, device: torch.device) -> int:
    dist.init_process_group(
        device_group.BACKEND,
        init_method=environment.rendezvous,
        rank=environment.rank,
        world_size=environment.world_size,
    )
    return environment.world_size


def _everything(names: list[str]) -> dict[str, tuple[Trained, Trained] | str]:
    device, folder = fakegpu.load(), Path(os.environ["TUTTI_RUN_FOLDER"])
    device_group.register()
    world._initialise = _initialise
    found: dict[str, tuple[Trained, Trained] | str] = {}
    for name in names:
        try:
            found[name] = (
                _train(CASES[name], torch.device("cpu"), folder / f"{name} cpu"),
                _train(CASES[name], device, folder / f"{name} device"),
            )
        except Exception:
            found[name] = traceback.format_exc()
            break  # ranks may be at different places
    return found


def _check(names: list[str]) -> None:
    everything = run_ranks(_everything, 2, names)
    failures = [
        f"{name}, rank {rank}:\n{pair}"
        for rank, found in enumerate(everything)
        for name, pair in found.items()
        if isinstance(pair, str)
    ]
    assert not failures, "\n".join(failures)  # those of all ranks: one of them is the cause
    for rank, found in enumerate(everything):
        for name, pair in found.items():
            assert not isinstance(pair, str)
            (on_cpu, on_device), case = pair, CASES[name]
            where = f"{name}, rank {rank}"
            assert len(on_device.awaited) >= len(STEADY) - 1, where
            assert set(on_device.awaited.values()) == {case.awaits}, where
            assert on_device.losses == pytest.approx(on_cpu.losses, rel=1e-12), where
            for key, value in on_cpu.state.items():
                torch.testing.assert_close(on_device.state[key], value, rtol=1e-12, atol=1e-13, msg=f"{where}: {key}")
        assert list(found) == names


def test_replicas_and_stages() -> None:
    _check(["replicate", "stage"])


@pytest.mark.long
def test_every_other_plan() -> None:
    _check([name for name in CASES if name not in ("replicate", "stage")])
