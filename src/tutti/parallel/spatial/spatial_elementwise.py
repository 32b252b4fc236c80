"""Functions of a cut tensor whose every value depends on values at the same place: parts are computed as they are."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from tutti.errors import PlanError
from tutti.parallel.data.batchnorm import BatchScope, GlobalForward
from tutti.parallel.spatial.halo_exchange import SpatialGroup, all_sum
from tutti.parallel.spatial.spatial_tensor import (
    HANDLERS,
    Along,
    CutTensor,
    Where,
    cut,
    handles,
    local,
    narrowed,
    space_of,
    where_of,
)

_ARITHMETIC = (
    "add sub rsub mul multiply subtract div divide true_divide floor_divide remainder fmod pow neg negative abs "
    "absolute exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square sign floor ceil round trunc frac sin cos tan atan "
    "sinh cosh erf erfc reciprocal lerp addcmul addcdiv maximum minimum fmax fmin clamp clip clamp_min clamp_max where "
    "masked_fill nan_to_num xlogy hypot atan2 eq ne lt le gt ge greater less greater_equal less_equal not_equal "
    "logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_not isnan isfinite isinf "
    "dequantize positive deg2rad float_power copysign __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ "
    "__rmul__ __imul__ __div__ __rdiv__ __idiv__ __truediv__ __rtruediv__ __itruediv__ __floordiv__ __rfloordiv__ "
    "__mod__ __rmod__ __pow__ __rpow__ __ipow__ __neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ "
    "__and__ __or__ __xor__ __invert__ __rand__ __ror__ __iand__ __ior__"
)
_ACTIVATIONS = (
    "relu relu6 leaky_relu elu selu celu gelu silu mish sigmoid hardswish hardsigmoid hardtanh tanh softplus softsign "
    "tanhshrink softshrink hardshrink threshold logsigmoid log_sigmoid logit"
)
_IN_PLACE = (
    "add_ sub_ mul_ div_ pow_ neg_ abs_ exp_ log_ sqrt_ clamp_ clip_ clamp_min_ clamp_max_ masked_fill_ nan_to_num_ "
    "copy_ fill_ zero_ lerp_ addcmul_ addcdiv_ relu_ relu6_ leaky_relu_ elu_ selu_ celu_ sigmoid_ tanh_ hardtanh_ "
    "threshold_ silu_ square_ reciprocal_ round_ floor_ ceil_ logical_and_ logical_or_ logical_not_"
)
_COPIES = (
    "to type float double half bfloat16 int long bool short byte clone detach detach_ contiguous requires_grad_ cpu "
    "cuda type_as zeros_like ones_like empty_like full_like alias view_as_real get:data retain_grad resolve_conj"
)
_FACTS = (
    "get:dtype get:device get:requires_grad get:is_leaf get:grad_fn get:layout get:is_cuda get:is_cpu get:is_meta "
    "get:is_sparse get:is_mkldnn get:is_quantized get:is_nested get:itemsize get:names get:_version get:output_nr "
    "get:retains_grad get:is_mps get:is_xpu get:is_mtia set:requires_grad is_floating_point is_complex element_size "
    "is_contiguous is_inference is_signed get_device is_conj is_neg register_hook __hash__ "
    "register_post_accumulate_grad_hook"
)


def together(values: list[Any]) -> tuple[list[Any], Where, SpatialGroup]:
    """Tensors that broadcast against each other, as parts that do; how the result is cut; and its space.

    Plain tensors, and those that are whole along a dim that another is cut along, are narrowed to this rank's rows.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    space = space_of(tensors)
    dims = max(len(where_of(tensor)) for tensor in tensors)
    where: list[Along | None] = [None] * dims
    for tensor in tensors:
        for place, along in zip(range(dims - len(where_of(tensor)), dims), where_of(tensor), strict=True):
            if along is not None and where[place] not in (None, along):
                raise PlanError(f"tensors that mesh.space cuts differ in size: {_shapes(tensors)}; make them equal")
            where[place] = along or where[place]
    placed = [_fit(value, tuple(where), space) if isinstance(value, torch.Tensor) else value for value in values]
    return placed, tuple(where), space


