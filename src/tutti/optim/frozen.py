"""Adam and LAMB whose second moment v stands still after a number of updates, so that ranks may sum their momentum.

The user's own optimizer goes on: a hook before its step makes the update in its place once v stands, from the same
state. With v the same on all ranks, m / d is linear in the gradient, d = sqrt(v) + eps. So ranks sum
(b1 m / ranks + (1 - b1) g_rank) / d in few bytes; what came out stands for the gradient ((sum) d - b1 m) / (1 - b1), of
which the optimizer's own rule makes m = (sum) d (Tang et al. 2021, 1-bit Adam; the published form sends m and divides
by d afterwards, which goes to NaN where v = 0). sqrt(v) is at least `floor` times its root mean square over the tensor,
or, where ranks' parts of gradients cancel in the sum, `floor` / 2 times that of the parts (`cancelling.py`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from tutti.config.compression import LOOKS
from tutti.errors import PlanError
from tutti.optim.cancelling import CHANCE, PARTS, SUM, Squares, excess, remember
from tutti.optim.large_batch import LAMB, OverParts

LEARNED = "learned"
"""In an optimizer's state of a parameter: after how many updates its v stood still."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Of one parameter whose v stands: its momentum m, `beta1`, and what m is divided by to be sent."""

    m: Tensor
    beta1: float
    divisor: Tensor

    def to_send(self, gradient: Tensor, ranks: int) -> None:
        """A rank's part of the summed gradient becomes, in place, its part of the sum of momenta."""
        gradient.mul_(1 - self.beta1).add_(self.m, alpha=self.beta1 / ranks).div_(self.divisor)

    def to_gradient(self, total: Tensor) -> None:
        """The sum of all ranks' parts becomes, in place, the gradient that it stands for."""
        total.mul_(self.divisor).sub_(self.m, alpha=self.beta1).div_(1 - self.beta1)


Copies = dict[nn.Parameter, tuple[Moment, dict[str, Any]]]
"""Of whole parameters: their moment, and their group."""


