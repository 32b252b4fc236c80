"""The gradient noise scale, measured while training from squared norms of gradients: of each part and the whole batch.

A part is one microbatch of one rank. A hook on every parameter sees what a part adds to its gradient. Only squared
norms are computed, and only in the steps that are measured; no gradient is changed. The two numbers that ranks have to
add up are sent with the losses of the next step, so nothing more is sent or waited for.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tutti.comm.world import World
from tutti.config.plan import Plan
from tutti.optim.gradient_noise_scale import NoiseAverages, NoiseEstimate, estimate_noise

NUM_SUMS = 2
"""Numbers sent with the losses: the sum of n_j |g_j|^2 over parts j, and how many parts had samples."""


def unsupported_reason(plan: Plan) -> str | None:
    """Explain why the noise scale cannot be measured under a plan, with the remedy; None if it can."""
    others = [axis for axis, degree in plan.mesh.items() if degree > 1 and axis != "replicate"]
    if others:
        return (
            f"with mesh.{others[0]} = {plan.mesh[others[0]]}, no rank has the whole gradient of a part of the batch; "
            "measure with a mesh of replicas only"
        )
    if plan.sync.compress is not None or plan.sync.mode != "synchronous":
        return "this plan's sync does not reduce gradients exactly in every step; measure with a plan that does"
    if plan.data_parallel_degree * plan.batch.num_microbatches < 2:
        return "one rank computes the whole batch at once; pass Job(num_microbatches=2) or more, or use more ranks"
    return None


@dataclass(slots=True, kw_only=True)
class _PendingMeasurement:
    """A measured step whose sums have not been added up over ranks yet.

    Attributes:
        sums: this rank's NUM_SUMS numbers.
        factor: factor from a part's measured gradient to that of its summed loss.
        whole: squared norm of the whole batch's gradient.
        counted: what the loss is a mean over, in the whole batch.
        units: samples or tokens of the batch, in the plan's unit.
    """

    step: int
    sums: Tensor
    factor: float
    whole: float
    counted: float
    units: float


class NoiseMeter:
    """Measures the noise scale every `every` steps (None: never). All ranks call the same methods in the same steps.

    Attributes:
        averages: moving averages of the estimates, which checkpoints save.
    """

    def __init__(self, every: int | None, device: torch.device) -> None:
        self.averages = NoiseAverages()
        self.every = every
        self._latest: tuple[int, NoiseEstimate] | None = None
        self._device = device
        self._sums: Tensor | None = None
        self._pending: _PendingMeasurement | None = None
        self._last_step = -1
        self._count: Tensor | float = 0.0

    @property
    def width(self) -> int:
        """How many numbers the meter adds to those that are all-reduced with the losses."""
        return 0 if self.every is None else NUM_SUMS

    @property
    def measuring(self) -> bool:
        """Whether the current step is measured."""
        return self._sums is not None

    @property
    def pending(self) -> bool:
        """Whether this rank's sums of a measured step have not been added up over ranks yet."""
        return self._pending is not None

    def begin(self, step: int) -> None:
        """Begin forward and backward. Of several in one step, the first is measured if the step is due."""
        due = self.every is not None and step % self.every == 0 and step != self._last_step
        self._sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=self._device) if due else None
        if due:
            self._last_step = step

    def counted(self, count: Tensor | float) -> None:
        """Set how many samples or tokens the next part's loss is a mean over."""
        self._count = count

    def part(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Within the context runs one part's backward, whose gradient is measured before it is accumulated.

        Args:
            parameters: parameters whose gradients are measured.
        """
        return nullcontext() if self._sums is None else self._measured(parameters, self._sums)

    @contextmanager
    def _measured(self, parameters: Iterable[nn.Parameter], sums: Tensor) -> Iterator[None]:
        squares: list[Tensor] = []
        seen: set[int] = set()

        def hook(key: int, gradient: Tensor) -> None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            # If a gradient arrives in two pieces (re-entrant checkpointing), their norms do not give that of the sum.
            # NaN then discards the step's measurement.
            factor = torch.nan if key in seen else 1.0
            seen.add(key)
            squares.append(factor * torch.linalg.vector_norm(values.detach()).double() ** 2)

        handles = [p.register_hook(partial(hook, id(p))) for p in parameters]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        count = torch.as_tensor(self._count, dtype=torch.float64, device=self._device).detach()
        there = count > 0
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self._device)
        sums[0] += torch.where(there, total / count.clamp(min=1e-300), 0.0)
        sums[1] += there

    def finish(
        self, parameters: Iterable[nn.Parameter], step: int, *, factor: float, counted: float, units: float
    ) -> None:
        """Measure the whole batch's gradient, once it is reduced and final.

        Args:
            parameters: parameters whose gradients were measured.
            step: number of the step.
            factor: a part's measured gradient times this is the gradient of its loss, summed over what the loss
                averages.
            counted: how many samples or tokens the loss of the whole batch is a mean over.
            units: samples or tokens of the batch, in the plan's unit.
        """
        if self._sums is None:
            return
        whole = torch.zeros((), dtype=torch.float64, device=self._device)
        for parameter in parameters:
            if parameter.grad is not None:
                values = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
                whole += torch.linalg.vector_norm(values.detach()).double() ** 2
        self._pending = _PendingMeasurement(
            step=step, sums=self._sums, factor=factor, whole=float(whole), counted=counted, units=units
        )
        self._sums = None

    def write(self, totals: Tensor) -> None:
        """Put this rank's sums of the last measured step at the end of `totals`, if they have not been added up yet."""
        if self._pending is not None:
            totals[-NUM_SUMS:] = self._pending.sums

    def read(self, totals: list[float]) -> None:
        """Take in the sums over all ranks of what `write` put into `totals`."""
        pending, self._pending = self._pending, None
        if pending is None or not math.isfinite(totals[-1]):
            return
        # n_j |g_j|^2 is |sum over the part|^2 / n_j.
        within, parts = totals[-NUM_SUMS] * pending.factor**2, round(totals[-1])
        estimate = estimate_noise(within, pending.whole, pending.counted, parts)
        if estimate is None:
            return
        estimate = NoiseEstimate(square=estimate.square, variance=estimate.variance * pending.units / pending.counted)
        self.averages.add(estimate)
        self._latest = (pending.step, estimate)

    def flush(self, world: World) -> None:
        """Add up pending sums over ranks now, before a checkpoint is written. Collective."""
        if self._pending is not None:
            self.read(world.sum(self._pending.sums.clone()).tolist())

    def take_row(self) -> dict[str, Any]:
        """Return a step's row fields: the newest estimates and the averages so far; empty without a new estimate."""
        if self._latest is None:
            return {}
        (step, estimate), self._latest = self._latest, None
        return {
            "noise_scale": self.averages.scale,
            "noise": {
                "step": step + 1,
                "square": estimate.square,
                "variance": estimate.variance,
                "square_mean": self.averages.square,
                "variance_mean": self.averages.variance,
                "measured": self.averages.count,
            },
        }
