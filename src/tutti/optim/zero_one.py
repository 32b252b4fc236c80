"""0/1 Adam (Lu et al. 2022, arXiv 2202.06009): the second moment v learns ever more rarely, then ranks step alone.

The user's own Adam or AdamW goes on: while v learns in every update it makes them itself; after that a hook before its
step makes the update in its place, from the same state. Until `freeze_step`, v learns from exact sums of gradients, and
momentum alone in between. Then v stands, and every rank steps with its own momentum and adds up the way it goes, until
all go to where the mean of their ways leads. Two things differ from the paper: Adam's corrections of the start stay, so
that it is Adam while v learns in every update; and gradients and ways are sent divided by d = sqrt(v) + eps, with the
floors of `frozen.py`, since the published form goes to NaN where v = 0, and far where it is small.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.config.zero_one import learns
from tutti.optim.cancelling import Squares, excess, remember
from tutti.optim.frozen import FrozenAdam, Live, pairs_of, updates_of

REFRESHED = "refreshed"
"""In an optimizer's state of a parameter: in how many updates its v has learned."""


class ZeroOne:
    """What an optimizer becomes. In the state of a parameter, once ranks step alone: `base`, where ranks last agreed,
    `way`, what was gone from there, `rates`, the sum of rates on it, and `shrink`, what decay has left of the base.
    `seen`: as of Frozen.
    """

    def __init__(self, optimizer: Optimizer, freeze_step: int, kappa: int, *, floor: float = 0.1) -> None:
        FrozenAdam.check(optimizer)
        self.optimizer, self.freeze_step, self.kappa, self.floor = optimizer, freeze_step, kappa, floor
        self._set_aside: list[tuple[nn.Parameter, Tensor]] = []
        self.seen: Squares = {}
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @property
    def count(self) -> int:
        """Updates so far, of the parameter that had most."""
        return updates_of(self.optimizer)

    @property
    def exact(self) -> bool:
        """Whether v learns in the next update, from the exact sum of gradients."""
        return not self.stands and learns(self.count, self.kappa)

    @property
    def stands(self) -> bool:
        """Whether v stands, and ranks step alone."""
        return self.count >= self.freeze_step

    @property
    def looks(self) -> bool:
        """Whether `seen` is wanted of the next sum."""
        return self.exact

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether v of a parameter has learned anything."""
        return "exp_avg_sq" in self.optimizer.state.get(parameter, {})

    def gather(self) -> None:
        """Nothing of its state is divided among ranks."""

    @torch.no_grad()
    def rebase(self) -> None:
        """Ranks agree here."""
        for parameter, _, state in self.learned():
            state["base"], state["way"] = parameter.detach().clone(), torch.zeros_like(parameter)
            state["rates"], state["shrink"] = 0.0, 1.0

    @torch.no_grad()
    def agree(self) -> None:
        """Every parameter's `way` is the mean of ranks' ways: go where it leads, with the momentum it stands for."""
        for parameter, group, state in self.learned():
            state["base"].mul_(state["shrink"]).sub_(state["way"])
            parameter.copy_(state["base"])
            if state["rates"] > 0:
                torch.mul(state["way"], self._root(group, state), out=state["exp_avg"]).div_(state["rates"])
            state["way"].zero_()
            state["rates"], state["shrink"] = 0.0, 1.0

    def divisor(self, parameter: nn.Parameter) -> Tensor:
        """What the gradient of a parameter whose v has learned is divided by to be sent in few bytes."""
        group = next(group for one, group in pairs_of(self.optimizer) if one is parameter)
        return self._root(group, self.optimizer.state[parameter])

    def learned(self) -> Live:
        """Parameters whose v has learned something, each with its group and its state: the same on all ranks."""
        states = self.optimizer.state
        return [(p, group, states[p]) for p, group in pairs_of(self.optimizer) if self.knows(p)]

    @torch.no_grad()
    def _before(self, *arguments: Any) -> None:
        """Once v does not learn in every update, make the update; the optimizer's own step then finds no gradient."""
        if self.count < min(self.kappa, self.freeze_step):
            return
        learning, alone = self.exact, self.stands
        for parameter, group in pairs_of(self.optimizer):
            if parameter.grad is None:
                continue
            if learning or self.knows(parameter):
                self._update(parameter, group, learning=learning, alone=alone)
            self._set_aside.append((parameter, parameter.grad))
            parameter.grad = None

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], *, learning: bool, alone: bool) -> None:
        state, gradient = self.optimizer.state[parameter], parameter.grad
        assert gradient is not None
        if "exp_avg_sq" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        rate, decay = float(group["lr"]), group["weight_decay"]
        kept = 1 - rate * decay if group.get("decoupled_weight_decay", False) else 1.0
        if kept != 1.0:
            parameter.mul_(kept)
        elif decay:
            gradient = gradient.add(parameter, alpha=decay)
        refreshed = state.setdefault(REFRESHED, float(state["step"]))
        state["step"] += 1
        if learning:
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            state[REFRESHED] = refreshed + 1
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        rate /= 1 - beta1 ** int(state["step"])
        d = self._root(group, state)
        parameter.addcdiv_(state["exp_avg"], d, value=-rate)
        if alone:
            state["way"].mul_(kept).addcdiv_(state["exp_avg"], d, value=rate)
            state["rates"], state["shrink"] = state["rates"] + rate, state["shrink"] * kept

    def _root(self, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        """sqrt(v) + eps, v without the bias of its start, with its floor."""
        refreshed = state.get(REFRESHED, float(state["step"]))
        root = (state["exp_avg_sq"] / (1 - group["betas"][1] ** int(refreshed))).sqrt()
        least = self.floor * excess(state) * root.square().mean().sqrt() if root.numel() else 0.0
        return root.clamp(min=least).add_(float(group["eps"]))  # type: ignore[no-any-return]

    def _after(self, *arguments: Any) -> None:
        for held, gradient in self._set_aside:
            held.grad = gradient
        self._set_aside = []
        remember(self.seen, self.optimizer)
        self.seen = {}


def zero_one_of(optimizer: Optimizer) -> ZeroOne:
    """What made an optimizer one of 0/1 Adam."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next(owner for owner in owners if isinstance(owner, ZeroOne))
