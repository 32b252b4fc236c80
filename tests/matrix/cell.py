"""One cell on one rank: five steps by a plan, compared tensor by tensor with what one device computed."""

import contextlib
import faulthandler
import math
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import tutti
from against_one import Trained
from matrix.families import families
from matrix.peak import recorded_peak
from tutti.comm.traffic import exchanged_nbytes
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan
from tutti.errors import TuttiError
from tutti.parallel.layout import Layout, local_tensors, to_local
from tutti.parallel.losses import loss_of
from tutti.parallel.part_guards import reading_parts

STEPS = 5
FLOOR = {torch.float64: 1e-3, torch.float32: 0.1}
"""A tensor is measured against no less than this part of the largest of its kind: what is zero but for rounding (the
gradient of a bias before batch statistics) has no relative difference."""
PATIENCE_S = 10.0
NOISES = 3.0
"""In bfloat16 a tensor may differ by so many times what bfloat16 itself changes in it on one device."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a rank is to do. `reference`: file of one device's training, written where `plan` is None."""

    family: str
    plan: dict[str, Any] | None
    batch: dict[str, Any]
    dtype: torch.dtype
    precision: str
    reference: Path
    folder: Path
    limit_s: float


@dataclass(kw_only=True)
class Outcome:
    """What became of it. `gap`: the largest difference; `excess`: what of it the precision's own noise does not
    explain; `where`: of what. `facts`: bytes held and sent, by name.
    """

    kind: Literal["done", "refused", "failed"]
    sentence: str = ""
    gap: float = 0.0
    excess: float = 0.0
    where: str = ""
    facts: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Reference:
    """One device's training. `noise`: by name, what its precision itself changes in that tensor at most, in any step,
    beside full precision; empty in full precision.
    """

    trained: Trained
    noise: dict[str, float] = field(default_factory=dict)


class Comparison:
    """The largest difference from one device so far, less NOISES times the noise of its precision."""

    def __init__(self, reference: Reference) -> None:
        self.one, self.noise = reference.trained, reference.noise
        self.gap, self.excess, self.where = 0.0, 0.0, ""

    def values(self, got: torch.Tensor, expected: torch.Tensor, floor: float, words: str, name: str) -> None:
        """Compare two tensors, relative to the size of the expected one, or to the floor."""
        gap = difference(got, expected, floor)
        where = f"{words} {name}"
        if got.shape != expected.shape:
            where = f"{where}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
        self._note(gap, where, NOISES * self.noise.get(name, 0.0))

    def parts(
        self, layout: Layout, named: Iterator[tuple[str, torch.Tensor]], wholes: dict[str, torch.Tensor], words: str
    ) -> None:
        """Compare this rank's parts with the same parts of one device's tensors."""
        floor = floor_of(wholes)
        for name, tensor in named:
            key = _key(layout, name, wholes)
            if key is None:
                self._note(float("inf"), f"{words} {name}: one device has none")
                continue
            part = to_local(tensor)
            part = part.to_dense() if part.is_sparse else part
            whole = wholes[key]
            expected = whole if part.shape == whole.shape else layout.shard_of(name).take(whole)
            self.values(part, expected, floor, words, key)

    def covers(self, run: Any, names: list[str], wholes: dict[str, torch.Tensor], words: str, *, once: bool) -> None:
        """All ranks' parts together are the whole tensors; those that count, each element once."""
        layout: Layout = run.parallel.layout
        mine = [(_key(layout, name, wholes), layout.shard_of(name), layout.counts(name)) for name in names]
        held = {name: torch.zeros(whole.shape, dtype=torch.int64) for name, whole in wholes.items()}
        counted = {name: torch.zeros_like(value) for name, value in held.items()}
        for theirs in run.parallel.world.gather(mine):
            for key, part, counts in theirs:
                if key is not None:
                    for table in (held, *([counted] if counts else [])):
                        part.put(table[key], part.take(table[key]) + 1)
        for name in wholes:
            if not bool((held[name] > 0).all()):
                self._note(float("inf"), f"{words} {name}: no rank holds all of it")
            if once and not bool((counted[name] == 1).all()):
                self._note(float("inf"), f"{words} {name}: parts are not counted once each")

    def _note(self, gap: float, where: str, noise: float = 0.0) -> None:
        excess = max(gap - noise, 0.0)
        if (excess, gap) > (self.excess, self.gap) or not self.where:
            self.gap, self.excess, self.where = gap, excess, where


