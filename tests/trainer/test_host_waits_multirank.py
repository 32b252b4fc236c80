"""Steady steps on an accelerator: the host waits for nothing, and the numbers are those of a CPU.

The device is the tests' second one, which refuses what the host would wait for. One rank, several cases in one process.
"""

import contextlib
import functools
import math
import os
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import fakegpu
import tutti
from fakegpu import needs_fakegpu
from harness import run_ranks
from tutti.comm import world
from tutti.errors import TrainingError
from tutti.trainer.metrics import read_rows
from tutti.trainer.state_check import is_checked

pytestmark = needs_fakegpu


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training of a few steps.

    Attributes:
        awaits: times that the host waits in a steady step.
        bad: steps in which the loss is multiplied by `times`.
    """

    model: Callable[[], nn.Module] = _mlp
    optimizer: Callable[..., Optimizer] = lambda parameters: AdamW(parameters, lr=0.01)
    scheduler: Callable[[Optimizer], Any] | None = None
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.cross_entropy
    job: dict[str, Any] = field(default_factory=dict)
    awaits: int = 0
    bad: tuple[int, ...] = ()
    times: float = math.nan
    workers: int = 0
    calls: int = 1
    dtype: torch.dtype = torch.float64

    @property
    def steady(self) -> list[int]:
        """Steps, from 0, that are neither among the first nor checked, and do not compute a skipped batch again."""
        checked = {step for step in range(12) for n in range(self.calls) if is_checked(self.calls * step + n)}
        return [step for step in range(3, 12) if step not in checked and step - (not self.awaits) not in self.bad]


def _summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean over 5 of the 6 targets: gradients are rescaled once the count is known."""
    return nn.functional.cross_entropy(output, target, ignore_index=2)


CASES: dict[str, Case] = {
    "AdamW": Case(),
    "a count that is not the samples": Case(loss=_summed, job={"num_microbatches": 3}),
    "Adam, clipped": Case(optimizer=lambda p: Adam(p, lr=0.01), job={"clip_norm": 0.1}),
    "SGD with momentum": Case(optimizer=lambda p: SGD(p, lr=0.1, momentum=0.9), job={"num_microbatches": 2}),
    "fused by the script": Case(optimizer=lambda p: AdamW(p, lr=0.01, fused=True)),
    "BatchNorm, workers": Case(model=_normalised, workers=1),
    "RMSprop": Case(optimizer=lambda p: RMSprop(p, lr=0.01), awaits=1),
    "plateau": Case(scheduler=lambda o: ReduceLROnPlateau(o, patience=0, threshold=10)),
    "two calls": Case(calls=2),
    "skipped": Case(
        model=_normalised,
        optimizer=lambda p: SGD(p, lr=0.1, momentum=0.9),
        scheduler=lambda o: StepLR(o, 2, gamma=0.5),
        job={"on_nonfinite": "skip", "clip_norm": 1.0},
        bad=(4, 7),
    ),
    "skipped, RMSprop": Case(
        model=_normalised, optimizer=lambda p: RMSprop(p, lr=0.01), job={"on_nonfinite": "skip"}, bad=(4,), awaits=1
    ),
    "float16": Case(
        job={"precision": "float16", "clip_norm": 1.0},
        scheduler=lambda o: StepLR(o, 2, gamma=0.5),
        bad=(4, 6),
        times=1e6,
        dtype=torch.float32,
    ),
}


@dataclass
class Trained:
    """What a training gave."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: list[torch.Tensor] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)


def _train(case: Case, device: torch.device, folder: str) -> Trained:
    world.choose_device = lambda local_rank: device
    os.environ["TUTTI_RUN_FOLDER"] = folder
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(72, 6, generator=numbers, dtype=case.dtype)
    data = TensorDataset(inputs, torch.randint(0, 3, (72,), generator=numbers))
    torch.manual_seed(1)
    job = tutti.Job(**{"global_batch_size": 6, "seed": 1, **case.job})
    model = case.model().to(case.dtype)
    optimizer = case.optimizer(model.parameters())
    scheduler = None if case.scheduler is None else case.scheduler(optimizer)
    loading = DataLoader(data, batch_size=6, shuffle=True, num_workers=case.workers)
    factor = torch.ones(1, dtype=case.dtype)
    moved = factor.to(device)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return case.loss(output, target) * moved[0]

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_fn(model(batch[0]), batch[1])

    function = loss_fn if case.bad else case.loss
    model, optimizer, loader = job.prepare(model, optimizer, loading, function, scheduler=scheduler)
    seen = Trained()
    kept: list[Any] = []
    on_device = device.type != "cpu"
    for step, batch in enumerate(loader):
        moved.fill_(case.times if step in case.bad else 1.0)
        before = fakegpu.synchronizations()
        refusing = on_device and step in case.steady and not case.awaits
        with fakegpu.no_synchronization() if refusing else contextlib.nullcontext():
            if case.calls == 1:
                kept.append(job.step(batch))
            else:
                kept.append([job.forward_backward(loss_of, batch) for _ in range(case.calls)][-1])
                job.update()
        seen.awaited.append(fakegpu.synchronizations() - before)
        if step not in case.bad:
            seen.rates.append(optimizer.param_groups[0]["lr"])
    seen.losses = [float(loss) for loss in kept]
    seen.state = job.state_dict()
    for state in optimizer.state.values():
        seen.optimizer += [torch.as_tensor(value).cpu() for _, value in sorted(state.items()) if value is not None]
    seen.rows = [row for row in read_rows(Path(folder) / "metrics.jsonl") if row["kind"] == "step"]
    return seen


class _Root(torch.autograd.Function):
    """Zero, whose gradient is infinite where the input is marked."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, mark)
        return weight.sum() * 0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight, mark = ctx.saved_tensors
        return torch.where(mark > 0, torch.inf, 0.0).to(weight.dtype).expand_as(weight), None


