"""Adam and LAMB with a second moment v that is frozen after some updates, so that ranks may send momentum.

The user's own optimizer stays in place. Once v is frozen, a hook before its step makes the update instead, from the
same state. With v the same on all ranks, m / d is linear in the gradient, where d = sqrt(v) + eps. So ranks sum (b1 m /
ranks + (1 - b1) g_rank) / d, compressed. The sum stands for the gradient ((sum) d - b1 m) / (1 - b1), from which the
optimizer's own rule computes m = (sum) d (Tang et al. 2021, 1-bit Adam). The published form sends m and divides by d
afterwards, which turns into NaN where v = 0. Here sqrt(v) is at least `floor` times its root mean square over the
tensor. Where the ranks' gradients cancel in the sum, it is at least `floor` / 2 times the root mean square of the
ranks' gradients.

The second bound is needed because v sees only the sum. A codec's error grows with the values that each rank encodes.
Independent gradients add up to a sum of similar norm, so dividing by sqrt(v) keeps the error in proportion. Gradients
that cancel do not: before a BatchNorm over all samples, the gradient of a bias is rounding noise, but over one rank's
samples alone it is as large as any other. Divided by sqrt(v), it would be 1e6 too large, and so would be its coding
error and that of all values in the same block.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from tutti.config.compression import STATISTICS_UPDATES
from tutti.errors import PlanError
from tutti.optim.large_batch import LAMB, SumOverShards

FROZEN_AFTER = "learned"
"""Key in a parameter's optimizer state: number of updates after which its second moment was frozen."""


PARTS, SUM = "parts", "sum"
"""Keys in a parameter's optimizer state: squared norms of the ranks' gradients, added up, and of their sum."""


CHANCE_MARGIN = 2.0
"""Gradients of ranks that do not cancel are together at most this many times as long as their sum, even by bad luck."""


RELATIVE_ROUNDING = 1e-36
"""Lower bound of the squared norm of a sum, relative to that of the ranks' gradients: rounding of float64."""


SquaredNorms = dict[nn.Parameter, tuple[float, float]]
"""By parameter: squared norms of the ranks' gradients, added up, and of their sum, both in the same unit."""


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the (n,) squared norms of the n tensors, float64."""
    return torch.stack([tensor.detach().double().square().sum() for tensor in tensors])


def accumulate_squares(squares: SquaredNorms, optimizer: Optimizer) -> None:
    """Add a step's squared norms to the optimizer state of their parameters. Norms that are not finite are skipped."""
    for parameter, (parts, total) in squares.items():
        state = optimizer.state.get(parameter)
        if state and math.isfinite(parts) and math.isfinite(total):
            state[PARTS], state[SUM] = state.get(PARTS, 0.0) + parts, state.get(SUM, 0.0) + total


def cancellation_excess(state: Mapping[str, Any]) -> float:
    """Return by how much cancellation exceeds chance: norm of the ranks' gradients over that of their sum, at least
    1.
    """
    parts, total = state.get(PARTS, 0.0), state.get(SUM, 0.0)
    return max(1.0, math.sqrt(parts / max(total, RELATIVE_ROUNDING * parts)) / CHANCE_MARGIN) if parts else 1.0


@dataclass(frozen=True, slots=True)
class FrozenMoment:
    """Momentum of one parameter whose second moment is frozen.

    Attributes:
        m: the momentum.
        beta1: decay rate of the momentum.
        divisor: what the momentum is divided by before it is sent.
    """

    m: Tensor
    beta1: float
    divisor: Tensor

    def to_send(self, gradient: Tensor, ranks: int) -> None:
        """Replace, in place, this rank's part of the summed gradient by its part of the summed momentum."""
        gradient.mul_(1 - self.beta1).add_(self.m, alpha=self.beta1 / ranks).div_(self.divisor)

    def to_gradient(self, total: Tensor) -> None:
        """Replace, in place, the summed momentum by the gradient that it stands for."""
        total.mul_(self.divisor).sub_(self.m, alpha=self.beta1).div_(1 - self.beta1)


WholeMoments = dict[nn.Parameter, tuple[FrozenMoment, dict[str, Any]]]
"""By whole parameter: its moment and its parameter group."""


