"""Elementwise functions, normalisations and losses of cut tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tutti.errors import PlanError
from tutti.parallel.data.batchnorm import BatchScope, GlobalForward, is_batch_norm, own_forward
from tutti.parallel.divided_tensor import local, whole_shape
from tutti.parallel.spatial.halo_exchange import SpatialGroup, all_sum
from tutti.parallel.spatial.spatial_tensor import (
    Along,
    SpatialTensor,
    Where,
    cut,
    handles,
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
_PROPERTIES = (
    "get:dtype get:device get:requires_grad get:is_leaf get:grad_fn get:layout get:is_cuda get:is_cpu get:is_meta "
    "get:is_sparse get:is_mkldnn get:is_quantized get:is_nested get:itemsize get:names get:_version get:output_nr "
    "get:retains_grad get:is_mps get:is_xpu get:is_mtia set:requires_grad is_floating_point is_complex element_size "
    "is_contiguous is_inference is_signed get_device is_conj is_neg register_hook __hash__ "
    "register_post_accumulate_grad_hook"
)


def align_parts(values: list[Any]) -> tuple[list[Any], Where, SpatialGroup]:
    """Cut broadcastable tensors alike.

    Plain tensors, and tensors that are whole along a dim which another cuts, are narrowed to this rank's rows.

    Args:
        values: tensors and other arguments.

    Returns:
        The values with tensors as plain parts, how the broadcast result is cut, and the parts' SpatialGroup.

    Raises:
        PlanError: sizes along a cut dim differ.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    space = space_of(tensors)
    dims = max(len(where_of(tensor)) for tensor in tensors)
    where: list[Along | None] = [None] * dims
    for tensor in tensors:
        for position, along in zip(range(dims - len(where_of(tensor)), dims), where_of(tensor), strict=True):
            if along is not None and where[position] not in (None, along):
                raise PlanError(f"mesh.space: cut tensors differ in size: {_shapes(tensors)}; make their sizes equal")
            where[position] = along or where[position]
    parts = [_fit(value, tuple(where), space) if isinstance(value, torch.Tensor) else value for value in values]
    return parts, tuple(where), space


def _fit(tensor: torch.Tensor, where: Where, space: SpatialGroup) -> torch.Tensor:
    """The part of one tensor that broadcasts with parts cut like `where`."""
    own_where, part = where_of(tensor), local(tensor)
    for dim, along in enumerate(where[len(where) - len(own_where) :]):
        if along is None or own_where[dim] is not None or part.shape[dim] == 1:
            continue
        if part.shape[dim] != along.extent:
            raise PlanError(
                f"mesh.space: a tensor of shape {tuple(part.shape)} cannot broadcast with a cut tensor of "
                f"{along.extent} rows along dim {dim - part.dim()}; make its size there {along.extent} or 1"
            )
        part = narrowed(part, dim, along, space)
    return part


def _shapes(tensors: list[torch.Tensor]) -> str:
    return ", ".join(str(tuple(whole_shape(tensor))) for tensor in tensors)


def elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an elementwise function to tensors that broadcast."""
    if kwargs.get("out") is not None:
        raise PlanError(f"mesh.space: {func.__name__}(out=...) is not supported on a cut tensor; omit out=")
    names = list(kwargs)
    parts, where, space = align_parts([*args, *kwargs.values()])
    positional, named = parts[: len(args)], dict(zip(names, parts[len(args) :], strict=True))
    return cut(func(*positional, **named), where, space)


def in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an elementwise function that writes into its first argument."""
    target, names = args[0], list(kwargs)
    parts, where, _ = align_parts([*args, *kwargs.values()])
    if not isinstance(target, SpatialTensor) or where != where_of(target):
        raise PlanError(
            f"mesh.space: {func.__name__} writes a cut tensor into a tensor that is whole or has another size; use "
            "the form that returns a new tensor"
        )
    func(target, *parts[1 : len(args)], **dict(zip(names, parts[len(args) :], strict=True)))
    return target


