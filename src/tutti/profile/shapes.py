"""Runs operators for their shapes, keeping the values that code may branch on.

In a traced step parameters and floating inputs are on meta, while small integers and masks are real. Where both meet
the result is on meta. A small meta tensor made from known values alone (a mask, positions) has a real *shadow*, so that
`mask.any()` and `x[mask]` work; what depends on values that do not exist is bounded from above, with a note.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tag, Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from tutti.profile.cost import names
from tutti.profile.meta import SMALL_NUMEL, flat_tensors, to_meta

_FACTORIES = names(
    "empty empty_strided empty_permuted zeros ones full rand randn randint randperm arange linspace logspace eye "
    "scalar_tensor tril_indices triu_indices"
)
_INDEXING = names("index index_put index_put_ _unsafe_index _unsafe_index_put _index_put_impl_")
_SIZED = names("_pack_padded_sequence _pack_padded_sequence_backward _pad_packed_sequence")  # take lengths on the CPU
_VALUES = names("_local_scalar_dense equal is_nonzero")
_REAL_LIMIT = 2**24
"""The most elements an operator may really compute on, where it has no rule for shapes."""
_META, _CPU = torch.device("meta"), torch.device("cpu")


class Shapes:
    """Runs operators. `note` takes sentences about what had to be assumed."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
        self.shadows: Any = WeakTensorKeyDictionary()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)` for shapes."""
        name = func._schema.name.partition("::")[2] if isinstance(func, OpOverload) else ""
        if name in _FACTORIES or name.endswith("_like") or name.startswith("new_"):
            return self._make(func, args, kwargs)
        tensors = list(flat_tensors((*args, *kwargs.values())))
        if name in _SIZED:
            return func(*args, **kwargs)
        if all(self._known(tensor) for tensor in tensors) and not _spreads(func, tensors):
            if not any(tensor.is_meta for tensor in tensors):
                return func(*args, **kwargs)
            return self._with_values(func, name, args, kwargs)
        if name.endswith("_") and args[0].is_meta:
            self.shadows.pop(args[0], None)
        if name in ("nonzero", "masked_select"):
            return self._assume_all(name, args)
        if name in _INDEXING:
            args = (args[0], self._positions(args[1]), *args[2:])
        return self._outline(func, name, args, kwargs)

    def _known(self, tensor: Tensor) -> bool:
        return tensor.numel() <= SMALL_NUMEL and (not tensor.is_meta or tensor in self.shadows)

    def _value(self, tensor: Tensor) -> Tensor:
        value: Tensor = self.shadows[tensor] if tensor.is_meta else tensor
        return value

    def _with_values(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute really, and give the meta tensors the results as their shadows."""
        real_args, real_kwargs = tree_map_only(Tensor, self._value, (args, _moved(kwargs, _CPU)))
        values = func(*real_args, **real_kwargs)
        device = kwargs.get("device")
        if name in _VALUES or (device is not None and torch.device(device).type == "cpu"):
            return values
        if name.endswith("_"):
            return args[0]
        try:  # the operator itself, so that views stay views
            out = func(*tree_map_only(Tensor, _meta, args), **tree_map_only(Tensor, _meta, _moved(kwargs, _META)))
        except (NotImplementedError, RuntimeError):  # its shape depends on values, which are known
            out = tree_map_only(Tensor, to_meta, values)
        for outline, value in zip(flat_tensors([out]), flat_tensors([values]), strict=True):
            self.shadows[outline] = value
        return out

    def _make(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A new tensor. Small integers and masks for a real device are real; all else is on meta."""
        sources = list(flat_tensors(args[:1]))
        options = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory")}
        outline = func(*tree_map_only(Tensor, _meta, args), **{**options, "device": _META})
        if outline.numel() > SMALL_NUMEL:
            return outline
        real_args = tree_map_only(Tensor, lambda t: torch.empty_like(t, device=_CPU), args)
        values = func(*real_args, **{**options, "device": _CPU})
        device = kwargs.get("device") or (sources[0].device if sources else _CPU)
        floating = outline.is_floating_point() or outline.is_complex()
        if not floating and torch.device(device).type != "meta":
            return values
        self.shadows[outline] = values
        return outline

    def _outline(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on meta; without a rule for shapes, on zeros."""
        on_meta, options = args, _moved(kwargs, _META)
        if not all(tensor.is_meta for tensor in flat_tensors((*args, *kwargs.values()))):
            on_meta, options = tree_map_only(Tensor, _meta, (on_meta, options))
        try:
            out = func(*on_meta, **options)
        except NotImplementedError:
            if name in _VALUES or sum(t.numel() for t in flat_tensors((*on_meta, *options.values()))) > _REAL_LIMIT:
                raise
            self.note(f"operator {name} has no shape rule: its result's shape was found on zeros")
            out = _on_zeros(func, on_meta, options)
        changed_real = name.endswith("_") and isinstance(args[0], Tensor) and not args[0].is_meta
        return args[0] if changed_real else out

    def _positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices with masks replaced by the positions they select; all positions, where a mask has no values."""
        result: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                result.append(index)
            elif self._known(index):
                result.extend(to_meta(column) for column in self._value(index).nonzero().unbind(1))
            else:
                self._say_bounded()
                result.extend(_empty((index.numel(),), torch.long) for _ in index.shape)
        return result

    def _assume_all(self, name: str, args: tuple[Any, ...]) -> Tensor:
        """The result of nonzero or masked_select if every element were selected; a known mask's count is used."""
        source: Tensor = args[0]
        if name == "nonzero":
            self._say_bounded()
            return _empty((source.numel(), source.dim()), torch.long)
        mask: Tensor = args[1]
        shape = _broadcast(source, mask)
        if self._known(mask):
            return _empty((int(self._value(mask).expand(shape).sum()),), source.dtype)
        self._say_bounded()
        return _empty((shape.numel(),), source.dtype)

    def _say_bounded(self) -> None:
        self.note("elements selected by computed values are counted as if all were selected: an upper bound")


def _meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else to_meta(tensor)


def _moved(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """An operator's options, with the device exchanged where it names one."""
    return {**kwargs, "device": device} if kwargs.get("device") is not None else kwargs


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _broadcast(*tensors: Tensor) -> torch.Size:
    shape: torch.Size = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
    return shape


def _spreads(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether small tensors make a large one: (1, 4096) compared with (4096, 1)."""
    if Tag.pointwise not in getattr(func, "tags", ()):
        return False
    try:
        return _broadcast(*tensors).numel() > SMALL_NUMEL
    except RuntimeError:
        return False


def _on_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The shapes of an operator's results, from running it on zeros."""
    args, kwargs = tree_map_only(Tensor, lambda t: torch.zeros_like(t, device="cpu"), (args, kwargs))
    return tree_map_only(Tensor, to_meta, func(*args, **kwargs))
