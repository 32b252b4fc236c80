"""Handlers for functions that keep the shape, for reductions, losses, products and attention."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tutti.nn.masked_attention import attention
from tutti.nn.sparse_attention import block_sparse_attention
from tutti.parallel.divided_tensor import local, whole_shape
from tutti.parallel.tensor.tensor_activation import (
    PartPlacement,
    SplitTensor,
    fit,
    handles,
    lead,
    named,
    parted,
    properties,
    whole,
)
from tutti.parallel.tensor.tensor_collectives import SplitGroup, add, copy, draws_whole, own_stream, take

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
_QUERIES = """
    is_floating_point is_complex element_size get_device register_hook
    retain_grad is_contiguous data_ptr untyped_storage
"""
_PROPERTIES = """
    dtype device layout requires_grad grad_fn is_leaf is_cuda is_cpu is_sparse is_nested is_quantized is_meta
    is_mps is_xpu _version output_nr retains_grad itemsize
"""


@handles(*named(_UNARY))
def _unary(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One tensor in, one of the same shape out. In `x.to(y)` only `y` may be a part; only its dtype matters then."""
    first = args[0] if args else kwargs.get("input")
    result = func(*args, **kwargs)
    if not isinstance(first, SplitTensor):
        return result
    return result if result is first else parted(result, first.place)


@handles(*named(_BINARY))
def _binary(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operands that broadcast against each other; each is fitted to the ranges of the leading operand."""
    if "out" in kwargs or (func in _WHERE and len(args) + len(kwargs) < 3):
        return NotImplemented
    leaves, structure = pytree.tree_flatten((args, kwargs))
    inplace = _in_place(func)
    if inplace and not isinstance(args[0], SplitTensor):
        return NotImplemented
    leading = lead(leaves, args[0] if inplace else None)
    if leading is None:
        return NotImplemented
    back, spread, group = leading
    dims = max(leaf.ndim for leaf in leaves if isinstance(leaf, torch.Tensor))
    fitted = [fit(leaf, back, spread, group) for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(fitted, structure)
    result = func(*args, **kwargs)
    return result if inplace else parted(result, PartPlacement(dim=dims + back, spread=spread, group=group))


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


_WHERE = set(named("where"))


@handles(*named(_QUERIES), *properties(_PROPERTIES))
def _query(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Everything but the size is that of the part."""
    return func(*args, **kwargs)


@handles(*properties("data"))
def _data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return parted(func(*args), args[0].place)


@handles(F.dropout, torch.dropout)
def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank draws its own mask, because parts are different units. Without dropout nothing is drawn."""
    first = args[0] if args else kwargs.get("input")
    rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    if not isinstance(first, SplitTensor):
        return NotImplemented
    if not training or rate == 0.0:
        return first
    if draws_whole():
        return NotImplemented
    with own_stream(first.device, first.place.group):
        result = func(*args, **kwargs)
    return result if result is first else parted(result, first.place)


class _LogSoftmax(torch.autograd.Function):
    """log softmax over the last dim, which is divided over the ranks."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: SplitGroup) -> torch.Tensor:
        lowest = torch.finfo(logits.dtype).min
        top = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], lowest)
        top = group.sum(top.contiguous(), dist.ReduceOp.MAX)
        shifted = logits - top.unsqueeze(-1)
        total = group.sum(shifted.exp().sum(-1))
        result = shifted.sub_(total.log_().unsqueeze(-1))
        ctx.save_for_backward(result)
        ctx.group = group
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        total = copy(add(grad.sum(-1), ctx.group), ctx.group)
        return grad - result.exp() * total.unsqueeze(-1), None


def log_softmax(logits: torch.Tensor, dim: int, group: SplitGroup) -> torch.Tensor:
    """log softmax along `dim`, which is divided over the ranks; returns this rank's part.

    Where autocast is on, half precision is raised to float32, as autocast does for torch's log_softmax.
    """
    if torch.is_autocast_enabled(logits.device.type) and logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    result = _LogSoftmax.apply(logits.movedim(dim, -1), group)  # type: ignore[no-untyped-call]
    return result.movedim(-1, dim)  # type: ignore[no-any-return]