class FrozenSecondMoment(ABC):
    """Makes the updates of an optimizer with a frozen second moment v, after `freeze_step` ordinary updates.

    Whether v is frozen is part of the optimizer state, so checkpoints restore it. A parameter without a gradient before
    the freeze has no `moment` and cannot be updated afterwards. An optimizer has at most one `FrozenSecondMoment`.

    Args:
        optimizer: the optimizer; hooks are added to its step.
        freeze_step: number of updates after which v is frozen.
        floor: lower bound of sqrt(v), relative to its root mean square over the tensor.

    Attributes:
        over_parts: adds up values over ranks that hold parts of the same tensor, so that root mean squares are those of
            whole tensors. None where every rank holds whole tensors.
        agreed: returns the largest count over all ranks, where ranks hold parts of tensors.
        on_frozen: called once v has been frozen; may set `whole_moments`.
        whole_moments: moments of whole parameters whose state is divided among ranks. They follow each update.
        observed_norms: squared norms of the ranks' gradients for the next update, and of their sums. They are set, the
            same on all ranks, where `wants_statistics` asks for them.

    Raises:
        PlanError: if `freeze_step` is below 1, or the optimizer is not one that this class can drive.
    """

    over_parts: SumOverShards | None = None
    agreed: Callable[[int], int] | None = None
    on_frozen: Callable[[], None] | None = None

    def __init__(self, optimizer: Optimizer, freeze_step: int, *, floor: float = 0.1) -> None:
        if freeze_step < 1:
            raise PlanError(
                f"freeze_step = {freeze_step}; the second moment must learn before it is frozen: give 15 to 20 % of "
                "all steps"
            )
        self.check(optimizer)
        self.optimizer, self.freeze_step, self.floor = optimizer, freeze_step, floor
        self._divisors: dict[nn.Parameter, tuple[Tensor, int, Tensor]] = {}
        self._set_aside: list[tuple[nn.Parameter, Tensor]] = []
        self._numbers: dict[nn.Parameter, int] = {}
        self._settled = False
        self._count: int | None = None
        self.observed_norms: SquaredNorms = {}
        self.whole_moments: WholeMoments = {}
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @classmethod
    @abstractmethod
    def check(cls, optimizer: Optimizer) -> None:
        """Raise PlanError for an optimizer that this class cannot drive."""

    @property
    def frozen(self) -> bool:
        """Whether v is frozen, so that the next reduction is of momentum."""
        return bool(self.whole_moments) or any(FROZEN_AFTER in state for state in self.optimizer.state.values())

    @property
    def wants_statistics(self) -> bool:
        """Whether the next reduction should collect `observed_norms`, the same on all ranks.

        After a checkpoint was loaded this is true until the number of updates is known.
        """
        count = 0 if self._count is None and not self.optimizer.state else self._count
        return not self.frozen and (count is None or count >= self.freeze_step - STATISTICS_UPDATES)

    def moment(self, parameter: nn.Parameter) -> FrozenMoment | None:
        """Return what is needed to send a parameter's momentum; None where its v has learned nothing."""
        if parameter in self.whole_moments:
            return self.whole_moments[parameter][0]
        state = self.optimizer.state.get(parameter, {})
        if FROZEN_AFTER not in state:
            return None
        beta1 = float(self._group_of(parameter)["betas"][0])
        return FrozenMoment(state["exp_avg"], beta1, self._sent_by(parameter))

    @abstractmethod
    def _advance(self, m: Tensor, gradient: Tensor, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Add a gradient to the momentum m, in place, before the parameter is updated."""

    @abstractmethod
    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Update a parameter whose v is frozen."""

    def _begun(self, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:  # noqa: B027
        """Prepare the state of a parameter whose v has just been frozen."""

    def _learned(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:  # noqa: B027
        """Record statistics after the optimizer has made an update of its own."""

    def _sent_by(self, parameter: nn.Parameter) -> Tensor:
        """Return what the momentum is divided by before it is sent: the update's divisor, so that values have similar
        size.
        """
        return self._divisor(parameter)

    def _divisor(self, parameter: nn.Parameter) -> Tensor:
        """Return sqrt(v) + eps of the frozen v, bias-corrected, with its lower bound."""
        state = self.optimizer.state[parameter]
        v = state["exp_avg_sq"]
        cached = self._divisors.get(parameter)
        if cached is not None and cached[0] is v and cached[1] == v._version:
            return cached[2]
        divisor = _root(v, state[FROZEN_AFTER], self._group_of(parameter), least=state["least"])
        self._divisors[parameter] = (v, v._version, divisor)
        return divisor

    def _group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        groups = self.optimizer.param_groups
        number = self._numbers.get(parameter)
        if number is None:
            for number, group in enumerate(groups):
                self._numbers.update(dict.fromkeys(group["params"], number))
            number = self._numbers[parameter]
        return groups[number]

    @torch.no_grad()
    def _before(self, *arguments: Any) -> None:
        """Once v is frozen, make the update, and hide the gradients from the optimizer's own step."""
        if not self.frozen:
            return
        for parameter, (moment, group) in self.whole_moments.items():
            if parameter.grad is not None:
                self._advance(moment.m, parameter.grad, parameter, group)
        for parameter, group in parameters_with_groups(self.optimizer):
            if parameter.grad is None:
                continue
            state = self.optimizer.state.get(parameter, {})
            if FROZEN_AFTER in state:
                self._update(parameter, parameter.grad, group, state)
            self._set_aside.append((parameter, parameter.grad))
            parameter.grad = None

    @torch.no_grad()
    def _after(self, *arguments: Any) -> None:
        """Restore hidden gradients; before the freeze, collect statistics and freeze v when it is due."""
        for parameter_set_aside, gradient in self._set_aside:
            parameter_set_aside.grad = gradient
        self._set_aside = []
        if self._settled:
            return
        if not self.frozen:
            for parameter, _ in parameters_with_groups(self.optimizer):
                if parameter in self.optimizer.state:
                    self._learned(parameter, self.optimizer.state[parameter])
        count = self.freeze_step if self.frozen else update_count(self.optimizer)
        count = count if self.agreed is None else self.agreed(count)  # a rank may hold no parameter with a count
        if not self.frozen and count > self.freeze_step - STATISTICS_UPDATES:
            accumulate_squares(self.observed_norms, self.optimizer)
        self.observed_norms, self._count = {}, count
        if count >= self.freeze_step:
            self._freeze()
            if self.on_frozen is not None:
                self.on_frozen()
            self._settled = True

    def _freeze(self) -> None:
        """Freeze v of all parameters whose v has learned."""
        states = self.optimizer.state
        live = [
            (p, group, states[p])
            for p, group in parameters_with_groups(self.optimizer)
            if "exp_avg_sq" in states.get(p, {})
        ]
        means, statistics = _means(live, self.over_parts), _gradient_statistics(live, self.over_parts)
        for (parameter, group, state), mean, norms in zip(live, means, statistics, strict=True):
            if mean > 0 and FROZEN_AFTER not in state:
                state[PARTS], state[SUM] = norms
                state[FROZEN_AFTER] = float(state["step"])
                rms = math.sqrt(mean / (1 - group["betas"][1] ** int(state["step"])))
                state["least"] = self.floor * cancellation_excess(state) * rms
                self._begun(parameter, group, state)


class FrozenAdam(FrozenSecondMoment):
    """Drives torch's Adam and AdamW, each with its own weight decay.

    m = b1 m + (1 - b1) g, w -= lr (m / (1 - b1^t)) / d.
    """

    @classmethod
    def check(cls, optimizer: Optimizer) -> None:
        if unwrap(type(optimizer).step) is not unwrap(Adam.step):
            raise PlanError(
                f"the momentum of {type(optimizer).__name__} is not Adam's; use torch.optim.Adam or AdamW, or compress "
                "gradients: one-bit"
            )
        for name in ("amsgrad", "maximize", "differentiable"):
            if any(group.get(name) for group in optimizer.param_groups):
                raise PlanError(f"Adam with {name}=True cannot freeze its second moment; leave {name} out")

    def _advance(self, m: Tensor, gradient: Tensor, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        m.lerp_(gradient, 1 - group["betas"][0])

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        beta1, rate, decay = group["betas"][0], float(group["lr"]), group["weight_decay"]
        state["step"] += 1
        self._advance(state["exp_avg"], gradient, parameter, group)
        if decay and group.get("decoupled_weight_decay", False):
            parameter.mul_(1 - rate * decay)
        parameter.addcdiv_(state["exp_avg"], self._divisor(parameter), value=-rate / (1 - beta1 ** int(state["step"])))


class FrozenLAMB(FrozenSecondMoment):
    """Drives LAMB (Li et al. 2021, 1-bit LAMB): the layers' ratios are averaged until v is frozen.

    Afterwards each ratio is multiplied with max(d / d_fresh). d_fresh belongs to a second moment that continues to
    learn from the gradients recovered from momentum. The factor stays within [0.5, 4] and changes by at most 10 % per
    update.
    """

    FACTOR = (0.5, 4.0)
    CHANGE = 0.1
    KEEP = 0.9

    @classmethod
    def check(cls, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, LAMB) or unwrap(type(optimizer).step) is not unwrap(LAMB.step):
            raise PlanError(
                f"the momentum of {type(optimizer).__name__} is not LAMB's; use tutti.optim.large_batch.LAMB, or "
                "compress gradients: one-bit"
            )
        if optimizer.normalise:
            raise PlanError(
                "NVLAMB divides gradients by their norm over all ranks, which is unknown where ranks send momentum; "
                "use LAMB"
            )

    def _learned(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        assert isinstance(self.optimizer, LAMB)
        ratio = self.optimizer.ratios.get(parameter)
        if ratio is not None:
            state["ratio"] = self.KEEP * state["ratio"] + (1 - self.KEEP) * ratio if "ratio" in state else ratio

    def _begun(self, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        size = float((state["exp_avg"] / self._divisor(parameter)).double().square().mean().sqrt())
        if cancellation_excess(state) > 1:  # ranks send their own gradients, which are longer than the sum
            d = float(self._divisor(parameter).double().square().mean().sqrt())
            size = max(size, (1 - group["betas"][0]) * CHANCE_MARGIN * state["least"] / self.floor / d)
        usable = size > 0 and math.isfinite(1 / size)
        state.update(fresh=state["exp_avg_sq"].clone(), factor=1.0, size=size if usable else 1.0)
        if "ratio" not in state:  # v has learned in a run that did not average ratios
            step = state["exp_avg"] / self._divisor(parameter) + group["weight_decay"] * parameter
            norms = float(parameter.norm()), float(step.norm())
            state["ratio"] = norms[0] / norms[1] if min(norms) > 0 else 1.0

    def _sent_by(self, parameter: nn.Parameter) -> Tensor:
        """Return a divisor that sends each layer with root mean square 1, because LAMB's layers differ in magnitude."""
        return self._divisor(parameter) * float(self.optimizer.state[parameter]["size"])

    def _advance(self, m: Tensor, gradient: Tensor, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        m.mul_(group["betas"][0]).add_(gradient, alpha=1 - group["betas"][0])

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state["step"] += 1
        self._advance(state["exp_avg"], gradient, parameter, group)
        state["fresh"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        d = self._divisor(parameter)
        wanted = float(
            (d / _root(state["fresh"], state["step"], group, share=self.floor * cancellation_excess(state))).max()
        )
        low, high = state["factor"] * (1 - self.CHANGE), state["factor"] * (1 + self.CHANGE)
        state["factor"] = min(max(min(max(wanted, self.FACTOR[0]), self.FACTOR[1]), low), high)
        step = state["exp_avg"] / (1 - beta1 ** int(state["step"])) / d + group["weight_decay"] * parameter
        ratio = state["ratio"] * state["factor"] if group["adapt"] else 1.0
        parameter.sub_(step * (group["lr"] * ratio))


ParameterStates = list[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]]
"""Parameters, each with its parameter group and its optimizer state."""


def parameters_with_groups(optimizer: Optimizer) -> list[tuple[nn.Parameter, dict[str, Any]]]:
    """Return the optimizer's parameters, each with its parameter group."""
    return [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]


def update_count(optimizer: Optimizer) -> int:
    """Return the number of updates so far, of the parameter that had the most."""
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)


def _root(v: Tensor, count: float, group: dict[str, Any], *, least: float | None = None, share: float = 0.0) -> Tensor:
    """Return sqrt(v) + eps, bias-corrected. sqrt(v) is at least `least`, or `share` of its root mean square."""
    root = (v / (1 - group["betas"][1] ** int(count))).sqrt()
    least = share * float(root.square().mean().sqrt()) if least is None else least
    result: Tensor = root.clamp(min=least).add_(float(group["eps"]))
    return result


def _means(live: ParameterStates, over_parts: SumOverShards | None) -> list[float]:
    """Return the mean of v over each whole tensor."""
    sums = [state["exp_avg_sq"].double().sum() for _, _, state in live]
    sizes = [torch.tensor(float(p.numel()), dtype=torch.float64) for p, _, _ in live]
    return [total / max(size, 1.0) for total, size in _over_parts(live, sums, sizes, over_parts)]


def _gradient_statistics(live: ParameterStates, over_parts: SumOverShards | None) -> list[tuple[float, float]]:
    """Return the squared norms of the ranks' gradients and of their sum, for each whole tensor."""
    parts = [torch.tensor(state.get(PARTS, 0.0), dtype=torch.float64) for _, _, state in live]
    sums = [torch.tensor(state.get(SUM, 0.0), dtype=torch.float64) for _, _, state in live]
    return _over_parts(live, parts, sums, over_parts)


def _over_parts(
    live: ParameterStates, one: list[Tensor], other: list[Tensor], over_parts: SumOverShards | None
) -> list[tuple[float, float]]:
    """Add up two numbers of each parameter over ranks that hold parts of its tensor. Collective where some ranks do."""
    stacked = torch.stack([*one, *other]) if live else torch.zeros(0, dtype=torch.float64)
    if over_parts is not None:
        stacked = over_parts(stacked, [p for p, _, _ in live] * 2)
    values = stacked.tolist()
    return list(zip(values[: len(live)], values[len(live) :], strict=True))
