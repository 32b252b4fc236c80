"""0/1 Adam (Lu et al. 2022, arXiv 2202.06009): v learns in fewer and fewer updates, then ranks step independently.

The user's own Adam or AdamW stays in place. It makes the updates as long as the second moment v learns in every one.
After that a hook before its step makes the update instead, from the same state. Until `freeze_step`, v learns from
exact sums of gradients, and in the updates between only momentum learns. Then v is frozen. Every rank steps with its
own momentum and accumulates its displacement, until all ranks move by the mean of their displacements.

Two things differ from the paper. Adam's bias corrections stay, so it is Adam while v learns in every update. Gradients
and displacements are divided by d = sqrt(v) + eps before they are sent, with the lower bounds of
`frozen_second_moment.py`. The published form turns into NaN where v = 0, and diverges where v is small.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.config.zero_one_schedule import learns
from tutti.optim.frozen_second_moment import (
    FrozenAdam,
    ParameterStates,
    SquaredNorms,
    accumulate_squares,
    cancellation_excess,
    parameters_with_groups,
    update_count,
)

LEARNED_UPDATES = "refreshed"
"""Key in a parameter's optimizer state: number of updates in which its second moment has learned."""


class ZeroOneAdam:
    """Makes the updates of an Adam optimizer by the rules of 0/1 Adam.

    Once ranks step independently, a parameter's state has `base`, its value where ranks last agreed; `displacement`,
    how far it has moved from there; `rates`, the sum of the learning rates since; and `shrink`, the factor that weight
    decay has applied to the base.

    Args:
        optimizer: torch's Adam or AdamW; hooks are added to its step.
        freeze_step: number of updates after which v is frozen and ranks step independently.
        kappa: v learns in the first kappa updates, then kappa times in every second update, then in every fourth, and
            so on.
        floor: lower bound of sqrt(v), relative to its root mean square over the tensor.

    Attributes:
        observed_norms: see FrozenSecondMoment.
    """

    def __init__(self, optimizer: Optimizer, freeze_step: int, kappa: int, *, floor: float = 0.1) -> None:
        FrozenAdam.check(optimizer)
        self.optimizer, self.freeze_step, self.kappa, self.floor = optimizer, freeze_step, kappa, floor
        self._set_aside: list[tuple[nn.Parameter, Tensor]] = []
        self.observed_norms: SquaredNorms = {}
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @property
    def count(self) -> int:
        """Number of updates so far, of the parameter that had the most."""
        return update_count(self.optimizer)

    @property
    def exact(self) -> bool:
        """Whether v learns in the next update, from the exact sum of gradients."""
        return not self.frozen and learns(self.count, self.kappa)

    @property
    def frozen(self) -> bool:
        """Whether v is frozen, so that ranks step independently."""
        return self.count >= self.freeze_step

    @property
    def wants_statistics(self) -> bool:
        """Whether the next reduction should collect `observed_norms`."""
        return self.exact

    def knows(self, parameter: nn.Parameter) -> bool:
        """Return whether the second moment of a parameter has learned anything."""
        return "exp_avg_sq" in self.optimizer.state.get(parameter, {})

    def gather(self) -> None:
        """Do nothing: none of its state is divided among ranks."""

    @torch.no_grad()
    def rebase(self) -> None:
        """Take the present values as those on which all ranks agree, and set the displacements to zero."""
        for parameter, _, state in self.learned():
            state["base"], state["displacement"] = parameter.detach().clone(), torch.zeros_like(parameter)
            state["rates"], state["shrink"] = 0.0, 1.0

    @torch.no_grad()
    def agree(self) -> None:
        """Move to the agreed values, with the momentum that the mean displacement stands for.

        Every parameter's `displacement` must be the mean over ranks when this is called.
        """
        for parameter, group, state in self.learned():
            state["base"].mul_(state["shrink"]).sub_(state["displacement"])
            parameter.copy_(state["base"])
            if state["rates"] > 0:
                torch.mul(state["displacement"], self._root(group, state), out=state["exp_avg"]).div_(state["rates"])
            state["displacement"].zero_()
            state["rates"], state["shrink"] = 0.0, 1.0

    def divisor(self, parameter: nn.Parameter) -> Tensor:
        """Return what a parameter's gradient is divided by to be sent compressed.

        The parameter's second moment must have learned.
        """
        group = next(group for candidate, group in parameters_with_groups(self.optimizer) if candidate is parameter)
        return self._root(group, self.optimizer.state[parameter])

    def learned(self) -> ParameterStates:
        """Return the parameters whose second moment has learned, with group and state; the same on all ranks."""
        states = self.optimizer.state
        return [(p, group, states[p]) for p, group in parameters_with_groups(self.optimizer) if self.knows(p)]

    @torch.no_grad()
    def _before(self, *arguments: Any) -> None:
        """Once v does not learn in every update, make the update and hide the gradients from the optimizer's own
        step.
        """
        if self.count < min(self.kappa, self.freeze_step):
            return
        learning, diverged = self.exact, self.frozen
        for parameter, group in parameters_with_groups(self.optimizer):
            if parameter.grad is None:
                continue
            if learning or self.knows(parameter):
                self._update(parameter, group, learning=learning, diverged=diverged)
            self._set_aside.append((parameter, parameter.grad))
            parameter.grad = None

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], *, learning: bool, diverged: bool) -> None:
        state, gradient = self.optimizer.state[parameter], parameter.grad
        assert gradient is not None
        if "exp_avg_sq" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        rate, decay = float(group["lr"]), group["weight_decay"]
        decay_factor = 1 - rate * decay if group.get("decoupled_weight_decay", False) else 1.0
        if decay_factor != 1.0:
            parameter.mul_(decay_factor)
        elif decay:
            gradient = gradient.add(parameter, alpha=decay)
        refreshed = state.setdefault(LEARNED_UPDATES, float(state["step"]))
        state["step"] += 1
        if learning:
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            state[LEARNED_UPDATES] = refreshed + 1
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        rate /= 1 - beta1 ** int(state["step"])
        d = self._root(group, state)
        parameter.addcdiv_(state["exp_avg"], d, value=-rate)
        if diverged:
            state["displacement"].mul_(decay_factor).addcdiv_(state["exp_avg"], d, value=rate)
            state["rates"], state["shrink"] = state["rates"] + rate, state["shrink"] * decay_factor

    def _root(self, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        """Return sqrt(v) + eps, bias-corrected, with its lower bound."""
        refreshed = state.get(LEARNED_UPDATES, float(state["step"]))
        root = (state["exp_avg_sq"] / (1 - group["betas"][1] ** int(refreshed))).sqrt()
        least = self.floor * cancellation_excess(state) * root.square().mean().sqrt() if root.numel() else 0.0
        return root.clamp(min=least).add_(float(group["eps"]))  # type: ignore[no-any-return]

    def _after(self, *arguments: Any) -> None:
        """Restore hidden gradients and store the step's squared norms."""
        for parameter_set_aside, gradient in self._set_aside:
            parameter_set_aside.grad = gradient
        self._set_aside = []
        accumulate_squares(self.observed_norms, self.optimizer)
        self.observed_norms = {}


def zero_one_adam_of(optimizer: Optimizer) -> ZeroOneAdam:
    """Return the `ZeroOneAdam` that drives an optimizer."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next(owner for owner in owners if isinstance(owner, ZeroOneAdam))