STOPS = ("a loss that is NaN", "a gradient that is infinite", "nothing to average over")


@dataclass
class Stopped:
    """How a training ended: the error, the step in which it was raised, and whether the parameters stayed."""

    error: str = ""
    step: int = -1
    unchanged: bool = False
    steps_counted: int = -1
    rows: list[int] = field(default_factory=list)


def _stop(how: str, device: torch.device, folder: str) -> Stopped:
    world.choose_device = lambda local_rank: device
    os.environ["TUTTI_RUN_FOLDER"] = folder
    torch.manual_seed(1)
    targets = torch.randint(0, 3, (72,))
    if how == STOPS[2]:
        targets[24:30] = -100
    job = tutti.Job(global_batch_size=6, seed=1)
    model = _normalised().double()
    mark = torch.zeros((), device=device)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(output, target)
        if how == STOPS[0]:
            return loss * torch.where(mark > 0, torch.nan, 1.0)
        if how == STOPS[1]:
            return loss + _Root.apply(model[3].bias, mark)
        return loss

    data = DataLoader(TensorDataset(torch.randn(72, 6, dtype=torch.float64), targets), batch_size=6)
    model, _, loader = job.prepare(model, AdamW(model.parameters(), lr=0.01), data, loss_fn)
    seen, before = Stopped(), {}
    for step, batch in enumerate(loader):
        if step == 4:
            before = {name: value.clone() for name, value in model.state_dict().items()}
        mark.fill_(step == 4)
        try:
            job.step(batch)
            job.log(step=step)
        except TrainingError as error:
            seen.error, seen.step = str(error), step
            break
    run = job._run()
    seen.unchanged = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    seen.steps_counted = run.state.progress.step
    rows = read_rows(Path(folder) / "metrics.jsonl")
    seen.rows = [row["step"] for row in rows if row["kind"] in ("step", "log")]
    return seen


def _stops() -> dict[str, tuple[Stopped, Stopped]]:
    device, folder = fakegpu.load(), os.environ["TUTTI_RUN_FOLDER"]
    return {
        how: (
            _stop(how, torch.device("cpu"), f"{folder}/stop-{number}-cpu"),
            _stop(how, device, f"{folder}/stop-{number}-device"),
        )
        for number, how in enumerate(STOPS)
    }


def test_a_device_ends_the_run_a_step_late_with_the_same_words_and_parameters() -> None:
    for how, (on_cpu, on_device) in run_ranks(_stops, 1)[0].items():
        assert on_cpu.error, how
        # The device's batch is computed again a step later, when the script has reset its mark.
        found = r"; (what modules return|it arises in|samples: )[^;]*"
        assert re.sub(found, "", on_device.error) == re.sub(found, "", on_cpu.error)
        assert "step 5" in on_device.error
        assert (on_cpu.step, on_device.step) == (4, 5)
        assert on_device.unchanged
        assert on_device.steps_counted == 4
        assert on_device.rows == [1, 1, 2, 2, 3, 3, 4, 4]  # each step's row before what was logged after it


def _attempt(case: Case, device: torch.device, folder: str) -> Trained | str:
    try:
        return _train(case, device, folder)
    except RuntimeError:
        return traceback.format_exc()


def _everything(names: list[str]) -> dict[str, tuple[Trained, Trained | str]]:
    device = fakegpu.load()
    folder = os.environ["TUTTI_RUN_FOLDER"]
    return {
        name: (
            _train(CASES[name], torch.device("cpu"), f"{folder}/{number}-cpu"),
            _attempt(CASES[name], device, f"{folder}/{number}-device"),
        )
        for number, name in enumerate(names)
    }


CORE = ("AdamW", "Adam, clipped", "RMSprop", "skipped")
NAMES = [name if name in CORE else pytest.param(name, marks=pytest.mark.long) for name in CASES]


@functools.cache
def _trained(*, core: bool) -> dict[str, tuple[Trained, Trained | str]]:
    return run_ranks(_everything, 1, [name for name in CASES if (name in CORE) == core])[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_device_gives_the_numbers_of_a_cpu_without_being_waited_for(name: str) -> None:
    case, (on_cpu, on_device) = CASES[name], _trained(core=name in CORE)[name]
    assert isinstance(on_device, Trained), on_device
    tolerance = {"rel": 1e-3, "abs": 1e-3} if case.dtype is torch.float32 else {"rel": 1e-12, "abs": 1e-14}
    assert [on_device.awaited[step] for step in case.steady] == [case.awaits] * len(case.steady)
    assert on_device.losses == pytest.approx(on_cpu.losses, nan_ok=True, **tolerance)
    assert on_device.rates == pytest.approx(on_cpu.rates)
    for key, value in on_cpu.state.items():
        torch.testing.assert_close(on_device.state[key], value, rtol=tolerance["rel"], atol=tolerance["abs"])
    for one, other in zip(on_device.optimizer, on_cpu.optimizer, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance["rel"], atol=tolerance["abs"])
    for one, other in zip(on_device.rows, on_cpu.rows, strict=True):
        assert one["skipped"] == other["skipped"] == (one["step"] - 1 in case.bad)
        assert one.keys() == other.keys()
        for key in ("loss", "grad_norm", "learning_rate", "loss_scale", "samples_seen"):
            known = other[key]
            assert one[key] == (known if known is None else pytest.approx(known, **tolerance)), (one["step"], key)
