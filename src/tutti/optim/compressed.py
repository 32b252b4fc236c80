"""Adam and LAMB whose momentum travels compressed, once the second moment v has settled and is frozen.

Every class updates flat weights from flat gradients. While `warm`, it is given the sum of all ranks' gradients; after
that each rank's own part of the sum, and its momentum is summed by `exchange`. What is sent is m / (sqrt(v) + eps): v
is the same on all ranks, so this is linear. A coordinate that had no gradient before v froze has v = 0, and gets the
block's magnitude from a 1-bit code, or a gradient later on: the published forms divide that by eps and go to NaN. So
sqrt(v) is at least `floor` times its root mean square over the tensor. `sizes`: elements of each tensor, one behind
the other.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, Required, TypedDict, Unpack

import torch
from torch import Tensor

from tutti.errors import PlanError


class Exchange(Protocol):
    """Sums a flat tensor over ranks with what it keeps between steps; `compress.exchange.Exchange` is one."""

    def run(self, flat: Tensor) -> None:
        """Leave the sum in `flat`, the same bits on all ranks."""

    def settle(self, finite: bool) -> None:
        """The step counts, or everything kept is as before it."""


class _Kept:
    """What a checkpoint needs of an optimizer, beside the exchange's own: tensors and numbers by name."""

    TENSORS: tuple[str, ...] = ("m", "v")
    NUMBERS: tuple[str, ...] = ("count",)

    def tensors(self) -> dict[str, Tensor]:
        """By name, numbers as float64 scalars; the tensors are the optimizer's own."""
        kept: dict[str, Tensor] = {name: getattr(self, name) for name in self.TENSORS}
        return kept | {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in self.NUMBERS}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        for name in self.TENSORS:
            getattr(self, name).copy_(tensors[name])
        for name in self.NUMBERS:
            setattr(self, name, type(getattr(self, name))(tensors[name].item()))


class Settings(TypedDict, total=False):
    """What they all have. `ranks`: over which momenta are summed; `freeze_step`: steps in which v learns."""

    ranks: Required[int]
    freeze_step: Required[int]
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    floor: float
    dtype: torch.dtype