def _fit(tensor: torch.Tensor, where: Where, space: SpatialGroup) -> torch.Tensor:
    """The part of one tensor that broadcasts against parts cut like `where`."""
    own, part = where_of(tensor), local(tensor)
    for dim, along in enumerate(where[len(where) - len(own) :]):
        if along is None or own[dim] is not None or part.shape[dim] == 1:
            continue
        if part.shape[dim] != along.extent:
            raise PlanError(
                f"a tensor of shape {tuple(part.shape)} meets one that mesh.space cuts, of {along.extent} rows along "
                f"dim {dim - part.dim()}; make its size there {along.extent} or 1"
            )
        part = narrowed(part, dim, along, space)
    return part


def _shapes(tensors: list[torch.Tensor]) -> str:
    return ", ".join(str(tuple(shape_of(tensor))) for tensor in tensors)


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """The whole tensor's shape. Call it with the subclass switched off."""
    own = where_of(tensor)
    return torch.Size(size if a is None else a.extent for size, a in zip(tensor.size(), own, strict=True))


def elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any function of values at one place, of tensors that broadcast."""
    if kwargs.get("out") is not None:
        raise PlanError(f"{func.__name__}(out=...) on a tensor that mesh.space cuts; leave out= away")
    names = list(kwargs)
    placed, where, space = together([*args, *kwargs.values()])
    positional, named = placed[: len(args)], dict(zip(names, placed[len(args) :], strict=True))
    return cut(func(*positional, **named), where, space)


def in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same, written into the first tensor."""
    target, names = args[0], list(kwargs)
    placed, where, _ = together([*args, *kwargs.values()])
    if not isinstance(target, CutTensor) or where != where_of(target):
        raise PlanError(
            f"{func.__name__} writes a tensor that mesh.space cuts into one that is whole, or of another size; use the "
            "form that returns a new tensor"
        )
    func(target, *placed[1 : len(args)], **dict(zip(names, placed[len(args) :], strict=True)))
    return target


