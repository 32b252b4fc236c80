"""Memory on the host that a device can copy from and to while both compute: page-locked ("pinned")."""

import ctypes
import mmap
from collections.abc import Callable
from functools import partial

import torch
from torch import nn


def allocate_host(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a flat tensor of zeros on the host, pinned if `device` is an accelerator.

    torch's own allocator of pinned memory rounds sizes up to powers of two, which would waste up to half of what the
    largest models need. On CUDA, ordinary memory is page-locked instead.
    """
    if device.type == "cpu" or numel == 0:
        return torch.zeros(numel, dtype=dtype)
    if device.type == "cuda" and numel * dtype.itemsize >= _LARGE_NBYTES:
        memory = _page_locked(numel * dtype.itemsize)
        if memory is not None:
            return memory.view(dtype)
    try:
        return torch.zeros(numel, dtype=dtype, pin_memory=True)
    except RuntimeError:  # a device that knows no pinned memory copies from any
        return torch.zeros(numel, dtype=dtype)


_LARGE_NBYTES = 2**20
"""Smaller tensors lose little by the rounding."""


def _page_locked(nbytes: int) -> torch.Tensor | None:
    """Return zeros in whole pages of their own, locked for as long as they live; None where that is not possible."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = _LockedPages(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    if int(runtime.cudaHostRegister(address, size, 0)) != 0:
        return None
    pages.unlock = partial(runtime.cudaHostUnregister, address)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)


class _LockedPages(mmap.mmap):
    """Pages that are unlocked before they are freed."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the model's buffers to the device; parameters stay where they are."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)


class StagingBuffers:
    """Buffers on the host in which gradients arrive; a returned buffer serves the next request of its size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer with undefined contents."""
        free = self._free.get((numel, dtype))
        return free.pop() if free else allocate_host(numel, dtype, self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer from `take`."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)
