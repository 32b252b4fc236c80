"""Means that losses of torch take over their targets, and over how many.

A loss that is a mean over tokens, over weighted classes or over the nodes of graphs is not the mean of the ranks'
losses, because ranks have different numbers of them. While a loss is computed, torch's loss functions are replaced by
ones that note the count of each mean. If the loss is such a mean, or a linear function of means over the same targets,
it is returned as `Weighted` and so adds up over ranks and microbatches as on one device.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, update_wrapper, wraps
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from tutti.errors import ScriptError
from tutti.parallel.losses import LossSum, Weighted

_BY_TARGET = ("cross_entropy", "nll_loss")
"""Losses that leave out ignored targets and weigh classes."""

_BY_ROW = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "soft_margin_loss",
    "gaussian_nll_loss",
    "poisson_nll_loss",
    "hinge_embedding_loss",
    "cosine_embedding_loss",
    "margin_ranking_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)
"""Losses that are means over rows, each of which has one value or a mean over elements; all rows are equally long."""

_BY_SAMPLE = ("ctc_loss",)
"""Losses that are means over samples; only their sums are noted."""

_LINEAR = (
    "Add",
    "Sub",
    "Neg",
    "ToCopy",
    "View",
    "UnsafeView",
    "Squeeze",
    "Unsqueeze",
    "Alias",
    "ReshapeAlias",
    "Clone",
)
_LINEAR_NODES = tuple(f"{name}Backward" for name in _LINEAR)
"""Nodes of autograd through which a scalar is a sum of scalars."""

_SCALED_NODES = ("MulBackward", "DivBackward")
"""Nodes whose other factor may be a number of Python."""

MOST_NODES = 64
"""How many nodes of a loss's graph are looked at."""


@dataclass(frozen=True, slots=True)
class LossMean:
    """A mean that a loss function of torch returned.

    Attributes:
        result: the mean.
        count: the number of targets in it, or the sum of their weights.
        key: means with equal keys have equal counts.
        target: the targets, held so that no id in a key is used again.
    """

    result: torch.Tensor
    count: torch.Tensor | float
    key: tuple[Any, ...]
    target: torch.Tensor


class CountedMean(Weighted):
    """A mean of torch's losses whose count is known; the script returned a plain tensor."""


@dataclass(slots=True)
class LossMeans:
    """The means and sums over targets that are taken while one loss is computed."""

    means: list[LossMean] = field(default_factory=list)
    sums: list[torch.Tensor] = field(default_factory=list)

    def weighted(self, loss: Any) -> Any:
        """Return a sum as LossSum, a linear function of means over the same targets as Weighted, else `loss` itself."""
        if any(loss is result for result in self.sums):
            return LossSum(loss)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not self.means:
            return loss
        found = next(([mean] for mean in self.means if mean.result is loss), None) or self._reached(loss)
        if not found or (len(found) > 1 and len({mean.key for mean in found}) > 1):
            return loss
        count = found[0].count
        if type(count) is torch.Tensor and count.is_cpu and torch.result_type(loss, count) is loss.dtype:
            count = count.item()  # nothing to wait for, and three operations fewer
        total = (loss.reshape(()) if loss.dim() else loss) * count
        if not isinstance(count, torch.Tensor) and count > 0:
            return CountedMean(total, count)
        # A mean over nothing is not a number, and counts for nothing.
        return CountedMean(
            torch.where(torch.as_tensor(count, device=total.device) > 0, total, torch.zeros_like(total)), count
        )

    def _reached(self, loss: torch.Tensor) -> list[LossMean]:
        """Return the means of which the loss is a sum, each times a number; empty if it is more than that."""
        by_node = {mean.result.grad_fn: mean for mean in self.means if mean.result.grad_fn is not None}
        found: list[LossMean] = []
        nodes: list[Any] = [loss.grad_fn]
        for _ in range(MOST_NODES):
            if not nodes:
                return found
            node = nodes.pop()
            if node in by_node:
                found.append(by_node[node])
                continue
            before = [] if node is None else [other for other, _ in node.next_functions if other is not None]
            if not before or not (node.name().startswith(_LINEAR_NODES) or _is_scaled(node)):
                return []
            nodes += before
        return []


