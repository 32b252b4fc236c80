"""Losses of cut tensors: each rank's places, then the mean over all places of the whole sample."""

from collections.abc import Callable
from typing import Any

import torch

from tutti.errors import PlanError
from tutti.parallel.spatial.exchange import Space, all_sum
from tutti.parallel.spatial.pointwise import shape_of, together
from tutti.parallel.spatial.tensor import Where, cut, handles, local, narrowed, space_of, where_of

Function = Callable[..., Any]


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


def _total(values: torch.Tensor, where: Where, space: Space) -> torch.Tensor:
    return all_sum(values.sum(), tuple(sorted(along.axis for along in where if along)), space)


def _fitted(target: torch.Tensor, where: Where, space: Space) -> torch.Tensor:
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
