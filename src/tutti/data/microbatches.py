"""One rank's share of a global batch as the script sees it, and the microbatches that are trained.

Samples are divided before they are collated wherever the loader collates them, so that nothing has to be cut: a batch
may be concatenated, packed, with time first, or of any class. Only what a script changes afterwards is cut.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from tutti.data.collate_record import CollateRecord, recorded_collation
from tutti.errors import DataError

_REMEDY = (
    "pass step the batch as the loader gave it and change samples in the dataset or in collate_fn, or set "
    "num_microbatches=1"
)


@dataclass(frozen=True, slots=True)
class ShareBatch:
    """A rank's share of a global batch, collated.

    Attributes:
        whole: the share as one batch; what the loader yields.
        pieces: the microbatches, each collated by itself; None where they are cut from `whole`.
        count: samples of the share.
        record: what it was collated from; None where that is not recorded.
    """

    whole: Any
    pieces: tuple[Any, ...] | None
    count: int
    record: CollateRecord | None = None

    def pin_memory(self) -> "ShareBatch":
        """Return the batch in pinned memory; DataLoader calls this under pin_memory=True."""
        pin: Callable[[Any], Any] = pin_memory
        pieces = None if self.pieces is None else tuple(pin(piece) for piece in self.pieces)
        return ShareBatch(pin(self.whole), pieces, self.count, self.record)


def collate_share(
    collate: Callable[[Any], Any], samples: Sequence[Any], sizes: Sequence[int], *, recorded: bool = False
) -> ShareBatch:
    """Collate a share of `sizes` samples: once as a whole and, if it has several microbatches, once for each of them.

    Torch's own collate function puts samples first, so its batches are cut instead.

    Args:
        collate: makes a batch of samples.
        samples: the samples of the share.
        sizes: samples of each microbatch.
        recorded: whether the batch says what it was collated from.
    """
    if recorded:
        with recorded_collation(collate, samples) as record:
            batch = collate_share(collate, samples, sizes)
        return dataclasses.replace(batch, record=record)
    whole = collate(samples)
    if len(sizes) == 1 or collate is default_collate:
        return ShareBatch(whole, None, sum(sizes))
    return ShareBatch(whole, tuple(collate(samples[stop - size : stop]) for stop, size in _ends(sizes)), sum(sizes))


class LoadedBatch:
    """A batch that a script has got from the loader; tells whether the script gives the same to a step.

    Args:
        batch: the share.
    """

    def __init__(self, batch: ShareBatch) -> None:
        self.batch = batch
        self._leaves = [(leaf, _version(leaf)) for leaf in leaves(batch.whole)]

    def pieces(self, given: Any, sizes: Sequence[int]) -> list[Any]:
        """Return the microbatches of `sizes` samples of the batch that a step was given.

        Raises:
            DataError: the script changed the batch, and it cannot be cut; or it has other samples than the share.
        """
        if len(sizes) == 1:
            if given is not self.batch.whole:
                self._check_samples(given)
            return [given]
        if self.batch.pieces is not None and self.is_unchanged(given):
            return list(self.batch.pieces)
        if given is not self.batch.whole:
            self._check_samples(given)
        return split_batch(given, sizes)

    def is_unchanged(self, given: Any) -> bool:
        """Return whether `given` is the batch or has the same contents in the same containers."""
        if given is not self.batch.whole and type(given) is not type(self.batch.whole):
            return False
        now = list(leaves(given))
        return len(now) == len(self._leaves) and all(
            leaf is known and _version(leaf) == version
            for leaf, (known, version) in zip(now, self._leaves, strict=True)
        )

    def _check_samples(self, given: Any) -> None:
        """Raise DataError if the share's tensors have samples in a dimension and those of `given` do not."""
        count = self.batch.count
        if _has_samples(self.batch.whole, count) and not _has_samples(given, count):
            shape = next(tuple(leaf.shape) for leaf in leaves(given) if isinstance(leaf, torch.Tensor) and leaf.ndim)
            raise DataError(
                f"step got a batch whose first tensor has shape {shape}, but this rank's share is {count} samples; "
                "pass step the batch as the loader gave it, and change samples in the dataset or collate_fn"
            )


