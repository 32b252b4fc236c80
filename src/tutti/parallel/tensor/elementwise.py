"""The table's elementwise functions, what is asked of a tensor, and dropout."""

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tutti.parallel.tensor.parted import Parted, Place, fit, handles, lead, named, parted, properties, whole_shape
from tutti.parallel.tensor.streams import draws_whole, own_stream

_UNARY = """
    abs neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sin cos tan asin acos atan
    sinh cosh tanh asinh acosh atanh erf erfc sigmoid logit relu relu_ sigmoid_ tanh_ gelu silu mish softplus
    softsign logsigmoid elu celu selu relu6 leaky_relu hardtanh hardswish hardsigmoid tanhshrink softshrink
    hardshrink threshold floor ceil round trunc frac sign sgn reciprocal nan_to_num isnan isinf isfinite
    logical_not bitwise_not zeros_like ones_like full_like empty_like detach clone contiguous float double half
    bfloat16 long int bool to type type_as cpu cuda requires_grad_ detach_ zero_ fill_ exp_ sqrt_ rsqrt_ neg_
    abs_ elu_ silu_ expit __neg__ __abs__ __invert__ __pos__ alias_copy
"""
_BINARY = """
    add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power
    maximum minimum fmax fmin atan2 hypot eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and
    bitwise_or bitwise_xor where masked_fill lerp addcmul addcdiv xlogy clamp clip clamp_min clamp_max clamp_
    add_ sub_ mul_ div_ pow_ masked_fill_ lerp_ addcmul_ addcdiv_ __add__ __radd__ __iadd__ __sub__ __rsub__
    __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __floordiv__ __pow__ __rpow__
    __mod__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ copysign ldexp
"""
_ASKED = """
    dim size numel nelement __len__ is_floating_point is_complex element_size get_device register_hook
    retain_grad is_contiguous data_ptr untyped_storage
"""
_PROPERTIES = """
    dtype device layout requires_grad grad_fn is_leaf is_cuda is_cpu is_sparse is_nested is_quantized is_meta
    is_mps is_xpu _version output_nr retains_grad itemsize
"""


@handles(*named(_UNARY))
def _unary(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One tensor in, one of its shape out. In `x.to(y)` the part may be `y` alone: then only its dtype counts."""
    first = args[0] if args else kwargs.get("input")
    result = func(*args, **kwargs)
    if not isinstance(first, Parted):
        return result
    return result if result is first else parted(result, first.place)


@handles(*named(_BINARY))
def _binary(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operands that broadcast against each other, each fitted to the parts of the one that leads."""
    if "out" in kwargs or (func in _WHERE and len(args) + len(kwargs) < 3):
        return NotImplemented
    leaves, structure = pytree.tree_flatten((args, kwargs))
    inplace = _in_place(func)
    if inplace and not isinstance(args[0], Parted):
        return NotImplemented
    found = lead(leaves, args[0] if inplace else None)
    if found is None:
        return NotImplemented
    back, spread, group = found
    dims = max(leaf.ndim for leaf in leaves if isinstance(leaf, torch.Tensor))
    fitted = [fit(leaf, back, spread, group) for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(fitted, structure)
    result = func(*args, **kwargs)
    return result if inplace else parted(result, Place(dim=dims + back, spread=spread, group=group))


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


_WHERE = set(named("where"))


@handles(*named(_ASKED), *properties(_PROPERTIES))
def _ask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Questions: about sizes the whole tensor answers, about the rest the part."""
    name, shape = getattr(func, "__name__", ""), whole_shape(args[0])
    if name == "size":
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return torch.Size(shape) if dim is None else shape[dim]
    if name == "__len__":
        return shape[0]
    if name in ("numel", "nelement"):
        return torch.Size(shape).numel()
    return func(*args, **kwargs)


@handles(*properties("shape"))
def _shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.Size(whole_shape(args[0]))


@handles(*properties("ndim"))
def _ndim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return len(args[0].shape)


@handles(*properties("data"))
def _data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return parted(func(*args), args[0].place)


@handles(torch.numel)
def _numel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.Size(whole_shape(args[0])).numel()


@handles(F.dropout, torch.dropout)
def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws of a part's own: parts are different units, so their masks differ. Without dropout nothing is drawn."""
    first = args[0] if args else kwargs.get("input")
    rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    if not isinstance(first, Parted):
        return NotImplemented
    if not training or rate == 0.0:
        return first
    if draws_whole():
        return NotImplemented
    with own_stream(first.device, first.place.group):
        result = func(*args, **kwargs)
    return result if result is first else parted(result, first.place)
