"""Optimizers for large batches: LARS, LAMB, NVLAMB and NovoGrad, whose steps depend on the norms of whole tensors.

Where ranks hold parts of tensors, `over_parts` makes their norms those of the whole tensors. It receives the squared
norms of all parts at once and adds up those of the same tensor. NVLAMB also needs the norm of the whole model's
gradients: `global_norm`. Parameter groups with `adapt` False (biases and normalisations: see `parameter_groups`) take
the plain step. A ratio of norms is 1 where one of them is 0.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from tutti.errors import PlanError, ScriptError

SumOverShards = Callable[[Tensor, Sequence[nn.Parameter]], Tensor]
"""(squared norms, the parameters they belong to, both (n,)) -> squared norms of the whole tensors."""

GlobalNorm = Callable[[Sequence[nn.Parameter]], float]
"""Returns the norm of the gradients of the whole model, with each tensor counted once over all ranks."""

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_NORM = re.compile(r"Norm(\d+d)?$")
_BIAS = re.compile(r"^bias_|bias$")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the parameters into two groups: adapted with weight decay, and plain without either.

    The plain group has parameters of fewer than two dims; all parameters of normalisation modules (torch's, and modules
    whose class name ends in Norm, Norm2d and so on); and those called bias, bias_... or ...bias. Call this before
    parameters are divided or flattened.

    Args:
        model: the model; only parameters that require a gradient are included.
        weight_decay: weight decay of the adapted group.

    Returns:
        Parameter groups for an optimizer; empty ones are left out.
    """
    excluded = {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() < 2 or _BIAS.search(name) or _normalises(module)
    }
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = [parameter for parameter in parameters if parameter in excluded]
    adapted = [parameter for parameter in parameters if parameter not in excluded]
    groups = [
        {"params": adapted, "weight_decay": weight_decay, "adapt": True},
        {"params": plain, "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]


def _normalises(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or _NORM.search(type(module).__name__) is not None


class NormScaledOptimizer(Optimizer):
    """Base class: the loop over parameters with a gradient, and norms of whole tensors.

    Args:
        params: parameters or parameter groups.
        defaults: settings of the optimizer; "adapt" is added to them.

    Attributes:
        over_parts: adds up squared norms over ranks that hold parts of the same tensor; None where none do.
    """

    over_parts: SumOverShards | None = None

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        for name, least in (("lr", 0.0), ("weight_decay", 0.0), ("eps", 0.0)):
            if defaults.get(name, least) < least:
                raise PlanError(f"{name} = {defaults[name]}; {type(self).__name__} needs {least} or more")
        super().__init__(params, {**defaults, "adapt": True})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("adapt", True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters from their present gradients.

        Args:
            closure: computes the loss anew, as for any torch optimizer.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        live = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._check_dense(live)
        self._update(live)
        return loss

    def _update(self, live: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        raise AssertionError(f"{type(self).__name__} has no update")

    def _check_dense(self, live: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        """Raise ScriptError for a sparse gradient, because moments and weight decay apply to whole tensors."""
        for parameter, _ in live:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ScriptError(
                    f"{type(self).__name__} updates whole tensors, but the parameter of shape "
                    f"{tuple(parameter.shape)} has a sparse gradient; make its embedding with sparse=False, or "
                    "give that parameter to an optimizer of its own, such as torch.optim.SparseAdam"
                )

    def _norms(self, tensors: list[Tensor], parameters: list[nn.Parameter]) -> list[float]:
        """Return the norm of each whole tensor, of which `tensors` holds this rank's parts."""
        if not tensors and self.over_parts is None:  # with over_parts, the other ranks wait for this one
            return []
        sums = [tensor.detach().double().square().sum() for tensor in tensors]
        squares = torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64)
        if self.over_parts is not None:
            squares = self.over_parts(squares, parameters)
        return [math.sqrt(square) for square in squares.tolist()]


class LARS(NormScaledOptimizer):
    """Layer-wise rates (You et al. 2017): l = trust ||w|| / (||g|| + wd ||w||), v = mu v + lr l (g + wd w), w -= v.

    Args:
        params: parameters or parameter groups.
        lr: learning rate. It is inside the momentum, so a new rate applies to new gradients only.
        momentum: mu.
        weight_decay: wd.
        trust: the trust coefficient.
        nesterov: update by w -= mu v + lr l (g + wd w), with the new v.
        momentum_correction: multiply v with the new rate over the old one, as if the rate were outside the momentum
            (Goyal et al. 2017, section 3).

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = LARS(model.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-4)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        nesterov: bool = False,
        momentum_correction: bool = False,
    ) -> None:
        rest = {"momentum": momentum, "weight_decay": weight_decay, "trust": trust, "nesterov": nesterov}
        super().__init__(params, {"lr": lr, **rest, "momentum_correction": momentum_correction})

    def _update(self, live: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        parameters = [parameter for parameter, _ in live]
        norms = self._norms([*parameters, *(p.grad for p in parameters if p.grad is not None)], parameters * 2)
        for (parameter, group), weight, gradient in zip(live, norms, norms[len(live) :], strict=False):
            assert parameter.grad is not None
            decay = group["weight_decay"]
            ratio = 1.0
            if group["adapt"] and weight > 0 and gradient > 0:
                ratio = group["trust"] * weight / (gradient + decay * weight)
            step = (parameter.grad + decay * parameter) * (group["lr"] * ratio)
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            keep, rate = group["momentum"], float(group["lr"])
            if group.get("momentum_correction"):
                keep *= rate / state["rate"] if state.get("rate") else 1.0
                state["rate"] = rate
            velocity = state["momentum"].mul_(keep).add_(step)
            parameter.sub_(velocity * group["momentum"] + step if group["nesterov"] else velocity)


class LAMB(NormScaledOptimizer):
    """Adam's step scaled to the norm of the weights (You et al. 2020).

    r = m / (sqrt(v) + eps) + wd w with bias-corrected m and v, and w -= lr (||w|| / ||r||) r.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay rates of m and v.
        eps: added to sqrt(v).
        weight_decay: wd.
        normalise: divide all gradients by their global norm (NVLAMB).

    Attributes:
        ratios: ||w|| / ||r|| of the last update, by parameter.
        global_norm: returns the norm of the gradients of the whole model; None where this rank holds all of them.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = LAMB(model.parameters(), lr=1e-2)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    global_norm: GlobalNorm | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        normalise: bool = False,
    ) -> None:
        self.normalise = normalise
        self.ratios: dict[nn.Parameter, float] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, live: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        parameters = [parameter for parameter, _ in live]
        total = 1.0
        if self.normalise:
            total = self._global_norm(parameters) or 1.0
        steps = [self._adam(parameter, group, total) for parameter, group in live]
        norms = self._norms([*parameters, *steps], parameters * 2)
        for (parameter, group), step, weight, length in zip(live, steps, norms, norms[len(live) :], strict=False):
            ratio = weight / length if group["adapt"] and weight > 0 and length > 0 else 1.0
            self.ratios[parameter] = ratio
            parameter.sub_(step * (group["lr"] * ratio))

    def _global_norm(self, parameters: list[nn.Parameter]) -> float:
        if self.global_norm is not None:
            return self.global_norm(parameters)
        norms = self._norms([p.grad for p in parameters if p.grad is not None], parameters)
        return math.sqrt(sum(norm * norm for norm in norms))

    def _adam(self, parameter: nn.Parameter, group: dict[str, Any], total: float) -> Tensor:
        assert parameter.grad is not None
        gradient, state, (beta1, beta2) = parameter.grad / total, self.state[parameter], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** state["step"])
        root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt()
        step: Tensor = mean / (root + group["eps"]) + group["weight_decay"] * parameter
        return step


def nvlamb(params: Iterable[Any], lr: float, **settings: Any) -> LAMB:
    """Make NVLAMB: LAMB on gradients divided by their global norm.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        settings: further settings of LAMB.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = nvlamb(model.parameters(), lr=1e-2)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """
    return LAMB(params, lr, normalise=True, **settings)


class NovoGrad(NormScaledOptimizer):
    """Keeps one second moment per tensor (Ginsburg et al. 2019).

    v = ||g||^2 at first, then b2 v + (1 - b2) ||g||^2; m = b1 m + g / (sqrt(v) + eps) + wd w; w -= lr m. In groups with
    `adapt` False, g is not divided.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: b1 and b2.
        eps: added to sqrt(v).
        weight_decay: wd.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = NovoGrad(model.parameters(), lr=1e-2)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.001,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, live: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        parameters = [parameter for parameter, _ in live]
        norms = self._norms([p.grad for p in parameters if p.grad is not None], parameters)
        for (parameter, group), norm in zip(live, norms, strict=True):
            assert parameter.grad is not None
            state, (beta1, beta2) = self.state[parameter], group["betas"]
            if not state:
                state.update(exp_avg=torch.zeros_like(parameter), norm_avg_sq=norm * norm)
            else:
                state["norm_avg_sq"] = beta2 * state["norm_avg_sq"] + (1 - beta2) * norm * norm
            gradient = parameter.grad
            if group["adapt"]:
                gradient = gradient / (math.sqrt(state["norm_avg_sq"]) + group["eps"])
            step = state["exp_avg"].mul_(beta1).add_(gradient + group["weight_decay"] * parameter)
            parameter.sub_(step * group["lr"])
