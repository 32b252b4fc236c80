"""Batches on their way to an accelerator: copied from pinned memory, on a stream of their own, while it computes."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tutti.data.microbatches import ShareBatch, leaves, rebuilt


@dataclass(frozen=True, slots=True)
class _TensorCopy:
    """The device's copy of a tensor, as it was at `version`."""

    source: Tensor
    version: int
    target: Tensor


class DeviceCopies:
    """The copies of one batch, which begin as soon as the loader has the batch.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.Stream(device)
        self._copied = torch.Event(device)
        self._exact: dict[int, _TensorCopy] = {}
        self._by_base: dict[int, _TensorCopy | None] = {}

    def start(self, batch: ShareBatch) -> None:
        """Begin to copy a batch's tensors; the copies of the batch before are dropped."""
        self._exact, self._by_base = {}, {}
        with _on(self._stream):
            for leaf in leaves(batch.whole if batch.pieces is None else batch.pieces):
                if _is_plain(leaf) and id(leaf) not in self._exact:
                    self._start(leaf)
            self._copied.record()

    def _start(self, leaf: Tensor) -> None:
        pinned = leaf if leaf.is_pinned() else leaf.pin_memory()
        copy = _TensorCopy(leaf, leaf._version, pinned.to(self.device, non_blocking=True))
        self._exact[id(leaf)] = copy
        base = id(_base(leaf))
        dense = copy.target.stride() == leaf.stride()
        self._by_base[base] = copy if dense and base not in self._by_base else None

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the copy of one of the batch's tensors, or of a part of one; None where it was not copied.

        A tensor that was changed in place since, is not the one that was copied.
        """
        copy = self._exact.get(id(tensor))
        if copy is None or copy.source is not tensor:
            copy = self._by_base.get(id(_base(tensor)))
            if copy is None or _base(copy.source) is not _base(tensor):
                return None
        if copy.version != copy.source._version:
            return None
        source, target = copy.source, copy.target
        stream = torch.accelerator.current_stream(self.device)
        stream.wait_event(self._copied)
        target.record_stream(stream)
        if source is tensor:
            return target
        begin = tensor.storage_offset() - source.storage_offset()
        last = begin + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.dtype is not source.dtype or tensor.numel() == 0 or begin < 0 or last >= source.numel():
            return None
        return target.as_strided(tensor.shape, tensor.stride(), begin)


def may_copy_ahead(device: torch.device) -> bool:
    """Return whether a device is an accelerator with pinned memory and streams."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type and device.type != "mps"


def to_device(batch: Any, device: torch.device, copies: DeviceCopies | None = None) -> Any:
    """Move a batch to a device: every tensor in it, and every object that has a `to` method.

    Args:
        batch: the batch.
        device: the device.
        copies: what is on its way there already.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        copy = copies.of(batch) if copies is not None and _is_plain(batch) else None
        return batch.to(device, non_blocking=True) if copy is None else copy
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        options = {"non_blocking": True} if _may_not_block(type(batch)) else {}  # type: ignore[arg-type]
        moved = batch.to(device, **options)
        return batch if moved is None else moved
    return rebuilt(batch, lambda entry: to_device(entry, device, copies))


@cache
def _may_not_block(kind: Any) -> bool:
    """Whether a class's `to` takes `non_blocking`."""
    try:
        return "non_blocking" in inspect.signature(kind.to).parameters
    except (TypeError, ValueError):
        return False


def _is_plain(leaf: Any) -> bool:
    return (
        type(leaf) is Tensor and leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.is_inference()
    )


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


@contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    """Within the context, the device's work goes to a stream."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