def difference(got: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    """The size of the difference relative to the expected tensor's, or to the floor; infinite for other shapes or
    values that are no numbers."""
    if got.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    gap = size(got.detach().double() - expected.detach().double(), expected.dtype)
    gap /= max(size(expected, expected.dtype), floor, 1e-300)
    return math.inf if math.isnan(gap) else gap


def size(tensor: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest value; in low precision, where single values are chaotic (a ReLU turns), the root mean square."""
    values = tensor.detach().double()
    return float((values * values).mean().sqrt() if dtype == torch.float32 else values.abs().max())


def floor_of(wholes: dict[str, torch.Tensor]) -> float:
    """FLOOR of their dtype times the size of the largest tensor."""
    numbers = [whole for whole in wholes.values() if whole.is_floating_point() and whole.numel()]
    return max((FLOOR[whole.dtype] * size(whole, whole.dtype) for whole in numbers), default=0.0)


def noise_of(low: Trained, full: Trained) -> dict[str, float]:
    """By name, how far low precision is from full precision at most, in gradients of all steps and in the state."""
    noise: dict[str, float] = {"": max(abs(a - b) / abs(b) for a, b in zip(low.losses, full.losses, strict=True))}
    for some, others in [*zip(low.gradients, full.gradients, strict=True), (low.state, full.state)]:
        for name, expected in others.items():
            gap = difference(some[name], expected, floor_of(others))
            noise[name] = max(noise.get(name, 0.0), gap)
    return noise


def run_cell(task: Task) -> Outcome:
    """Carry out a task on this rank; whatever it raises is in the outcome."""
    with _recorded(task):
        try:
            outcome = _train(task)
        except TuttiError as error:
            outcome = Outcome(kind="refused", sentence=str(error))
        except BaseException:
            return Outcome(kind="failed", sentence=traceback.format_exc())
        _leave_together(task)
        return outcome


def _leave_together(task: Task) -> None:
    """Stay until all ranks are done, so that none finds others gone while it is still about to say the same."""
    (task.folder / f"rank-{os.environ['RANK']}.done").touch()
    until = time.monotonic() + PATIENCE_S
    while len(list(task.folder.glob("*.done"))) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < until:
        time.sleep(0.005)


@reading_parts()
def _train(task: Task) -> Outcome:
    torch.set_default_dtype(task.dtype)
    if task.plan is not None:
        comparison = Comparison(torch.load(task.reference, weights_only=False))
        job, trained = _trained(task, task.plan, comparison)
        _compare_end(job._run(), trained, comparison)
        return Outcome(
            kind="done",
            gap=comparison.gap,
            excess=comparison.excess,
            where=comparison.where,
            facts={**trained.facts, **_held_nbytes(job._run())},
        )
    job, trained = _trained(task, {"precision": task.precision}, None)
    reference = Reference(trained=trained)
    if task.precision != "full":
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "run-full")
        reference.noise = noise_of(trained, _trained(task, {}, None)[1])
    torch.save(reference, task.reference)
    return Outcome(kind="done", facts={**trained.facts, **_held_nbytes(job._run())})


def _trained(task: Task, fields: dict[str, Any], comparison: Comparison | None) -> tuple[tutti.Job, Trained]:
    subject = families()[task.family].subject()
    fields = {key: value for key, value in fields.items() if key != "batch"}
    plan = Plan(batch=BatchPlan(global_batch_size=subject.batch, **task.batch), **fields)
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=subject.batch, **subject.job)
    model = subject.model()
    optimizer = subject.optimizer(model.parameters(), lr=subject.rate)
    model, optimizer, loader = job.prepare(model, optimizer, subject.data, subject.loss_fn, **subject.prepare)
    trained = _steps(job, model, loader, comparison)
    trained.evaluation = job.evaluate(subject.data)
    return job, trained


def _steps(job: tutti.Job, model: torch.nn.Module, loader: Any, comparison: Comparison | None) -> Trained:
    run = job._run()
    function = loss_of(run.loop.unpack, run.loop.loss_fn)  # type: ignore[arg-type]
    trained, record = Trained([], [], {}, {}), contextlib.ExitStack()
    while len(trained.losses) < STEPS:
        for data in loader:
            gradients: list[tuple[str, torch.Tensor]] = []  # those of the step before are not held here
            if len(trained.losses) == STEPS - 2:
                begin = record.enter_context(recorded_peak(trained.facts, "peak"))
            elif len(trained.losses) == STEPS - 1:
                begin(alive_nbytes(run))
            trained.losses.append(job.forward_backward(function, data))
            if len(trained.losses) == STEPS:
                record.close()
            gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
            if comparison is None:
                trained.gradients.append({n: (g.to_dense() if g.is_sparse else g).clone() for n, g in gradients})
            else:
                _compare_step(run, trained.losses, gradients, comparison)
            trained.facts["exchanged"] = exchanged_nbytes(run.parallel.layout.traffic.take())
            job.update()
            if len(trained.losses) == STEPS:
                break
    if comparison is None:
        trained.state = {name: tensor.detach().clone() for name, tensor in local_tensors(model)}
    return trained


def _compare_step(
    run: Any, losses: list[float], gradients: list[tuple[str, torch.Tensor]], comparison: Comparison
) -> None:
    step = len(losses)
    expected, words = comparison.one.gradients[step - 1], f"step {step}: gradient of"
    loss = torch.tensor(comparison.one.losses[step - 1])
    comparison.values(torch.tensor(losses[-1]), loss, 0.0, f"step {step}: loss", "")
    comparison.parts(run.parallel.layout, iter(gradients), expected, words)
    comparison.covers(run, [name for name, _ in gradients], expected, words, once=False)


def _compare_end(run: Any, trained: Trained, comparison: Comparison) -> None:
    one, words = comparison.one, f"after step {STEPS}:"
    tensors = list(local_tensors(run.parallel.model))
    comparison.parts(run.parallel.layout, iter(tensors), one.state, words)
    comparison.covers(run, [name for name, _ in tensors], one.state, words, once=True)
    for name, value in one.evaluation.items():
        comparison.values(torch.tensor(trained.evaluation[name]), torch.tensor(value), 0.0, f"evaluation: {name}", "")


@reading_parts()
def _held_nbytes(run: Any) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state that this rank holds, each storage once, and bytes it sends
    for gradients in a step."""
    parameters = list(run.parallel.model.parameters())
    states = [v for o in run.parallel.optimizers for entries in o.state.values() for v in entries.values()]
    return {
        "parameters": _nbytes(parameters),
        "gradients": _nbytes([p.grad for p in parameters if p.grad is not None]),
        "optimizer": _nbytes([value for value in states if isinstance(value, torch.Tensor) and value.dim()]),
        "sent": run.parallel.replica.sent_nbytes,
    }


@reading_parts()
def alive_nbytes(run: Any) -> int:
    """Bytes of parameters, buffers, gradients and optimizer state of this rank, each storage once."""
    parameters = list(run.parallel.model.parameters())
    states = [v for o in run.parallel.optimizers for entries in o.state.values() for v in entries.values()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    tensors = [value for value in states if isinstance(value, torch.Tensor)]
    return _nbytes([*parameters, *run.parallel.model.buffers(), *gradients, *tensors])


def _nbytes(tensors: list[torch.Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        part = to_local(tensor)
        part = part.coalesce().values() if part.is_sparse else part
        storages[part.untyped_storage()._cdata] = part.untyped_storage().nbytes()
    return sum(storages.values())


def _key(layout: Layout, name: str, wholes: dict[str, torch.Tensor]) -> str | None:
    """The name under which one device knows a tensor: its own, or that of a tensor it is tied to."""
    names = next((names for names in layout.tied if name in names), [name])
    return next((one for one in [name, *names] if one in wholes), None)


@contextlib.contextmanager
def _recorded(task: Task) -> Iterator[None]:
    """Output goes to a file; where the rank is when its time is up too."""
    rank = os.environ["RANK"]
    os.environ["TUTTI_TIMEOUT_S"] = str(task.limit_s)
    log = os.open(task.folder / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)
    with open(task.folder / f"rank-{rank}.stack", "w") as stack:
        faulthandler.dump_traceback_later(task.limit_s, exit=True, file=stack)
        yield
        faulthandler.cancel_dump_traceback_later()
