"""Functions of a cut tensor whose every value depends on values at the same place: parts are computed as they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tutti.errors import PlanError
from tutti.parallel.spatial.exchange import Space
from tutti.parallel.spatial.tensor import (
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


def together(values: list[Any]) -> tuple[list[Any], Where, Space]:
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


def _fit(tensor: torch.Tensor, where: Where, space: Space) -> torch.Tensor:
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
