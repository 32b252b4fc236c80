"""The table's functions that normalise or reduce, and cross-entropy over a vocabulary that is divided.

The vocabulary-parallel softmax exchanges one maximum and one sum a row, not the logits (Shoeybi et al. 2019, arXiv
1909.08053, section 3).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tutti.parallel.tensor.exchange import SplitGroup, add, copy, take
from tutti.parallel.tensor.parted import Parted, Place, handles, named, parted, whole_shape


class _LogSoftmax(torch.autograd.Function):
    """log softmax over the last dim, of which every rank has a part."""

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
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        total = ctx.group.sum(grad.sum(-1))
        return grad - result.exp() * total.unsqueeze(-1), None


def log_softmax(logits: torch.Tensor, dim: int, group: SplitGroup) -> torch.Tensor:
    """log softmax along `dim`, of which every rank has a part; returns this rank's part. As autocast would have it,
    low precision is raised to float32 where autocast is on."""
    if torch.is_autocast_enabled(logits.device.type) and logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    result = _LogSoftmax.apply(logits.movedim(dim, -1), group)  # type: ignore[no-untyped-call]
    return result.movedim(-1, dim)  # type: ignore[no-any-return]


@handles(*named("softmax log_softmax"))
def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    first, dim = given["input"], given.get("dim")
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
    """Rows that are parts; weights are copied, their gradients summed."""
    first = args[0] if args else kwargs.get("input")
    if not isinstance(first, Parted):
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
    """Reductions over dims that are not cut."""
    first, keep = args[0], kwargs.get("keepdim", False)
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    odd = len(args) > 2 or "norm" in func.__name__ or kwargs.keys() - {"dim", "keepdim", "dtype"}
    if odd or dims is None or isinstance(dims, bool) or (isinstance(dims, list | tuple) and not dims):
        return NotImplemented
    gone = {dim % first.ndim for dim in ((dims,) if isinstance(dims, int) else dims)}
    place = first.place
    if place.dim in gone:
        return NotImplemented
    dim = place.dim if keep else place.dim - sum(one < place.dim for one in gone)
    return parted(func(*args, **kwargs), Place(dim=dim, spread=place.spread, group=place.group))


@handles(F.cross_entropy)
def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cross-entropy of logits (rows, classes, ...) whose classes are divided; targets are class indices."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    logits, target = given["input"], given["target"]
    old = given.get("size_average") is not None or given.get("reduce") is not None
    if not isinstance(logits, Parted) or isinstance(target, Parted) or target.is_floating_point() or old:
        return NotImplemented
    classes = 0 if logits.ndim == 1 else 1
    shape = whole_shape(logits)
    if logits.place.dim != classes or tuple(target.shape) != shape[:classes] + shape[classes + 1 :]:
        return NotImplemented
    group, spread = logits.place.group, logits.place.spread
    log_p = log_softmax(logits, classes, group).movedim(classes, -1)
    weight = given.get("weight")
    return _negative_log_likelihood(
        log_p,
        target,
        None if weight is None else (weight, take(weight, 0, spread, group)),
        _positions(target, logits.place),
        given.get("ignore_index", -100),
        given.get("reduction", "mean"),
        given.get("label_smoothing", 0.0),
        logits.place,
    )


def _positions(target: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """(local position of each target, whether this rank holds it)."""
    local, held, offset = torch.zeros_like(target), torch.zeros_like(target, dtype=torch.bool), 0
    for start, stop in place.spread.parts[place.group.rank]:
        inside = (target >= start) & (target < stop)
        local = torch.where(inside, target - start + offset, local)
        held, offset = held | inside, offset + stop - start
    return local, held


def _negative_log_likelihood(
    log_p: torch.Tensor,
    target: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    positions: tuple[torch.Tensor, torch.Tensor],
    ignored: int,
    reduction: str,
    smoothing: float,
    place: Place,
) -> torch.Tensor:
    """From this rank's log probabilities (..., classes of its own) to the loss, as torch defines it."""
    local, held = positions
    counted = target != ignored
    classes = place.spread.size
    known = ~counted | ((target >= 0) & (target < classes))
    torch._assert_async(known.all(), f"a target is not among the {classes} classes")
    if log_p.shape[-1] == 0:
        log_p = torch.cat([log_p, log_p.new_zeros((*log_p.shape[:-1], 1))], -1)
    picked = log_p.gather(-1, local.unsqueeze(-1)).squeeze(-1) * (held & counted)
    scale = counted.to(log_p.dtype)
    if weights is not None:
        scale = scale * weights[0][target.clamp(0, classes - 1)]
    loss = -add(picked, place.group) * scale
    if smoothing > 0:
        even = log_p if weights is None else log_p * weights[1]
        smooth = -add(even.sum(-1), place.group) * counted
        loss = (1 - smoothing) * loss + smoothing / classes * smooth
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / scale.sum()