def copying(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions of one tensor that keep its geometry; other tensors among the arguments are only looked at."""
    first, *rest = args
    others = [local(value) if isinstance(value, torch.Tensor) else value for value in rest]
    result = func(first, *others, **kwargs)
    if not isinstance(first, CutTensor) or result is first or not isinstance(result, torch.Tensor):
        return result
    return cut(result, where_of(first), space_of([first]))


def fact(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a part knows as well as the whole."""
    return func(*args, **kwargs)


def activation(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Elementwise functions of one tensor, possibly in place."""
    tensor = args[0]
    if kwargs.get("inplace"):
        func(tensor, *args[1:], **kwargs)
        return tensor
    return cut(func(tensor, *args[1:], **kwargs), where_of(tensor), space_of([tensor]))


for _names, _handler in (
    (_ARITHMETIC, elementwise),
    (_ACTIVATIONS, activation),
    (_IN_PLACE, in_place),
    (_COPIES, copying),
    (_FACTS, fact),
):
    HANDLERS.update(dict.fromkeys(_names.split(), _handler))


@handles("get:shape")
def _shape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return shape_of(args[0])


@handles("size")
def _size(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    dim = rest[0] if rest else kwargs.get("dim")
    return shape_of(tensor) if dim is None else shape_of(tensor)[dim]


@handles("numel", "nelement")
def _numel(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return shape_of(args[0]).numel()


@handles("dim", "ndimension", "get:ndim")
def _dim(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return len(where_of(args[0]))


@handles("__len__")
def _len(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return shape_of(args[0])[0]


@handles("__repr__", "__format__", "__str__")
def _repr(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return f"CutTensor({tuple(shape_of(args[0]))}, this rank's part {tuple(local(args[0]).shape)})"


@handles("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
def _new(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new tensor of a stated shape, whole on every rank."""
    return func(local(args[0]), *args[1:], **kwargs)


@handles("expand_as")
def _expand_as(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor seen in the whole shape of a cut one."""
    tensor, other = (*args, *kwargs.values())
    if isinstance(tensor, CutTensor):
        raise PlanError("expand_as of a tensor that mesh.space cuts; broadcast in arithmetic instead")
    return tensor.expand(shape_of(other))


@handles("prelu")
def _prelu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, weight = args
    return cut(func(local(tensor), weight), where_of(tensor), space_of([tensor]))


@handles("dropout")
def _dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mask is drawn for the whole tensor, as one device draws it, and this rank's part is kept."""
    tensor, where = args[0], where_of(args[0])
    p, training, inplace = _dropout_arguments(*args[1:], **kwargs)
    if not training or p == 0.0:
        return tensor
    with torch.no_grad():
        mask = F.dropout(torch.ones(shape_of(tensor), dtype=tensor.dtype, device=tensor.device), p, training)
        for dim, along in enumerate(where):
            if along is not None:
                mask = narrowed(mask, dim, along, space_of([tensor]))
    if inplace:
        tensor.mul_(mask)
        return tensor
    return cut(local(tensor) * mask, where, space_of([tensor]))


def _dropout_arguments(p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[float, bool, bool]:
    return p, training, inplace


@handles("dropout1d", "dropout2d", "dropout3d", "feature_dropout")
def _channel_dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whole channels are dropped: every rank draws the same ones."""
    tensor = args[0]
    if any(where_of(tensor)[:2]) or len(where_of(tensor)) < 3:
        raise PlanError(f"{func.__name__} on channels that mesh.space cuts; drop channels before they are cut")
    return activation(func, args, kwargs)


@handles("local_response_norm")
def _response_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Normalises over channels, at each place."""
    tensor = args[0]
    return cut(func(local(tensor), *args[1:], **kwargs), where_of(tensor), space_of([tensor]))


Function = Callable[..., Any]


class SpaceBatchNorm:
    """The forward of one BatchNorm: over data and the axes that cut its input; the plain one for a whole input."""

    def __init__(self, module: _BatchNorm, plain: Callable[[torch.Tensor], torch.Tensor], scope: BatchScope) -> None:
        self.module, self.plain, self.scope = module, plain, scope

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model gets its plain forward back: the ranks are not part of it."""
        return functools.partial, (type(self.module).forward, self.module)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if not isinstance(input, CutTensor):
            return self.plain(input)
        where, space = where_of(input), space_of([input])
        if any(where[:2]):
            raise PlanError(f"{type(self.module).__name__} on channels that mesh.space cuts; cut spatial dims only")
        wide = space.scopes[tuple(sorted(along.axis for along in where if along))]
        wide.counts, wide.recomputing = self.scope.counts, self.scope.recomputing
        return cut(GlobalForward(self.module, wide)(local(input)), where, space)


def share_statistics_in_space(model: nn.Module, scope: BatchScope) -> None:
    """Give every BatchNorm of `model` statistics over all parts of its input, on top of those over data."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.forward = SpaceBatchNorm(module, module.forward, scope)  # type: ignore[method-assign]


@handles("batch_norm")
def _batch_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The functional form: in evaluation only, when it uses no statistics of its input."""
    tensor, *rest = args
    training = kwargs.get("training", rest[4] if len(rest) > 4 else False)
    if training:
        raise PlanError("F.batch_norm(training=True) on a tensor that mesh.space cuts; use an nn.BatchNorm module")
    return cut(func(local(tensor), *rest, **kwargs), where_of(tensor), space_of([tensor]))


@handles("group_norm")
def _group_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _grouped(*args, **kwargs)


def _grouped(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Group normalisation (Wu and He 2018, arXiv 1803.08494): mean and variance in two sums over all parts."""
    where, space, part = where_of(input), space_of([input]), local(input)
    if any(where[:2]):
        raise PlanError("group_norm on channels that mesh.space cuts; cut spatial dims only")
    axes = tuple(sorted(along.axis for along in where if along))
    work = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
    grouped = work.reshape(part.shape[0], num_groups, -1)
    size = grouped.shape[-1]
    for dim, along in enumerate(where):
        if along is not None:
            size = size // part.shape[dim] * along.extent
    mean = all_sum(grouped.sum(-1, keepdim=True), axes, space) / size
    centred = grouped - mean
    variance = all_sum((centred * centred).sum(-1, keepdim=True), axes, space) / size
    result = (centred * torch.rsqrt(variance + eps)).reshape(part.shape)
    shape = [1, -1] + [1] * (part.dim() - 2)
    if weight is not None:
        result = result * weight.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    return cut(result.to(part.dtype), where, space)


@handles("instance_norm")
def _instance_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _each(*args, **kwargs)


def _each(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Instance normalisation: groups of one channel."""
    if running_mean is not None or running_var is not None:
        raise PlanError("instance_norm with running statistics where mesh.space cuts; use track_running_stats=False")
    return _grouped(input, local(input).shape[1], weight, bias, eps)


@handles(
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
    "poisson_nll_loss",
    "kl_div",
)
def _pointwise(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Losses whose value at each place is reduced by a sum or a mean over all elements."""
    reduction, named = _reduction(func, kwargs)
    names = list(named)
    placed, where, space = together([*args, *named.values()])
    rest = dict(zip(names, placed[len(args) :], strict=True))
    values = func(*placed[: len(args)], **rest, reduction="none")
    if reduction == "none":
        return cut(values, where, space)
    total = _total(values, where, space)
    if reduction == "sum":
        return total
    size = shape_of(cut(values, where, space))
    return total / (size[0] if reduction == "batchmean" else size.numel())


@handles("cross_entropy", "nll_loss")
def _classes(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Losses of class scores (batch, classes, places) against a class at each place, or class probabilities."""
    reduction, named = _reduction(func, kwargs)
    input, target = (*args, *(named.pop(name) for name in ("input", "target")[len(args) :]))[:2]
    if len(args) > 2:
        named["weight"] = args[2]
    space, where = space_of([input, target]), where_of(input)
    if len(args) > 3 or len(where) < 3 or where[1] is not None:
        raise PlanError(
            f"{func.__name__} on a tensor that mesh.space cuts: scores must be (batch, classes, places) with classes "
            "whole, and options given by name"
        )
    indices = not target.dtype.is_floating_point
    wanted = (where[0], *where[2:]) if indices else where
    if not any(where):  # scores are whole here and the target is not
        raise PlanError(f"{func.__name__} of a whole tensor against a target that mesh.space cuts; cut both or none")
    part, fitted = local(input), _fitted(target, wanted, space)
    values = func(part, fitted, **named, reduction="none")
    spread = (where[0], *where[2:])
    if reduction == "none":
        return cut(values, spread, space)
    total = _total(values, spread, space)
    if reduction == "sum":
        return total
    if not indices:
        return total / shape_of(cut(values, spread, space)).numel()
    with torch.no_grad():
        kept = fitted != named.get("ignore_index", -100)
        weight = named.get("weight")
        counts = kept.to(values.dtype) if weight is None else weight[fitted * kept] * kept
    return total / _total(counts, spread, space)


def _reduction(func: Function, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(how the loss is reduced, the other keyword arguments)."""
    named = {name: value for name, value in kwargs.items() if name not in ("reduction", "size_average", "reduce")}
    if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        raise PlanError(f"{func.__name__}(size_average=, reduce=) where mesh.space cuts; use reduction=")
    return kwargs.get("reduction", "mean"), named


def _total(values: torch.Tensor, where: Where, space: SpatialGroup) -> torch.Tensor:
    return all_sum(values.sum(), tuple(sorted(along.axis for along in where if along)), space)


def _fitted(target: torch.Tensor, where: Where, space: SpatialGroup) -> torch.Tensor:
    """The part of a target that belongs to scores cut like `where`."""
    own, part = where_of(target), local(target)
    if len(own) != len(where):
        raise PlanError(f"a target of {len(own)} dims for scores that have {len(where)} without classes")
    for dim, along in enumerate(where):
        if along is not None and own[dim] is None:
            if part.shape[dim] != along.extent:
                raise PlanError(f"a target of {part.shape[dim]} rows along dim {dim} for scores of {along.extent}")
            part = narrowed(part, dim, along, space)
        elif own[dim] != along:
            raise PlanError("target and scores are cut differently; give the target the size of the scores")
    return part