def _is_scaled(node: Any) -> bool:
    """Whether a node of autograd multiplies or divides by a number of Python; a tensor may depend on the batch."""
    if not node.name().startswith(_SCALED_NODES):
        return False
    factor = node._saved_other if node._saved_other is not None else getattr(node, "_saved_self", None)
    if factor is None:
        return False
    probe = _HALF if factor.is_floating_point() else _BYTE
    # Beside a tensor of its kind, a number does not change the type of the result; a tensor of more bits does.
    return factor.dtype != probe.dtype and torch.result_type(factor, probe) == probe.dtype


_HALF, _BYTE = torch.zeros((), dtype=torch.float16), torch.zeros((), dtype=torch.int8)


_open: list[LossMeans] = []
"""The losses that are being computed, innermost last."""


def note_mean(result: torch.Tensor, count: torch.Tensor | float, key: tuple[Any, ...], target: torch.Tensor) -> None:
    """Note a mean while a loss is computed; see `LossMean`."""
    if _open:
        _open[-1].means.append(LossMean(result, count, key, target))


def means_among(values: Sequence[Any]) -> dict[int, LossMean]:
    """Return the noted means that are among `values`, by position."""
    by_result = {id(mean.result): mean for mean in (_open[-1].means if _open else ())}
    return {at: by_result[id(value)] for at, value in enumerate(values) if id(value) in by_result}


class noted_means:
    """While open, note the means that torch's losses take in `model`, in the script and in torch's loss modules."""

    __slots__ = ("_changed", "_model")

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changed: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> LossMeans:
        means = LossMeans()
        spaces = (vars(F), vars(sys.modules["__main__"]), *_namespaces(self._model))
        _open.append(means)
        for space in spaces:
            present = space.keys() & _NAMES
            if len(present) == len(_NAMES) and _functions_in(space) == _PLAIN_FUNCTIONS:  # torch's own, all plain
                self._changed.append((space, _PLAIN))
                space.update(_NOTING)
            elif present:
                changed = {name: plain for name in present if space[name] is (plain := _PLAIN[name])}
                self._changed.append((space, changed))
                space.update({name: _NOTING[name] for name in changed})
        return means

    def __exit__(self, *problem: object) -> None:
        for space, changed in self._changed:
            space.update(changed)
        _open.pop()


class CountedLoss:
    """A function (model, batch) -> loss that returns Weighted where its loss is a mean over a known number."""

    def __init__(self, function: Callable[[nn.Module, Any], Any]) -> None:
        self.function = function
        self.__code__ = getattr(function, "__code__", function)  # tells the user's functions apart

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        with noted_means(model) as means:
            return means.weighted(self.function(model, batch))


def looked_up(function: Any) -> Any:
    """Return a loss function that finds F.cross_entropy and the like by name when it is called; others as they are."""
    if isinstance(function, partial):
        return partial(looked_up(function.func), *function.args, **function.keywords)
    name = next((name for name, plain in _PLAIN.items() if plain is function), None)
    if name is None:
        return function

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return getattr(F, name)(*args, **kwargs)

    return called


_spaces: "WeakKeyDictionary[nn.Module, list[dict[str, Any]]]" = WeakKeyDictionary()


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """The modules that define the model's classes: they may have imported a loss under its own name."""
    if model not in _spaces:
        names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
        own_names = sorted(name for name in names if name.partition(".")[0] not in ("torch", "builtins", "tutti"))
        spaces = [vars(sys.modules[name]) for name in own_names if name in sys.modules and name != "__main__"]
        _spaces[model] = [space for space in spaces if any(name in space for name in _NAMES)]
    return _spaces[model]


