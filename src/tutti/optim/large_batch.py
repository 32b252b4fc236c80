"""Optimizers for large batches: LARS, LAMB, NVLAMB and NovoGrad, whose steps follow the norms of whole tensors.

Where ranks hold parts of tensors, `over_parts` makes their norms those of the whole: it is given the squared norms of
all parts at once and adds up those of parts of one tensor. NVLAMB needs the norm of all gradients of all ranks, too:
`global_norm`. A group with `adapt` False (biases, normalisations: see
`parameter_groups`) takes the plain step. A ratio of norms is 1 where one of them is 0.
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
"""(squared norms, the parameters they are of, both (n,)) -> the squared norms of the whole tensors."""

GlobalNorm = Callable[[Sequence[nn.Parameter]], float]
"""The norm of the gradients of the whole model, each tensor counted once over all ranks."""

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_NORM = re.compile(r"Norm(\d+d)?$")
_BIAS = re.compile(r"^bias_|bias$")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: what is adapted and decays, and biases and normalisations, which neither do nor are.

    The second: parameters of fewer than two dims; those of a normalisation's own, of any dims (torch's, and modules
    whose class is called ...Norm, ...Norm2d and so on); and those called bias, bias_... or ...bias. Ask for it before
    parameters are divided or flattened.
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
    """What they share: the loop over parameters with a gradient, and squared norms in one tensor."""

    over_parts: SumOverShards | None = None

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        for name, least in (("lr", 0.0), ("weight_decay", 0.0), ("eps", 0.0)):
            if defaults.get(name, least) < least:
                raise PlanError(f"{name} = {defaults[name]}; give {type(self).__name__} {least} or more")
        super().__init__(params, {**defaults, "adapt": True})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("adapt", True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update from the gradients that stand."""
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
        """Raises ScriptError for a gradient of some rows: moments and decay are of all of them."""
        for parameter, _ in live:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ScriptError(
                    f"{type(self).__name__} got a sparse gradient, of the parameter of shape "
                    f"{tuple(parameter.shape)}, and updates whole tensors; make its embedding with sparse=False, or "
                    "give that parameter to an optimizer of its own, such as torch.optim.SparseAdam"
                )

    def _norms(self, tensors: list[Tensor], parameters: list[nn.Parameter]) -> list[float]:
        """The norms of whole tensors, of each of which this rank has `tensors`."""
        if not tensors and self.over_parts is None:  # else the other ranks wait
            return []
        sums = [tensor.detach().double().square().sum() for tensor in tensors]
        squares = torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64)
        if self.over_parts is not None:
            squares = self.over_parts(squares, parameters)
        return [math.sqrt(square) for square in squares.tolist()]


class LARS(NormScaledOptimizer):
    """Layer-wise rates (You et al. 2017): l = trust ||w|| / (||g|| + wd ||w||), v = mu v + lr l (g + wd w), w -= v.

    The rate is inside the momentum, so a rate that changes acts on new gradients only; with `momentum_correction`
    (Goyal et al. 2017, section 3) v is multiplied with the new rate over the old one, as if the rate were outside. With
    `nesterov`, w -= mu v + lr l (g + wd w) with the new v.
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
    """Adam's step with the norm of the weights (You et al. 2020): r = m / (sqrt(v) + eps) + wd w, both corrected for
    their start; w -= lr (||w|| / ||r||) r. With `normalise` (NVLAMB) all gradients are divided by their global norm.
    `ratios`: ||w|| / ||r|| of the last update.
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
    """NVLAMB: LAMB on gradients divided by their global norm."""
    return LAMB(params, lr, normalise=True, **settings)


class NovoGrad(NormScaledOptimizer):
    """A second moment for a whole tensor (Ginsburg et al. 2019): v = ||g||^2 at first, then b2 v + (1 - b2) ||g||^2;
    m = b1 m + g / (sqrt(v) + eps) + wd w, w -= lr m. `adapt` False leaves g as it is.
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