def _has_samples(batch: Any, count: int) -> bool:
    """Return whether some tensor has samples in its first or second dimension, or there is no tensor to tell."""
    shapes = [leaf.shape for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    return not shapes or any(size % count == 0 for shape in shapes for size in shape[:2])


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into parts of `sizes` samples.

    A batch of one part is returned unchanged, whatever it is. A list of strings, or of as many objects as there are
    samples, is cut; other values that are not tensors (a number, a string, None) are repeated in every part.

    Args:
        batch: tensors in any nesting of tuples, lists, mappings and dataclasses, with samples in dim 0; or an object
            with a `split` method.
        sizes: samples of each part.

    Raises:
        DataError: the first dimension of a tensor is not the number of samples, or an object cannot be looked into.
    """
    if len(sizes) == 1:
        return [batch]
    if hasattr(batch, "split") and not isinstance(batch, torch.Tensor | str):
        return list(batch.split(list(sizes)))
    return [_cut(batch, stop - size, stop, sum(sizes), sizes) for stop, size in _ends(sizes)]


def _cut(value: Any, begin: int, end: int, samples: int, sizes: Sequence[int]) -> Any:
    """Return samples `begin` to `end` of a batch of `samples`."""
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "biufc":
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim == 0:
            return value
        if value.shape[0] != samples:
            raise DataError(
                f"a batch tensor of shape {tuple(value.shape)} cannot be cut into microbatches of {list(sizes)} "
                f"samples: its first dimension must be {samples}; {_REMEDY}"
            )
        return value[begin:end]
    if isinstance(value, list) and one_per_sample(value, samples):
        return value[begin:end]
    if _is_tuple_of_samples(value, samples):
        return value[begin:end]
    if value is None or isinstance(value, str | bytes | bool | int | float | complex | np.generic):
        return value
    made = rebuilt(value, lambda entry: _cut(entry, begin, end, samples, sizes))
    if made is value and any(isinstance(leaf, torch.Tensor | np.ndarray) for leaf in leaves(value)):
        raise DataError(f"a batch has a {type(value).__name__}, which cannot be cut into microbatches; {_REMEDY}")
    return made


def one_per_sample(values: list[Any], samples: int) -> bool:
    """Return whether a list has an entry for each sample, rather than for each field of the batch."""
    if len(values) != samples:
        return False
    return all(isinstance(entry, Mapping) for entry in values) or not all(_holds(entry, samples) for entry in values)


def _holds(entry: Any, samples: int) -> bool | None:
    """Whether a field has `samples` samples in dim 0; None if it has no tensor or list that would tell."""
    if isinstance(entry, torch.Tensor | np.ndarray):
        return len(entry) == samples if entry.ndim else None
    if isinstance(entry, list | tuple) and len(entry) == samples:
        return True
    told = [held for child in _children(entry) if (held := _holds(child, samples)) is not None]
    return all(told) if told else None


def _is_tuple_of_samples(value: Any, samples: int) -> bool:
    return type(value) is tuple and len(value) == samples and all(isinstance(entry, str | bytes) for entry in value)


def _ends(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(accumulate(sizes), sizes, strict=True)


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else 0


def _children(value: Any) -> Iterator[Any]:
    """Yield what a container holds; nothing for a leaf."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, f.name) for f in dataclasses.fields(value))
    elif not isinstance(value, torch.Tensor | np.ndarray | type) and not callable(value):
        yield from getattr(value, "__dict__", {}).values()


def leaves(batch: Any) -> Iterator[Any]:
    """Return the values in a batch, in order, that are no containers. An object holds its attributes."""
    if type(batch) in (list, tuple) and batch and all(isinstance(value, torch.Tensor) for value in batch):
        return iter(batch)
    seen: set[int] = set()

    def walk(value: Any) -> Iterator[Any]:
        children = list(_children(value))
        if not children or id(value) in seen:
            yield value
            return
        seen.add(id(value))
        for child in children:
            yield from walk(child)

    return walk(batch)


def rebuilt(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container of the same type whose entries are `function` of those of `value`; a leaf is returned."""
    if isinstance(value, dict) and type(value) is dict:
        return {key: function(entry) for key, entry in value.items()}
    made: Any
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        for key, entry in list(value.items()):
            made[key] = function(entry)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(function(entry) for entry in value))
    if type(value) in (list, tuple):
        return type(value)(function(entry) for entry in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for entry in dataclasses.fields(value):
            object.__setattr__(made, entry.name, function(getattr(value, entry.name)))
        return made
    return value


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Return a batch with `function` of every tensor in it."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    return rebuilt(batch, lambda entry: map_tensors(function, entry))
