"""Second moments as in exact training, where every replica steps on a gradient of its own.

Adam divides by the root of v, a moving average of squared gradients. The gradient g_i of one of p replicas has p times
the noise of their mean: E g_i^2 = S + N, but E mean(g)^2 = S + N / p. So v is up to p times as large as in exact
training, and steps are up to sqrt(p) times as short, however often replicas are averaged (the square root rule of
Malladi et al. 2022, arXiv 2205.10287, in reverse). Here v averages r g_i^2 instead, with one r per tensor:

    r = E |mean(g)|^2 / E |g_i|^2, at least 1 / p and at most 1.

Both are estimated from a few of the tensor's values, different ones in each step, over about the last ten steps. Their
sums are sent with the losses of the next step. This method is tutti's own; docs/consistency.md shows its effect.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from tutti.comm.traffic import CommHandle
from tutti.errors import PlanError
from tutti.local_sgd.replica_group import FlatVectors, ReplicaGroup
from tutti.parallel.layout import to_local

SAMPLED_VALUES, MAX_SAMPLED_PER_TENSOR = 4096, 256
"""Number of values observed in a step: of all tensors together (approximately), and of one tensor (at most)."""

DECAY = 0.9
"""Factor by which the previous sums are multiplied in each step."""

_MOMENT: Final[dict[type[Optimizer], str]] = {
    Adam: "exp_avg_sq",
    AdamW: "exp_avg_sq",
    NAdam: "exp_avg_sq",
    RAdam: "exp_avg_sq",
    RMSprop: "square_avg",
}
"""Name of the second moment by whose root each optimizer divides."""


class SecondMomentCorrection:
    """Corrects the optimizers' second moments while each replica steps on the gradient of its own samples.

    All replicas must call the same methods in the same steps.

    Args:
        replicas: the group.
        optimizers: the optimizers.
        trained: the trained parameters.

    Attributes:
        sums: the state for checkpoints: sums of |mean(g)|^2 and of |g_i|^2, shape (2, tensors); observations not yet
            summed over the replicas; number of observed updates.
    """

    def __init__(self, replicas: ReplicaGroup, optimizers: tuple[Optimizer, ...], trained: list[nn.Parameter]) -> None:
        self._replicas = replicas
        self._owners = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
        self._trained = [p for p in trained if p in self._owners]
        wanted = min(MAX_SAMPLED_PER_TENSOR, max(1, SAMPLED_VALUES // max(1, len(self._trained))))
        self._strides = [-(-p.numel() // wanted) for p in self._trained]
        self._counts = [p.numel() // stride for p, stride in zip(self._trained, self._strides, strict=True)]
        double = any(p.dtype is torch.float64 for p in self._trained)
        dtype, device = torch.float64 if double else torch.float32, self._trained[0].device
        self.sums: FlatVectors = [
            torch.zeros(2, len(self._trained), dtype=torch.float64, device=device),
            torch.zeros(sum(self._counts) + len(self._trained), dtype=dtype, device=device),
            torch.zeros(1, dtype=torch.int64),
        ]
        self._stepped: set[Optimizer] = set()
        self._hooks = [o.register_step_post_hook(lambda o, args, kwargs: self._stepped.add(o)) for o in optimizers]
        self._work: CommHandle | None = None
        self._summing: torch.Tensor | None = None

    def cancel(self) -> None:
        """Stop observing, because another object continues."""
        self._add_observations()
        for hook in self._hooks:
            hook.remove()

    def start(self) -> None:
        """Start to sum the last observations over the replicas."""
        self._add_observations()
        self._summing = self.sums[1].clone()
        self._work = self._replicas.start_sum([self._summing], self._replicas.scalar_channel)

    def updated(self) -> None:
        """Correct the update that the optimizers have made, and observe its gradients.

        Parameters whose update was skipped on this replica are left out.
        """
        self._add_observations()
        stepped = [p for p in self._trained if p.grad is not None and self._owners[p] in self._stepped]
        self._correct(stepped)
        self._stepped.clear()
        self._observe({*stepped})

    @property
    def ratios(self) -> list[float]:
        """The ratio r of each tensor; 1 if nothing has been observed."""
        whole, local = self.sums[0]  # |mean(g)|^2 and the mean of |g_i|^2, by tensor
        r = torch.where(local > 0, whole / local.clamp_min(1e-300), 1.0)
        ratios: list[float] = r.clamp(1 / self._replicas.size, 1.0).tolist()
        return ratios

    def _add_observations(self) -> None:
        """Wait for the summed observations and add them to the moving sums."""
        if self._work is None or self._summing is None:
            return
        self._work.wait()
        values, squares = self._values_and_squares(self._summing.double())
        means = torch.stack([part.square().sum() for part in self._parts(values / self._replicas.size)])
        self.sums[0].mul_(DECAY).add_(torch.stack([means, squares / self._replicas.size]))
        self.sums[1].zero_()
        self._work = self._summing = None

    def _correct(self, stepped: list[nn.Parameter]) -> None:
        """Add the missing (r - 1) g_i^2, with its weight in the moving average, to the second moments."""
        ratio = dict(zip(self._trained, self.ratios, strict=True))
        weight = {p: _weight(group) for o in self._stepped for group in o.param_groups for p in group["params"]}
        moments: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        factors: list[float] = []
        for p in (p for p in stepped if ratio[p] < 1.0):
            optimizer = self._owners[p]
            assert p.grad is not None
            moments.append(to_local(optimizer.state[p][_MOMENT[type(optimizer)]]))
            gradients.append(to_local(p.grad))
            factors.append((ratio[p] - 1.0) * weight[p])
        if moments:
            torch._foreach_addcmul_(moments, gradients, gradients, factors)

    def _observe(self, stepped: set[nn.Parameter]) -> None:
        """Observe evenly spaced values of each gradient, different ones each time, and the sum of their squares."""
        count = int(self.sums[2])
        self.sums[2] += 1
        values, squares = self._values_and_squares(self.sums[1])
        for index, (p, part) in enumerate(zip(self._trained, self._parts(values), strict=True)):
            if p not in stepped or p.grad is None:
                continue
            stride = self._strides[index]
            part.copy_(to_local(p.grad).reshape(-1)[count % stride :: stride][: part.numel()])
            squares[index] = part.square().sum()

    def _values_and_squares(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the observed values, and the sums of their squares by tensor."""
        return observations[: sum(self._counts)], observations[sum(self._counts) :]

    def _parts(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the values by tensor."""
        return torch.split(values, self._counts)


def check_correctable(optimizer: Optimizer) -> None:
    """Raise PlanError for an optimizer whose second moments cannot be corrected."""
    name = _MOMENT.get(type(optimizer))
    settings = [key for key in ("amsgrad", "centered") if any(group.get(key) for group in optimizer.param_groups)]
    if name is None or settings:
        description = type(optimizer).__name__ + "".join(f" with {key}=True" for key in settings)
        raise PlanError(
            f'sync.relaxed.optimizer_state = "corrected" does not support {description}, because it does not divide by '
            "the root of a moving average of squared gradients alone; use "
            f"{', '.join(kind.__name__ for kind in _MOMENT)} without amsgrad or centered, "
            'or optimizer_state = "own"'
        )


def _weight(group: dict[str, Any]) -> float:
    """Return the weight of a new square in the moving average."""
    return 1.0 - float(group["betas"][1] if "betas" in group else group["alpha"])