class Frozen(ABC):
    """What an optimizer becomes: itself for `freeze_step` updates, then with the v that it has.

    Whether v stands is in the optimizer's state, so checkpoints know it. Parameters that never had a gradient before
    have no `moment`, and can have no update afterwards. One `Frozen` for an optimizer. Where ranks hold parts of
    tensors, `over_parts` makes root mean squares those of the whole, and `agreed` is the largest of all ranks' counts.
    Where the state of parameters is divided among ranks, `copies` are the moments of whole ones, with the groups they
    are in: they follow each update. `stood` is called when v has begun to stand, and may set them. `seen`: how long
    ranks' parts of the next update's gradients were, and their sums; set, alike on all ranks, where `looks` says so.
    """

    over_parts: OverParts | None = None
    agreed: Callable[[int], int] | None = None
    stood: Callable[[], None] | None = None

    def __init__(self, optimizer: Optimizer, freeze_step: int, *, floor: float = 0.1) -> None:
        if freeze_step < 1:
            raise PlanError(f"freeze_step = {freeze_step}; the second moment needs steps to settle: 15 to 20 % of all")
        self.check(optimizer)
        self.optimizer, self.freeze_step, self.floor = optimizer, freeze_step, floor
        self._divisors: dict[nn.Parameter, tuple[Tensor, int, Tensor]] = {}
        self._set_aside: list[tuple[nn.Parameter, Tensor]] = []
        self._numbers: dict[nn.Parameter, int] = {}
        self._settled = False
        self._count: int | None = None
        self.seen: Squares = {}
        self.copies: Copies = {}
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @classmethod
    @abstractmethod
    def check(cls, optimizer: Optimizer) -> None:
        """Raise PlanError for an optimizer that it is not made for."""

    @property
    def stands(self) -> bool:
        """Whether v stands: the next sum is of momenta."""
        return bool(self.copies) or any(LEARNED in state for state in self.optimizer.state.values())

    @property
    def looks(self) -> bool:
        """Whether `seen` is wanted of the next sum, alike on all ranks: after a checkpoint until a count is known."""
        count = 0 if self._count is None and not self.optimizer.state else self._count
        return not self.stands and (count is None or count >= self.freeze_step - LOOKS)

    def moment(self, parameter: nn.Parameter) -> Moment | None:
        """What is needed to send a parameter's momentum; None where its v has learned nothing."""
        if parameter in self.copies:
            return self.copies[parameter][0]
        state = self.optimizer.state.get(parameter, {})
        if LEARNED not in state:
            return None
        beta1 = float(self._group_of(parameter)["betas"][0])
        return Moment(state["exp_avg"], beta1, self._sent_by(parameter))

    @abstractmethod
    def _advance(self, m: Tensor, gradient: Tensor, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """m takes in a gradient, in place; before the parameter is updated."""

    @abstractmethod
    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """One update of a parameter whose v stands."""

    def _begun(self, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:  # noqa: B027
        """v of the parameter stands from now on."""

    def _learned(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:  # noqa: B027
        """The optimizer has made an update of its own."""

    def _sent_by(self, parameter: nn.Parameter) -> Tensor:
        """What its momentum is divided by to be sent: that of the update, by which parameters are of one magnitude."""
        return self._divisor(parameter)

    def _divisor(self, parameter: nn.Parameter) -> Tensor:
        """sqrt(v) + eps, v as it stands, without the bias of its start, with its floor."""
        state = self.optimizer.state[parameter]
        v = state["exp_avg_sq"]
        known = self._divisors.get(parameter)
        if known is not None and known[0] is v and known[1] == v._version:
            return known[2]
        found = _root(v, state[LEARNED], self._group_of(parameter), least=state["least"])
        self._divisors[parameter] = (v, v._version, found)
        return found

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
        """Once v stands, make the update; the optimizer's own step then finds no gradient."""
        if not self.stands:
            return
        for parameter, (moment, group) in self.copies.items():
            if parameter.grad is not None:
                self._advance(moment.m, parameter.grad, parameter, group)
        for parameter, group in pairs_of(self.optimizer):
            if parameter.grad is None:
                continue
            state = self.optimizer.state.get(parameter, {})
            if LEARNED in state:
                self._update(parameter, parameter.grad, group, state)
            self._set_aside.append((parameter, parameter.grad))
            parameter.grad = None

    @torch.no_grad()
    def _after(self, *arguments: Any) -> None:
        for held, gradient in self._set_aside:
            held.grad = gradient
        self._set_aside = []
        if self._settled:
            return
        if not self.stands:
            for one, _ in pairs_of(self.optimizer):
                if one in self.optimizer.state:
                    self._learned(one, self.optimizer.state[one])
        count = self.freeze_step if self.stands else updates_of(self.optimizer)
        count = count if self.agreed is None else self.agreed(count)  # ranks may hold nothing that has a count
        if not self.stands and count > self.freeze_step - LOOKS:
            remember(self.seen, self.optimizer)
        self.seen, self._count = {}, count
        if count >= self.freeze_step:
            self._freeze()
            if self.stood is not None:
                self.stood()
            self._settled = True

    def _freeze(self) -> None:
        """v of all that has learned stands from now on."""
        states = self.optimizer.state
        live = [(p, group, states[p]) for p, group in pairs_of(self.optimizer) if "exp_avg_sq" in states.get(p, {})]
        means, looks = _means(live, self.over_parts), _looks(live, self.over_parts)
        for (parameter, group, state), mean, look in zip(live, means, looks, strict=True):
            if mean > 0 and LEARNED not in state:
                state[PARTS], state[SUM] = look
                state[LEARNED] = float(state["step"])
                rms = math.sqrt(mean / (1 - group["betas"][1] ** int(state["step"])))
                state["least"] = self.floor * excess(state) * rms
                self._begun(parameter, group, state)


class FrozenAdam(Frozen):
    """torch's Adam and AdamW: m = b1 m + (1 - b1) g, w -= lr (m / (1 - b1^t)) / d, with the decay each of them has."""

    @classmethod
    def check(cls, optimizer: Optimizer) -> None:
        if unwrap(type(optimizer).step) is not unwrap(Adam.step):
            raise PlanError(
                f"the momentum of {type(optimizer).__name__} is not Adam's; use torch.optim.Adam or AdamW, or compress "
                "gradients: one-bit"
            )
        for name in ("amsgrad", "maximize", "differentiable"):
            if any(group.get(name) for group in optimizer.param_groups):
                raise PlanError(f"Adam with {name}=True has no second moment that could stand still; leave {name} out")

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


class FrozenLAMB(Frozen):
    """LAMB (Li et al. 2021, 1-bit LAMB): layers' ratios are averaged while v learns; then they are multiplied with
    max(d / d_fresh), of a v that goes on with the gradients that momenta stand for, within [0.5, 4] and 10 % an update.
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
                "NVLAMB divides gradients by their norm over all ranks, which is not known where momenta are summed; "
                "use LAMB"
            )

    def _learned(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        assert isinstance(self.optimizer, LAMB)
        ratio = self.optimizer.ratios.get(parameter)
        if ratio is not None:
            state["ratio"] = self.KEEP * state["ratio"] + (1 - self.KEEP) * ratio if "ratio" in state else ratio

    def _begun(self, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        size = float((state["exp_avg"] / self._divisor(parameter)).double().square().mean().sqrt())
        if excess(state) > 1:  # parts are what is sent, and are longer
            d = float(self._divisor(parameter).double().square().mean().sqrt())
            size = max(size, (1 - group["betas"][0]) * CHANCE * state["least"] / self.floor / d)
        usable = size > 0 and math.isfinite(1 / size)
        state.update(fresh=state["exp_avg_sq"].clone(), factor=1.0, size=size if usable else 1.0)
        if "ratio" not in state:  # v has learned in a run that did not average them
            step = state["exp_avg"] / self._divisor(parameter) + group["weight_decay"] * parameter
            norms = float(parameter.norm()), float(step.norm())
            state["ratio"] = norms[0] / norms[1] if min(norms) > 0 else 1.0

    def _sent_by(self, parameter: nn.Parameter) -> Tensor:
        """LAMB's layers differ in magnitude: each is sent as one of root mean square 1."""
        return self._divisor(parameter) * float(self.optimizer.state[parameter]["size"])

    def _advance(self, m: Tensor, gradient: Tensor, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        m.mul_(group["betas"][0]).add_(gradient, alpha=1 - group["betas"][0])

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state["step"] += 1
        self._advance(state["exp_avg"], gradient, parameter, group)
        state["fresh"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        d = self._divisor(parameter)
        wanted = float((d / _root(state["fresh"], state["step"], group, share=self.floor * excess(state))).max())
        low, high = state["factor"] * (1 - self.CHANGE), state["factor"] * (1 + self.CHANGE)
        state["factor"] = min(max(min(max(wanted, self.FACTOR[0]), self.FACTOR[1]), low), high)
        step = state["exp_avg"] / (1 - beta1 ** int(state["step"])) / d + group["weight_decay"] * parameter
        ratio = state["ratio"] * state["factor"] if group["adapt"] else 1.0
        parameter.sub_(step * (group["lr"] * ratio))


Live = list[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]]
"""Parameters with their group and their state."""


def pairs_of(optimizer: Optimizer) -> list[tuple[nn.Parameter, dict[str, Any]]]:
    """Its parameters, each with its group."""
    return [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]


def updates_of(optimizer: Optimizer) -> int:
    """Updates so far, of the parameter that had most."""
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)


def _root(v: Tensor, count: float, group: dict[str, Any], *, least: float | None = None, share: float = 0.0) -> Tensor:
    """sqrt(v) + eps without the bias of its start; sqrt(v) is at least `least`, or `share` of its root mean square."""
    root = (v / (1 - group["betas"][1] ** int(count))).sqrt()
    least = share * float(root.square().mean().sqrt()) if least is None else least
    found: Tensor = root.clamp(min=least).add_(float(group["eps"]))
    return found


def _means(live: Live, over_parts: OverParts | None) -> list[float]:
    """The mean of v over whole tensors."""
    sums = [state["exp_avg_sq"].double().sum() for _, _, state in live]
    sizes = [torch.tensor(float(p.numel()), dtype=torch.float64) for p, _, _ in live]
    return [total / max(size, 1.0) for total, size in _over_parts(live, sums, sizes, over_parts)]


def _looks(live: Live, over_parts: OverParts | None) -> list[tuple[float, float]]:
    """What is remembered of parts and sums, over whole tensors."""
    parts = [torch.tensor(state.get(PARTS, 0.0), dtype=torch.float64) for _, _, state in live]
    sums = [torch.tensor(state.get(SUM, 0.0), dtype=torch.float64) for _, _, state in live]
    return _over_parts(live, parts, sums, over_parts)


def _over_parts(
    live: Live, one: list[Tensor], other: list[Tensor], over_parts: OverParts | None
) -> list[tuple[float, float]]:
    """Two numbers of each parameter's, added up over ranks that hold parts of its tensor. Collective where some do."""
    both = torch.stack([*one, *other]) if live else torch.zeros(0, dtype=torch.float64)
    if over_parts is not None:
        both = over_parts(both, [p for p, _, _ in live] * 2)
    found = both.tolist()
    return list(zip(found[: len(live)], found[len(live) :], strict=True))