def copying(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function of one tensor that preserves how it is cut. Other tensor arguments only provide properties."""
    first, *rest = args
    others = [local(value) if isinstance(value, torch.Tensor) else value for value in rest]
    result = func(first, *others, **kwargs)
    if not isinstance(first, SpatialTensor) or result is first or not isinstance(result, torch.Tensor):
        return result
    return cut(result, where_of(first), space_of([first]))


def read_property(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read a property that the part shares with the whole tensor."""
    return func(*args, **kwargs)


def activation(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an elementwise function of one tensor, which may be in place."""
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
    (_PROPERTIES, read_property),
):
    SpatialTensor.handlers.update(dict.fromkeys(_names.split(), _handler))


@handles("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
def _new(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new tensor of the given shape, whole on every rank."""
    return func(local(args[0]), *args[1:], **kwargs)


@handles("expand_as")
def _expand_as(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Expand a plain tensor to the whole shape of a cut one."""
    tensor, other = (*args, *kwargs.values())
    if isinstance(tensor, SpatialTensor):
        raise PlanError("mesh.space: expand_as is not supported on a cut tensor; let arithmetic broadcast it instead")
    return tensor.expand(whole_shape(other))


@handles("prelu")
def _prelu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, weight = args
    return cut(func(local(tensor), weight), where_of(tensor), space_of([tensor]))


@handles("dropout")
def _dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the mask for the whole tensor, as one device would, and apply this rank's part of it."""
    tensor, where = args[0], where_of(args[0])
    p, training, inplace = _dropout_arguments(*args[1:], **kwargs)
    if not training or p == 0.0:
        return tensor
    with torch.no_grad():
        mask = F.dropout(torch.ones(whole_shape(tensor), dtype=tensor.dtype, device=tensor.device), p, training)
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
    """Drop whole channels; every rank draws the same ones."""
    tensor = args[0]
    if any(where_of(tensor)[:2]) or len(where_of(tensor)) < 3:
        raise PlanError(
            f"mesh.space: {func.__name__} needs (batch, channels, ...) with batch and channels whole; apply it "
            "before these are cut"
        )
    return activation(func, args, kwargs)


@handles("local_response_norm")
def _response_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Normalises over channels at each position."""
    tensor = args[0]
    return cut(func(local(tensor), *args[1:], **kwargs), where_of(tensor), space_of([tensor]))


Function = Callable[..., Any]


class SpaceBatchNorm:
    """The forward of a BatchNorm. Statistics of a cut input span data and the axes that cut it.

    A whole input goes to `plain`, the forward that this one replaces. A forward that is not torch's, `own`, gets the
    cut input, and only its F.batch_norm is replaced.
    """

    def __init__(self, module: nn.Module, plain: Function, own: Function | None, scope: BatchScope) -> None:
        self.module, self.plain, self.own, self.scope = module, plain, own, scope

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model gets its original forward back: process groups cannot be pickled."""
        return GlobalForward(self.module, self.scope, self.own).__reduce__()

    def __call__(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, SpatialTensor):
            return self.plain(input, *args, **kwargs)
        forward = GlobalForward(self.module, self._scope_of(input), self.own, apply=on_part)
        return forward(input, *args, **kwargs) if self.own is not None else on_part(forward, input)

    def _scope_of(self, input: torch.Tensor) -> BatchScope:
        where, space = where_of(input), space_of([input])
        if any(where[:2]):
            raise PlanError(f"mesh.space: {type(self.module).__name__} got cut channels; cut spatial dims only")
        space_scope = space.scopes[tuple(sorted(along.axis for along in where if along))]
        space_scope.counts, space_scope.recomputing = self.scope.counts, self.scope.recomputing
        return space_scope


def on_part(normalise: Function, input: torch.Tensor) -> torch.Tensor:
    """Normalise this rank's part of a cut input; a whole one as it is."""
    if not isinstance(input, SpatialTensor):
        return normalise(input)  # type: ignore[no-any-return]
    return cut(normalise(local(input)), where_of(input), space_of([input]))


def share_statistics_in_space(model: nn.Module, scope: BatchScope) -> None:
    """Make the statistics of every BatchNorm span all parts of its input, in addition to data."""
    for module in model.modules():
        if is_batch_norm(module):
            module.forward = SpaceBatchNorm(module, module.forward, own_forward(module), scope)


@handles("batch_norm")
def _batch_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The functional form, supported only in evaluation, where it uses no statistics of its input."""
    tensor, *rest = args
    training = kwargs.get("training", rest[4] if len(rest) > 4 else False)
    if training:
        raise PlanError(
            "mesh.space: F.batch_norm(training=True) is not supported on a cut tensor; use an nn.BatchNorm module"
        )
    return cut(func(local(tensor), *rest, **kwargs), where_of(tensor), space_of([tensor]))


@handles("group_norm")
def _group_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _group_normalised(*args, **kwargs)


def _group_normalised(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Group normalisation (Wu and He 2018, arXiv 1803.08494). Mean and variance take one sum over all parts each."""
    where, space, part = where_of(input), space_of([input]), local(input)
    if any(where[:2]):
        raise PlanError("mesh.space: group_norm got cut channels; cut spatial dims only")
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
    return _instance_normalised(*args, **kwargs)


def _instance_normalised(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Instance normalisation: group normalisation with one channel per group."""
    if running_mean is not None or running_var is not None:
        raise PlanError(
            "mesh.space: instance_norm with running statistics is not supported on a cut tensor; use "
            "track_running_stats=False"
        )
    return _group_normalised(input, local(input).shape[1], weight, bias, eps)


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
def _pointwise_loss(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Losses computed at each position and reduced by a sum or mean over all elements."""
    reduction, named = _reduction(func, kwargs)
    names = list(named)
    parts, where, space = align_parts([*args, *named.values()])
    rest = dict(zip(names, parts[len(args) :], strict=True))
    values = func(*parts[: len(args)], **rest, reduction="none")
    if reduction == "none":
        return cut(values, where, space)
    total = _sum_over_parts(values, where, space)
    if reduction == "sum":
        return total
    size = whole_shape(cut(values, where, space))
    return total / (size[0] if reduction == "batchmean" else size.numel())


@handles("cross_entropy", "nll_loss")
def _class_loss(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Losses of class scores (batch, classes, positions) and a class per position, or class probabilities."""
    reduction, named = _reduction(func, kwargs)
    input, target = (*args, *(named.pop(name) for name in ("input", "target")[len(args) :]))[:2]
    if len(args) > 2:
        named["weight"] = args[2]
    space, where = space_of([input, target]), where_of(input)
    if len(args) > 3 or len(where) < 3 or where[1] is not None:
        raise PlanError(
            f"mesh.space: {func.__name__} on a cut tensor needs scores of (batch, classes, positions) with whole "
            "classes; pass its options by name"
        )
    indices = not target.dtype.is_floating_point
    target_where = (where[0], *where[2:]) if indices else where
    if not any(where):
        raise PlanError(
            f"mesh.space: {func.__name__} got whole scores and a cut target; make the target whole with "
            "tutti.parallel.spatial.whole"
        )
    part, fitted = local(input), _fit_target(target, target_where, space)
    values = func(part, fitted, **named, reduction="none")
    loss_where = (where[0], *where[2:])
    if reduction == "none":
        return cut(values, loss_where, space)
    total = _sum_over_parts(values, loss_where, space)
    if reduction == "sum":
        return total
    if not indices:
        return total / whole_shape(cut(values, loss_where, space)).numel()
    with torch.no_grad():
        counted = fitted != named.get("ignore_index", -100)
        weight = named.get("weight")
        counts = counted.to(values.dtype) if weight is None else weight[fitted * counted] * counted
    return total / _sum_over_parts(counts, loss_where, space)


def _reduction(func: Function, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(reduction of the loss, the other keyword arguments)."""
    named = {name: value for name, value in kwargs.items() if name not in ("reduction", "size_average", "reduce")}
    if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        raise PlanError(
            f"mesh.space: {func.__name__} does not support size_average= and reduce= on a cut tensor; use reduction="
        )
    return kwargs.get("reduction", "mean"), named


def _sum_over_parts(values: torch.Tensor, where: Where, space: SpatialGroup) -> torch.Tensor:
    return all_sum(values.sum(), tuple(sorted(along.axis for along in where if along)), space)


def _fit_target(target: torch.Tensor, where: Where, space: SpatialGroup) -> torch.Tensor:
    """The part of a target that matches scores cut like `where`."""
    own_where, part = where_of(target), local(target)
    if len(own_where) != len(where):
        raise PlanError(
            f"mesh.space: the target has {len(own_where)} dims, but the scores have {len(where)} without classes; give "
            "the target the shape of the scores without classes"
        )
    for dim, along in enumerate(where):
        if along is not None and own_where[dim] is None:
            if part.shape[dim] != along.extent:
                raise PlanError(
                    f"mesh.space: the target has {part.shape[dim]} rows along dim {dim}, but the scores have "
                    f"{along.extent}; make the sizes equal"
                )
            part = narrowed(part, dim, along, space)
        elif own_where[dim] != along:
            raise PlanError("mesh.space: target and scores are cut differently; make their sizes equal")
    return part