@handles(*named("softmax log_softmax"))
def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    first, dim = arguments["input"], arguments.get("dim")
    if dim is None or len(args) > 2:
        return NotImplemented
    if dim % first.ndim != first.place.dim:
        return parted(func(*args, **kwargs), first.place)
    dtype = kwargs.get("dtype")
    first, place = (first if dtype is None else first.to(dtype)), first.place
    result = log_softmax(first, place.dim, place.group)
    return parted(result if "log" in func.__name__ else result.exp(), place)


@handles(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows that are parts: weights are copied, so their gradients are all-reduced."""
    first = args[0] if args else kwargs.get("input")
    if not isinstance(first, SplitTensor):
        return NotImplemented
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if first.place.dim >= first.ndim - len(shape):
        return NotImplemented
    group = first.place.group

    def copied(value: Any) -> Any:
        return copy(value, group) if isinstance(value, torch.Tensor) else value

    args = (*args[:2], *(copied(value) for value in args[2:]))
    kwargs = {key: value if key == "input" else copied(value) for key, value in kwargs.items()}
    return parted(func(*args, **kwargs), first.place)


@handles(*named("sum mean amax amin logsumexp argmax argmin all any var std norm"))
def _reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reductions over dims that are not divided."""
    first, keep = args[0], kwargs.get("keepdim", False)
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    unsupported = len(args) > 2 or "norm" in func.__name__ or kwargs.keys() - {"dim", "keepdim", "dtype"}
    if unsupported or dims is None or isinstance(dims, bool) or (isinstance(dims, list | tuple) and not dims):
        return NotImplemented
    reduced = {dim % first.ndim for dim in ((dims,) if isinstance(dims, int) else dims)}
    place = first.place
    if place.dim in reduced:
        return NotImplemented
    dim = place.dim if keep else place.dim - sum(removed < place.dim for removed in reduced)
    return parted(func(*args, **kwargs), PartPlacement(dim=dim, spread=place.spread, group=place.group))


@handles(F.cross_entropy)
def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cross-entropy of logits (rows, classes, ...) whose classes are divided; targets are class indices."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    arguments: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    logits, target = arguments["input"], arguments["target"]
    deprecated = arguments.get("size_average") is not None or arguments.get("reduce") is not None
    if (
        not isinstance(logits, SplitTensor)
        or isinstance(target, SplitTensor)
        or target.is_floating_point()
        or deprecated
    ):
        return NotImplemented
    classes = 0 if logits.ndim == 1 else 1
    shape = whole_shape(logits)
    if logits.place.dim != classes or tuple(target.shape) != shape[:classes] + shape[classes + 1 :]:
        return NotImplemented
    group, spread = logits.place.group, logits.place.spread
    log_p = log_softmax(logits, classes, group).movedim(classes, -1)
    weight = arguments.get("weight")
    return _negative_log_likelihood(
        log_p,
        target,
        None if weight is None else (weight, take(weight, 0, spread, group)),
        _positions(target, logits.place),
        arguments.get("ignore_index", -100),
        arguments.get("reduction", "mean"),
        arguments.get("label_smoothing", 0.0),
        logits.place,
    )


def _positions(target: torch.Tensor, place: PartPlacement) -> tuple[torch.Tensor, torch.Tensor]:
    """(local position of each target, whether this rank holds it)."""
    local, is_held, offset = torch.zeros_like(target), torch.zeros_like(target, dtype=torch.bool), 0
    for start, stop in place.spread.parts[place.group.rank]:
        inside = (target >= start) & (target < stop)
        local = torch.where(inside, target - start + offset, local)
        is_held, offset = is_held | inside, offset + stop - start
    return local, is_held


def _negative_log_likelihood(
    log_p: torch.Tensor,
    target: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    positions: tuple[torch.Tensor, torch.Tensor],
    ignored: int,
    reduction: str,
    smoothing: float,
    place: PartPlacement,
) -> torch.Tensor:
    """The loss, as torch defines it, from this rank's log probabilities.

    Args:
        log_p: log probabilities (..., this rank's classes).
        target: indices among all classes.
        weights: class weights: of all classes, and of this rank's.
        positions: see `_positions`.
        ignored: the target index that the loss ignores.
        reduction: "none", "sum" or "mean".
        smoothing: label smoothing.
        place: placement of the logits.
    """
    local, is_held = positions
    counted = target != ignored
    classes = place.spread.size
    valid = ~counted | ((target >= 0) & (target < classes))
    torch._assert_async(valid.all(), f"a target is not among the {classes} classes")
    if log_p.shape[-1] == 0:
        log_p = torch.cat([log_p, log_p.new_zeros((*log_p.shape[:-1], 1))], -1)
    picked = log_p.gather(-1, local.unsqueeze(-1)).squeeze(-1) * (is_held & counted)
    scale = counted.to(log_p.dtype)
    if weights is not None:
        scale = scale * weights[0][target.clamp(0, classes - 1)]
    loss = -add(picked, place.group) * scale
    if smoothing > 0:
        uniform = log_p if weights is None else log_p * weights[1]
        smooth = -add(uniform.sum(-1), place.group) * counted
        loss = (1 - smoothing) * loss + smoothing / classes * smooth
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / scale.sum()


@handles(F.linear)
def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows (samples, tokens, heads) that are parts: weights are copied, so their gradients are all-reduced."""
    arguments = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias = arguments["input"], arguments["weight"], arguments.get("bias")
    if isinstance(bias, SplitTensor):
        return NotImplemented
    if isinstance(weight, SplitTensor):  # the model's code applies a divided matrix itself: outputs are parts
        if isinstance(x, SplitTensor) or weight.place.dim != 0 or bias is not None or weight.ndim != 2:
            return NotImplemented
        place = weight.place
        result = F.linear(copy(x, place.group), weight)
        return parted(result, PartPlacement(dim=result.ndim - 1, spread=place.spread, group=place.group))
    if not isinstance(x, SplitTensor) or x.place.dim == x.ndim - 1:
        return NotImplemented
    group = x.place.group
    return parted(F.linear(x, copy(weight, group), None if bias is None else copy(bias, group)), x.place)


@handles(*named("matmul __matmul__ bmm mm"))
def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs or min(args[0].ndim, args[1].ndim) < 2:
        return NotImplemented
    a, b = args
    cuts = [t.place.dim - t.ndim if isinstance(t, SplitTensor) else None for t in args]
    if cuts == [-1, -2] and a.place.spread == b.place.spread:  # the divided dim is summed over: ranks have terms
        return add(torch.matmul(a, b), a.place.group)
    if cuts in ([-2, None], [None, -1]):  # a is divided by rows, or b by columns
        divided = a if cuts[0] is not None else b
        group, spread = divided.place.group, divided.place.spread
        result = torch.matmul(*(t if t is divided else copy(t, group) for t in args))
        return parted(
            result, PartPlacement(dim=result.ndim + divided.place.dim - divided.ndim, spread=spread, group=group)
        )
    return _batched(func, args, [t for t in args if isinstance(t, SplitTensor)])


@handles(*named("baddbmm"))
def _baddbmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 3 or args[0].ndim != 3:
        return NotImplemented
    return _batched(func, args, [t for t in args if isinstance(t, SplitTensor)], kwargs)


def _batched(func: Any, args: tuple[Any, ...], parts: list[SplitTensor], kwargs: dict[str, Any] | None = None) -> Any:
    """Products of parts along a batch dim (heads): the other operands are fitted to the smallest part."""
    place, back = parts[0].place, parts[0].place.dim - parts[0].ndim
    dims = [t.place.dim - t.ndim for t in parts]
    if back > -3 or any(dim != back for dim in dims):
        return NotImplemented
    smallest = min(parts, key=lambda t: sum(t.place.spread.local(r) for r in range(place.group.size)))
    spread, group = smallest.place.spread, place.group
    if any(t.ndim >= -back and whole_shape(t)[back] not in (1, spread.size) for t in args):
        return NotImplemented
    result = func(*(fit(t, back, spread, group) for t in args), **(kwargs or {}))
    return parted(result, PartPlacement(dim=result.ndim + back, spread=spread, group=group))


@handles(torch.einsum)
def _einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Parts along a letter that the result has; operands without the letter are copied."""
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "..." in equation or "->" not in equation:
        return NotImplemented
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    parts = [(term, t) for term, t in zip(terms, operands, strict=True) if isinstance(t, SplitTensor)]
    letter, place = parts[0][0][parts[0][1].place.dim], parts[0][1].place
    spread, group = place.spread, place.group
    if letter not in right or any(term.count(letter) > 1 for term in terms):
        return NotImplemented
    if any(term[t.place.dim] != letter or t.place.spread != spread for term, t in parts):
        return NotImplemented
    fitted = [
        fit(t, term.index(letter) - len(term), spread, group) if letter in term else copy(whole(t), group)
        for term, t in zip(terms, operands, strict=True)
    ]
    return parted(torch.einsum(equation, *fitted), PartPlacement(dim=right.index(letter), spread=spread, group=group))


@handles(F.scaled_dot_product_attention)
def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Queries divided by heads (or another batch dim); keys and values are fitted to them."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    arguments: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    query, mask = arguments["query"], arguments.get("attn_mask")
    random = arguments.get("dropout_p", 0.0) > 0
    if not isinstance(query, SplitTensor) or query.place.dim > query.ndim - 3 or (random and draws_whole()):
        return NotImplemented
    place, back = query.place, query.place.dim - query.ndim
    spread, group = place.spread, place.group
    ratio = whole_shape(query)[-3] // whole_shape(arguments["key"])[-3] if arguments.get("enable_gqa") else 1
    keys = [arguments["key"], arguments["value"]]
    if ratio > 1 and not (back == -3 and all(_grouped(t, query, ratio) for t in keys)):
        keys = [_repeated(t, ratio) for t in keys]
        arguments["enable_gqa"] = False
    if not arguments.get("enable_gqa"):
        keys = [fit(t, back, spread, group) for t in keys]
    arguments.update(key=keys[0], value=keys[1], attn_mask=fit(mask, back, spread, group))
    if random:
        with own_stream(query.device, group):
            result = func(**arguments)
    else:
        result = func(**arguments)
    return parted(result, PartPlacement(dim=result.ndim + back, spread=spread, group=group))


@handles(attention, block_sparse_attention)
def _masked_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Queries divided by heads; keys and values are fitted to them, and masks are those of all heads."""
    query, key, value, *others = args
    if not isinstance(query, SplitTensor) or query.place.dim != 1:
        return NotImplemented
    spread, group = query.place.spread, query.place.group
    ratio = whole_shape(query)[1] // whole_shape(key)[1]
    keys = [key, value]
    if ratio > 1 and not all(_grouped(t, query, ratio) for t in keys):
        keys, ratio = [_repeated(t, ratio) for t in keys], 1
    if ratio == 1:
        keys = [fit(t, -3, spread, group) for t in keys]
    result = func(local(query), *map(local, keys), *others, **kwargs)
    return parted(result, PartPlacement(dim=1, spread=spread, group=group))


def _grouped(key: Any, query: SplitTensor, ratio: int) -> bool:
    """Whether, on every rank, the query heads are exactly those that use the key heads it holds."""
    return isinstance(key, SplitTensor) and key.place.dim == key.ndim - 3 and (
        key.place.spread.scaled(ratio) == query.place.spread
    )  # fmt: skip


def _repeated(key: Any, ratio: int) -> Any:
    """Each key head repeated `ratio` times in a row."""
    if not isinstance(key, SplitTensor):
        return torch.repeat_interleave(key, ratio, -3)
    place = key.place
    at_heads = place.dim == key.ndim - 3
    spread = place.spread.scaled(ratio) if at_heads else place.spread
    return parted(
        torch.repeat_interleave(key, ratio, -3), PartPlacement(dim=place.dim, spread=spread, group=place.group)
    )
