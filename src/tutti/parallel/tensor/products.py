"""The table's products: linear, matmul, einsum and attention, wherever the cut dim is not summed over, or by both."""

from typing import Any

import torch
from torch.nn import functional as F

from tutti.parallel.tensor.exchange import add, copy
from tutti.parallel.tensor.parted import Parted, Place, fit, handles, named, parted, whole, whole_shape
from tutti.parallel.tensor.streams import draws_whole, own_stream


@handles(F.linear)
def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows (samples, tokens, heads) that are parts: weights are copied, their gradients summed."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if isinstance(bias, Parted):
        return NotImplemented
    if isinstance(weight, Parted):  # as a user's own code applies a divided matrix: outputs are parts
        if isinstance(x, Parted) or weight.place.dim != 0 or bias is not None or weight.ndim != 2:
            return NotImplemented
        place = weight.place
        result = F.linear(copy(x, place.group), weight)
        return parted(result, Place(dim=result.ndim - 1, spread=place.spread, group=place.group))
    if not isinstance(x, Parted) or x.place.dim == x.ndim - 1:
        return NotImplemented
    group = x.place.group
    return parted(F.linear(x, copy(weight, group), None if bias is None else copy(bias, group)), x.place)


@handles(*named("matmul __matmul__ bmm mm"))
def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs or min(args[0].ndim, args[1].ndim) < 2:
        return NotImplemented
    a, b = args
    cuts = [t.place.dim - t.ndim if isinstance(t, Parted) else None for t in args]
    if cuts == [-1, -2] and a.place.spread == b.place.spread:  # summed over: every rank has a term
        return add(torch.matmul(a, b), a.place.group)
    if cuts in ([-2, None], [None, -1]):  # rows of one side, columns of the other
        lead = a if cuts[0] is not None else b
        group, spread = lead.place.group, lead.place.spread
        result = torch.matmul(*(t if t is lead else copy(t, group) for t in args))
        return parted(result, Place(dim=result.ndim + lead.place.dim - lead.ndim, spread=spread, group=group))
    return _batched(func, args, [t for t in args if isinstance(t, Parted)])


@handles(*named("baddbmm"))
def _baddbmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 3 or args[0].ndim != 3:
        return NotImplemented
    return _batched(func, args, [t for t in args if isinstance(t, Parted)], kwargs)


def _batched(func: Any, args: tuple[Any, ...], parts: list[Parted], kwargs: dict[str, Any] | None = None) -> Any:
    """Parts along a batch dim (heads): the other operands are fitted to the first."""
    place, back = parts[0].place, parts[0].place.dim - parts[0].ndim
    dims = [t.place.dim - t.ndim for t in parts]
    if back > -3 or any(dim != back for dim in dims):
        return NotImplemented
    smallest = min(parts, key=lambda t: sum(t.place.spread.local(r) for r in range(place.group.size)))
    spread, group = smallest.place.spread, place.group
    if any(t.ndim >= -back and whole_shape(t)[back] not in (1, spread.size) for t in args):
        return NotImplemented
    result = func(*(fit(t, back, spread, group) for t in args), **(kwargs or {}))
    return parted(result, Place(dim=result.ndim + back, spread=spread, group=group))


@handles(torch.einsum)
def _einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Parts along a letter that the result keeps; operands without the letter are copied."""
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "..." in equation or "->" not in equation:
        return NotImplemented
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    parts = [(term, t) for term, t in zip(terms, operands, strict=True) if isinstance(t, Parted)]
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
    return parted(torch.einsum(equation, *fitted), Place(dim=right.index(letter), spread=spread, group=group))


@handles(F.scaled_dot_product_attention)
def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Heads (or any batch dim) of the query that are parts; keys and values are fitted to them."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    query, mask = given["query"], given.get("attn_mask")
    random = given.get("dropout_p", 0.0) > 0
    if not isinstance(query, Parted) or query.place.dim > query.ndim - 3 or (random and draws_whole()):
        return NotImplemented
    place, back = query.place, query.place.dim - query.ndim
    spread, group = place.spread, place.group
    ratio = whole_shape(query)[-3] // whole_shape(given["key"])[-3] if given.get("enable_gqa") else 1
    keys = [given["key"], given["value"]]
    if ratio > 1 and not (back == -3 and all(_grouped(t, query, ratio) for t in keys)):
        keys = [_repeated(t, ratio) for t in keys]
        given["enable_gqa"] = False
    if not given.get("enable_gqa"):
        keys = [fit(t, back, spread, group) for t in keys]
    given.update(key=keys[0], value=keys[1], attn_mask=fit(mask, back, spread, group))
    if random:
        with own_stream(query.device, group):
            result = func(**given)
    else:
        result = func(**given)
    return parted(result, Place(dim=result.ndim + back, spread=spread, group=group))


def _grouped(key: Any, query: Parted, ratio: int) -> bool:
    """Whether this rank's, and every rank's, query heads are whole groups of the key heads it holds."""
    return isinstance(key, Parted) and key.place.dim == key.ndim - 3 and (
        key.place.spread.scaled(ratio) == query.place.spread
    )  # fmt: skip


def _repeated(key: Any, ratio: int) -> Any:
    """Every key head, `ratio` times one behind another."""
    if not isinstance(key, Parted):
        return torch.repeat_interleave(key, ratio, -3)
    place = key.place
    at_heads = place.dim == key.ndim - 3
    spread = place.spread.scaled(ratio) if at_heads else place.spread
    return parted(torch.repeat_interleave(key, ratio, -3), Place(dim=place.dim, spread=spread, group=place.group))
