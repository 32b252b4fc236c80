"""Runs one operator for its shapes: meta and real tensors may meet, and values that do not exist are bounded.

In a traced step parameters and floating inputs are on meta, while small integers and masks keep their values, because
code branches on them. Where both meet the result is on meta.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tag, Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from tutti.describe.meta import SMALL_NUMEL, flat_tensors, to_meta

_FACTORIES = frozenset(
    "empty empty_strided empty_permuted zeros ones full rand randn randint randperm arange linspace logspace eye "
    "scalar_tensor tril_indices triu_indices".split()
)
_VALUES = frozenset(("_local_scalar_dense", "equal", "is_nonzero"))
_INDEXING = frozenset("index index_put index_put_ _unsafe_index _unsafe_index_put _index_put_impl_".split())
_REAL_LIMIT = 2**24
"""The most elements an operator may really compute on, where it has no rule for shapes."""

Note = Callable[[str], None]


def run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], note: Note) -> Any:
    """`func(*args, **kwargs)` for shapes. `note` takes sentences about what had to be assumed."""
    name = func._schema.name.partition("::")[2] if isinstance(func, OpOverload) else ""
    if name in _FACTORIES or name.endswith("_like") or name.startswith("new_"):
        return _make(func, name, args, kwargs)
    tensors = list(flat_tensors((*args, *kwargs.values())))
    if not any(tensor.is_meta for tensor in tensors):
        if Tag.pointwise in getattr(func, "tags", ()) and _broadcast_numel(tensors) > SMALL_NUMEL:
            args, kwargs = tree_map_only(Tensor, to_meta, (args, kwargs))
        return func(*args, **kwargs)
    if name in _INDEXING:
        args = (args[0], _integers(args[1], note), *args[2:])
    elif name in ("nonzero", "masked_select"):
        return _assume_all(name, args, note)
    on_meta, options = tree_map_only(Tensor, lambda t: t if t.is_meta else to_meta(t), (args, kwargs))
    try:
        out = func(*on_meta, **options)
    except NotImplementedError:
        if name in _VALUES or sum(t.numel() for t in flat_tensors((*on_meta, *options.values()))) > _REAL_LIMIT:
            raise
        note(f"operator {name} has no shape rule: its result's shape was found on zeros")
        out = _on_zeros(func, on_meta, options)
    changed_real = name.endswith("_") and isinstance(args[0], Tensor) and not args[0].is_meta
    return args[0] if changed_real else out


def _make(func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new tensor: integers and masks keep values if they are small, all else is on meta."""
    sources = list(flat_tensors(args[:1]))
    on_meta = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory")}
    if sources:
        args = (to_meta(sources[0]) if not sources[0].is_meta else sources[0], *args[1:])
    outline = func(*args, **{**on_meta, "device": torch.device("meta")})
    wanted = kwargs.get("device")
    from_meta = wanted is not None and torch.device(wanted).type == "meta"
    floating = outline.is_floating_point() or outline.is_complex()
    if floating or outline.numel() > SMALL_NUMEL or from_meta or (wanted is None and sources and sources[0].is_meta):
        return outline
    real_args = (torch.empty_like(sources[0], device="cpu"), *args[1:]) if sources else args
    return func(*real_args, **{**on_meta, "device": torch.device("cpu")})


def _broadcast_numel(tensors: Sequence[Tensor]) -> int:
    try:
        return torch.broadcast_shapes(*(tensor.shape for tensor in tensors)).numel()
    except RuntimeError:
        return 0


def _integers(indices: Sequence[Tensor | None], note: Note) -> list[Tensor | None]:
    """Indices with masks replaced by the positions they select; all positions, where a mask has no values."""
    result: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            result.append(index)
        elif index.is_meta:
            _say_bounded(note)
            result.extend(to_meta(torch.empty(index.numel(), dtype=torch.long, device="meta")) for _ in index.shape)
        else:
            result.extend(to_meta(column) for column in index.nonzero().unbind(1))
    return result


def _assume_all(name: str, args: tuple[Any, ...], note: Note) -> Tensor:
    """The result of nonzero or masked_select if every element were selected (a real mask's true count is used)."""
    source: Tensor = args[0]
    if name == "nonzero":
        _say_bounded(note)
        return torch.empty((source.numel(), source.dim()), dtype=torch.long, device="meta")
    mask: Tensor = args[1]
    if not mask.is_meta and mask.shape == source.shape:
        return torch.empty(int(mask.sum()), dtype=source.dtype, device="meta")
    _say_bounded(note)
    numel = torch.broadcast_shapes(source.shape, mask.shape).numel()
    return torch.empty(numel, dtype=source.dtype, device="meta")


def _say_bounded(note: Note) -> None:
    note("elements selected by computed values are counted as if all were selected: an upper bound")


def _on_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The shapes of an operator's results, from running it on zeros."""
    args, kwargs = tree_map_only(Tensor, lambda t: torch.zeros_like(t, device="cpu"), (args, kwargs))
    return tree_map_only(Tensor, to_meta, func(*args, **kwargs))