class _Momentum(_Kept):
    """What they share: settings, moments m and v, and whether v still learns."""

    def __init__(
        self,
        sizes: Sequence[int],
        exchange: Exchange,
        *,
        ranks: int,
        freeze_step: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        floor: float = 0.1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if freeze_step < 1:
            raise PlanError(f"freeze_step = {freeze_step}; the second moment needs steps to settle: 15 to 20 % of all")
        self.exchange, self.ranks, self.freeze_step = exchange, ranks, freeze_step
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.sizes, self.floor, self.count = list(sizes), floor, 0
        self.m, self.v = (torch.zeros(sum(sizes), dtype=dtype) for _ in range(2))

    @property
    def warm(self) -> bool:
        """Whether v still learns: the next step needs the sum of all ranks' gradients."""
        return self.count < self.freeze_step


class CompressedAdam(_Momentum):
    """1-bit Adam (Tang et al. 2021) with a 1-bit exchange, 8-bit momentum Adam with one of 8 bits.

    Adam with decoupled decay for `freeze_step` steps. Then v and its correction stay what they are, and
    m = sum (b1 m / ranks + (1 - b1) g_rank), w -= lr (m / (1 - b1^t) / d + wd w), d = sqrt(v / (1 - b2^T)) + eps.
    """

    def step(self, weights: Tensor, gradient: Tensor, lr: float) -> bool:
        """Update `weights` in place; False, and nothing has changed, where a value on some rank is not finite."""
        update = self._warm_step(gradient) if self.warm else self._frozen_step(gradient)
        if update is None:
            return False
        weights.sub_(lr * (update + self.weight_decay * weights))
        return True

    def denominator(self) -> Tensor:
        """sqrt(v / (1 - b2^T)) + eps of the frozen v, with its floor."""
        root = (self.v / (1 - self.betas[1] ** self.freeze_step)).sqrt()
        return floored(root, self.sizes, self.floor) + self.eps

    def _warm_step(self, gradient: Tensor) -> Tensor | None:
        if not finite(gradient):
            return None
        beta1, beta2 = self.betas
        self.count += 1
        self.m.mul_(beta1).add_(gradient, alpha=1 - beta1)
        self.v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (self.v / (1 - beta2**self.count)).sqrt()
        return self.m / (1 - beta1**self.count) / (root + self.eps)

    def _frozen_step(self, gradient: Tensor) -> Tensor | None:
        beta1, d = self.betas[0], self.denominator()
        sent = (self.m * (beta1 / self.ranks) + gradient * (1 - beta1)) / d
        if not summed(self.exchange, sent):
            return None
        self.count += 1
        torch.mul(sent, d, out=self.m)
        return sent / (1 - beta1**self.count)


class OneBitLAMB(_Momentum):
    """1-bit LAMB (Li et al. 2021): LAMB for `freeze_step` steps, then its momentum compressed and v frozen.

    The layers' ratios are averaged while warm (0.9); after
    that they are multiplied with max (d / d_fresh), of a v that goes on with the gradient the momentum implies, within
    [0.5, 4] and 10 % a step. Tensors are scaled to one magnitude before they share a message.
    """

    TENSORS = ("m", "v", "fresh", "ratios", "factors", "scales")
    FACTOR = (0.5, 4.0)
    CHANGE = 0.1

    def __init__(self, sizes: Sequence[int], exchange: Exchange, **settings: Unpack[Settings]) -> None:
        settings.setdefault("eps", 1e-6)
        settings.setdefault("weight_decay", 0.01)
        super().__init__(sizes, exchange, **settings)
        self.fresh, self.scales = torch.zeros_like(self.m), torch.ones_like(self.m)
        self.ratios, self.factors = torch.zeros(len(sizes)).double(), torch.ones(len(sizes)).double()

    def step(self, weights: Tensor, gradient: Tensor, lr: float) -> bool:
        """Update `weights` in place; False, and nothing has changed, where a value on some rank is not finite."""
        beta1, beta2 = self.betas
        if self.warm:
            if not finite(gradient):
                return False
            self.m.mul_(beta1).add_(gradient, alpha=1 - beta1)
            self.v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        else:
            if self.count == self.freeze_step:
                self.fresh.copy_(self.v)
                self._scale()
            d = self._denominator(self.v)
            sent = (self.m * (beta1 / self.ranks) + gradient * (1 - beta1)) / d * self.scales
            if not summed(self.exchange, sent):
                return False
            before, self.m = self.m, sent / self.scales * d
            implied = (self.m - beta1 * before) / (1 - beta1)
            self.fresh.mul_(beta2).addcmul_(implied, implied, value=1 - beta2)
        self._apply(weights, lr)
        self.count += 1
        return True

    def _apply(self, weights: Tensor, lr: float) -> None:
        d = self._denominator(self.v)
        update = self.m / d + self.weight_decay * weights
        if not self.warm:
            found = [
                float((a / b).max()) if a.numel() else 1.0 for a, b in self._layers(d, self._denominator(self.fresh))
            ]
            wanted = torch.tensor(found).double().clamp(*self.FACTOR)
            self.factors = wanted.clamp(self.factors * (1 - self.CHANGE), self.factors * (1 + self.CHANGE))
        for layer, (w, step) in enumerate(self._layers(weights, update)):
            if self.warm:
                norms = float(w.norm()), float(step.norm())
                ratio = norms[0] / norms[1] if min(norms) > 0 else 1.0
                average = float(self.ratios[layer])
                self.ratios[layer] = 0.9 * average + 0.1 * ratio if self.count else ratio
            else:
                ratio = float(self.ratios[layer] * self.factors[layer])
            w.sub_(step * (lr * ratio))

    def _denominator(self, v: Tensor) -> Tensor:
        root = v.sqrt()
        return (root if self.warm else floored(root, self.sizes, self.floor)) + self.eps

    def _scale(self) -> None:
        """Every tensor to the mean of their root mean squares, as they are sent; those of zeros as they are."""
        d = self._denominator(self.v)
        sent = [part for part, _ in self._layers(self.m / d, d)]
        roots = [float(part.double().square().mean().sqrt()) if part.numel() else 0.0 for part in sent]
        mean = sum(roots) / len(roots)
        for (scale, _), root in zip(self._layers(self.scales, d), roots, strict=True):
            scale.fill_(mean / root if root > 0 and math.isfinite(mean / root) else 1.0)

    def _layers(self, one: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(torch.split(one, self.sizes), torch.split(other, self.sizes), strict=True))


def floored(root: Tensor, sizes: Sequence[int], floor: float) -> Tensor:
    """`root`, at least `floor` times its root mean square over each tensor."""
    parts = torch.split(root, list(sizes))
    return torch.cat([part.clamp(min=floor * part.square().mean().sqrt()) if part.numel() else part for part in parts])


def finite(flat: Tensor) -> bool:
    """Whether all values are."""
    return bool(flat.isfinite().all())


def summed(exchange: Exchange, flat: Tensor) -> bool:
    """Sum `flat` over ranks; whether it is finite, and so counts: the same on all ranks."""
    exchange.run(flat)
    counts = finite(flat)
    exchange.settle(counts)
    return counts