def _by_target(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """A mean over the targets that are not ignored, each with the weight of its class."""
    result = function(*args, **kwargs)
    arguments = _mean_arguments(function, args, kwargs, result)
    if arguments is None:
        return result
    target, weight, ignored = arguments["target"], arguments["weight"], arguments["ignore_index"]
    if target.is_floating_point():  # probabilities of classes, in dim 1 or the only one
        classes = target.shape[min(1, target.dim() - 1)]
        note_mean(result, float(target.numel() // max(1, classes)), (target.shape,), target)
        return result
    counted = target != ignored
    count = counted.sum() if weight is None else (weight[target.where(counted, 0)] * counted).sum()
    note_mean(result, count, (id(target), ignored, id(weight)), target)
    return result


def _by_row(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """A mean over all elements, which is one over rows."""
    _check_shapes(function, *args, **kwargs)
    result = function(*args, **kwargs)
    arguments = _mean_arguments(function, args, kwargs, result)
    if arguments is not None and arguments["target"].dim():
        values = [value for name, value in arguments.items() if name not in ("weight", "pos_weight")]
        rows = max(len(value) for value in values if isinstance(value, torch.Tensor) and value.dim())
        note_mean(result, float(rows), (rows,), arguments["target"])
    return result


_BROADCASTING = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.poisson_nll_loss,
    F.gaussian_nll_loss,
    F.hinge_embedding_loss,
)
"""Losses that compare every value with every target if shapes differ; torch warns at most."""


def _check_shapes(
    function: Callable[..., torch.Tensor], input: Any = None, target: Any = None, *_: Any, **__: Any
) -> None:
    """Refuse an output and a target that are broadcast to more elements than either has, such as (8, 1) and (8,).

    Raises:
        ScriptError: naming both shapes.
    """
    if function not in _BROADCASTING or torch.compiler.is_compiling():
        return
    if not isinstance(input, torch.Tensor) or not isinstance(target, torch.Tensor):
        return
    if input.dim() == target.dim() or 1 in (input.numel(), target.numel()):
        return
    try:
        elements = torch.broadcast_shapes(input.shape, target.shape).numel()  # type: ignore[no-untyped-call]
    except RuntimeError:  # torch says so itself
        return
    if elements > max(input.numel(), target.numel()):
        raise ScriptError(
            f"F.{function.__name__} got an output of shape {tuple(input.shape)} and a target of shape "
            f"{tuple(target.shape)}, which would compare every output with every target; give them one shape, for "
            "example target.view_as(output)"
        )


def _by_sample(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """A mean over samples, which needs no count."""
    result = function(*args, **kwargs)
    _mean_arguments(function, args, kwargs, result)
    return result


@cache
def _parameters(function: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """The names of a loss function's parameters, in order, and their defaults."""
    return {parameter.name: parameter.default for parameter in inspect.signature(function).parameters.values()}


def _mean_arguments(
    function: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: torch.Tensor
) -> dict[str, Any] | None:
    """The arguments by name, if the call takes a mean over plain targets and is not compiled; a sum is noted here.

    Losses of pairs and triplets have no target; their first argument stands for it.
    """
    if torch.compiler.is_compiling() or not _open:
        return None
    parameters = _parameters(function)
    arguments = {**parameters, **dict(zip(parameters, args, strict=False)), **kwargs}  # the call was possible
    if arguments["reduction"] == "sum":
        _open[-1].sums.append(result)
    legacy = arguments.get("size_average") is not None or arguments.get("reduce") is not None
    weighs_rows = arguments.get("weight") is not None and function in _WEIGHS_ROWS
    arguments.setdefault("target", next(iter(arguments.values())))
    plain_target = type(arguments["target"]) is torch.Tensor
    takes_mean = arguments["reduction"] in ("mean", "batchmean")  # the latter is kl_div's
    return arguments if takes_mean and plain_target and not (legacy or weighs_rows) else None


_NOTED_BY = (
    dict.fromkeys(_BY_TARGET, _by_target) | dict.fromkeys(_BY_ROW, _by_row) | dict.fromkeys(_BY_SAMPLE, _by_sample)
)
_NAMES = tuple(_NOTED_BY)
_PLAIN = {name: getattr(F, name) for name in _NAMES}
_functions_in = itemgetter(*_NAMES)
_PLAIN_FUNCTIONS = _functions_in(_PLAIN)
_WEIGHS_ROWS = (F.mse_loss, F.l1_loss, F.huber_loss)
_NOTING = {name: update_wrapper(partial(noted_by, _PLAIN[name]), _PLAIN[name]) for name, noted_by in _NOTED_BY.items()}
"""Made once, so that compiled code that calls them stays valid; torch.compile asks for their names."""
