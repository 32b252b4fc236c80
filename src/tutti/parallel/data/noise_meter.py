"""The gradient noise scale, measured while training: squared norms of every part's gradient and of the whole batch's.

A hook on every parameter sees what one microbatch of this rank adds to its gradient. Only squared norms are taken, in
the steps that are measured; no gradient is changed. The two numbers that ranks must add up travel with the losses of
the next step, so nothing more is sent or waited for.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tutti.comm.world import World
from tutti.config.plan import Plan
from tutti.optim.gradient_noise_scale import NoiseAverages, NoiseEstimate, estimate_noise

NUM_SUMS = 2
"""Numbers that travel with the losses: the sum of n_j |g_j|^2, and how many parts had samples."""


def unsupported_reason(plan: Plan) -> str | None:
    """Why the noise scale cannot be measured under a plan, with the remedy; None where it can."""
    others = [axis for axis, degree in plan.mesh.items() if degree > 1 and axis != "replicate"]
    if others:
        return (
            f"the gradient of one part of a batch is on no rank as a whole with mesh.{others[0]} = "
            f"{plan.mesh[others[0]]}; measure with replicas only"
        )
    if plan.sync.compress is not None or plan.sync.mode != "synchronous":
        return "gradients are not summed exactly by this plan's sync; measure with exact sums"
    if plan.data_parallel_degree * plan.batch.num_microbatches < 2:
        return "one rank computes the batch in one piece; give Job(num_microbatches=2) or more, or use more ranks"
    return None


@dataclass(slots=True, kw_only=True)
class _PendingMeasurement:
    """A measured step whose sums over ranks are still to come."""

    step: int
    sums: Tensor
    factor: float
    whole: float
    counted: float
    units: float


class NoiseMeter:
    """Measures every `every` steps (None: never). All ranks call the same methods in the same steps."""

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
        """Numbers that it adds to those summed with the losses."""
        return 0 if self.every is None else NUM_SUMS

    @property
    def measuring(self) -> bool:
        """Whether the step under way is measured."""
        return self._sums is not None

    def begin(self, step: int) -> None:
        """A forward and backward of step `step` begins; the first of a step is measured."""
        due = self.every is not None and step % self.every == 0 and step != self._last_step
        self._sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=self._device) if due else None
        if due:
            self._last_step = step

    def counted(self, count: Tensor | float) -> None:
        """What the loss of the part that comes is a mean over: samples or tokens."""
        self._count = count

    @contextmanager
    def part(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Inside runs one part's backward: its gradient is measured before it is added to those of other parts."""
        if self._sums is None:
            yield
            return
        squares: list[Tensor] = []
        seen: set[int] = set()

        def hook(key: int, gradient: Tensor) -> None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            # A second piece (re-entrant checkpointing) cannot be added up from norms: the step is then left out.
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
        self._sums[0] += torch.where(there, total / count.clamp(min=1e-300), 0.0)
        self._sums[1] += there

    def finish(
        self, parameters: Iterable[nn.Parameter], step: int, *, factor: float, counted: float, units: float
    ) -> None:
        """Gradients are summed and final. `factor`: a part's gradient as measured, times this, is the sum over its
        part of what the loss is a mean over; `counted`: that mean's number in the batch; `units`: of the plan's unit.
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
        """Put this rank's sums of the last measured step, if they are still to be added up, at the end of `totals`."""
        if self._pending is not None:
            totals[-NUM_SUMS:] = self._pending.sums

    def read(self, totals: list[float]) -> None:
        """Take the sums over all ranks of what `write` gave."""
        pending, self._pending = self._pending, None
        if pending is None or not math.isfinite(totals[-1]):
            return
        # n_j |g_j|^2 is |sum over the part|^2 / n_j.
        within, parts = totals[-NUM_SUMS] * pending.factor**2, round(totals[-1])
        found = estimate_noise(within, pending.whole, pending.counted, parts)
        if found is None:
            return
        found = NoiseEstimate(square=found.square, variance=found.variance * pending.units / pending.counted)
        self.averages.add(found)
        self._latest = (pending.step, found)

    def flush(self, world: World) -> None:
        """Add up what is still to come, now: before a checkpoint is written. Collective."""
        if self._pending is not None:
            self.read(world.sum(self._pending.sums.clone()).tolist())

    def take_row(self) -> dict[str, Any]:
        """What a step's row says once a measurement is complete: its estimates, and the averages so far."""
        if self._latest is None:
            return {}
        (step, found), self._latest = self._latest, None
        return {
            "noise_scale": self.averages.scale,
            "noise": {
                "step": step + 1,
                "square": found.square,
                "variance": found.variance,
                "square_mean": self.averages.square,
                "variance_mean": self.averages.variance,
                "measured": self.averages.count,
            },
        }
