"""Activations in the host's memory: what autograd saves in a module leaves the device, and comes back in backward.

A tensor that several operators save moves once. It leaves while the next modules compute; in backward, what the module
before has saved comes back while this one computes. Weights stay where they are. A recomputed module saves its inputs
only, so only they move.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tutti.config.plan import LayoutRule, find_offload
from tutti.errors import ScriptError
from tutti.parallel.offload.copies import CopyStreams, PendingCopy
from tutti.parallel.offload.pinned_memory import StagingBuffers
from tutti.parallel.recompute import outermost_modules
from tutti.parallel.sharding.saved_weights import in_backward
from tutti.parallel.sharding.sharded_gradients import uncompiled

_HALVES = (torch.bfloat16, torch.float16)

MIN_NBYTES = 2**20
"""Smaller tensors stay on the device: their copies would cost more than they free."""


def apply_offload(model: nn.Module, layout: tuple[LayoutRule, ...], device: torch.device) -> list[str]:
    """Keep what the outermost modules for which the layout says so save for backward on the host.

    Args:
        model: the model, changed in place.
        layout: the plan's layout rules.
        device: where the model computes.

    Returns:
        Their names.

    Raises:
        PlanError: a rule with offload matches no module.
    """
    chosen = outermost_modules(model, layout, "offload", lambda name: find_offload(layout, name))
    if chosen:
        activations = Activations(device)
        for name in chosen:
            activations.watch(model.get_submodule(name), name)
    return chosen


@dataclass(slots=True, eq=False, weakref_slot=True)
class OffloadedActivation:
    """A tensor that autograd has saved.

    Attributes:
        buffer: its values on the host, in the order of its strides.
        leaving: the copy that fills the buffer.
        arriving: the copy back, once it has begun.
        on_device: its values on the device, once that copy has begun.
    """

    buffer: torch.Tensor
    leaving: PendingCopy
    size: torch.Size
    stride: tuple[int, ...]
    arriving: PendingCopy | None = None
    on_device: torch.Tensor | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class SavedCall:
    """What one call of a module has saved.

    Attributes:
        before: the call that forward ran before, which backward reaches next; None for the first.
        weights: the storages of its parameters and buffers, which stay where they are.
        shapes: the shapes of its parameters, by which conversions of them are recognised.
        known: copies by the identity of what was saved, which holds while the storage lives.
        moved: the same copies, as long as autograd holds them.
        below: the hooks that were active before.
        waiting: packed tensors that backward has not asked for.
    """

    name: str
    before: "weakref.ref[SavedCall] | None"
    weights: set[int]
    shapes: set[tuple[int, ...]]
    below: Any
    known: "dict[Any, tuple[StorageWeakRef, OffloadedActivation]]" = field(default_factory=dict)
    moved: "list[weakref.ref[OffloadedActivation]]" = field(default_factory=list)
    waiting: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SavedTensor:
    """What autograd holds instead of a tensor."""

    moved: OffloadedActivation
    call: SavedCall


@dataclass(frozen=True, slots=True, eq=False)
class _SavedBelow:
    """What other hooks, which were active before, made of a tensor."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


class Activations:
    """The saved tensors of a model's offloaded modules, and their copies.

    Attributes:
        min_nbytes: smaller tensors stay on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.min_nbytes = MIN_NBYTES if device.type != "cpu" else 0
        self._device, self._copies, self._buffers = device, CopyStreams(device), StagingBuffers(device)
        self._leaving: deque[tuple[SavedCall, PendingCopy, torch.Tensor, int]] = deque()
        self._last: weakref.ref[SavedCall] | None = None
        self._open: list[SavedCall | None] = []

    def watch(self, module: nn.Module, name: str) -> None:
        """Move what calls of the module save."""

        def enter(module: nn.Module, args: Any) -> None:
            self._enter(module, name)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._leave()

        module.register_forward_pre_hook(uncompiled(enter))
        module.register_forward_hook(uncompiled(leave), always_call=True)

    def _enter(self, module: nn.Module, name: str) -> None:
        if not torch.is_grad_enabled() or in_backward():
            self._open.append(None)
            return
        parameters = [*module.parameters()]
        call = SavedCall(
            name,
            self._last,
            weights={tensor.untyped_storage()._cdata for tensor in (*parameters, *module.buffers())},
            shapes={shape for p in parameters for shape in (tuple(p.shape), tuple(p.shape[::-1]))},
            below=torch._C._autograd._top_saved_tensors_default_hooks(True),
        )
        torch._C._autograd._push_saved_tensors_default_hooks(lambda tensor: self._pack(call, tensor), self._unpack)
        self._open.append(call)

    def _leave(self) -> None:
        call = self._open.pop()
        if call is None:
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()
        call.below = None
        call.known.clear()
        self._last = weakref.ref(call)
        self._release(call)

    def _pack(self, call: SavedCall, tensor: torch.Tensor) -> Any:
        if call.below is not None:
            packed = call.below[0](tensor)
            if packed is not tensor:
                return _SavedBelow(packed, call.below[1])
        if not self._moves(call, tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor._version)
        known = call.known.get(key)
        if known is not None and not known[0].expired():  # type: ignore[no-untyped-call]
            moved = known[1]
        else:
            moved = self._to_host(call, tensor)
            call.known[key] = (StorageWeakRef(storage), moved)  # type: ignore[no-untyped-call]
        call.waiting += 1
        return SavedTensor(moved, call)

    def _moves(self, call: SavedCall, tensor: torch.Tensor) -> bool:
        if tensor.device != self._device or tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
            return False
        storage = tensor.untyped_storage()
        if tensor.numel() * tensor.itemsize < max(self.min_nbytes, 1) or storage._cdata in call.weights:
            return False
        # autocast's conversion of a weight; an activation of such a shape stays on the device as well
        return not (tensor.dtype in _HALVES and tuple(tensor.shape) in call.shapes)

    def _to_host(self, call: SavedCall, tensor: torch.Tensor) -> OffloadedActivation:
        values = tensor if torch.ops.aten.is_non_overlapping_and_dense(tensor) else tensor.contiguous()
        size, stride = values.size(), values.stride()
        buffer = self._buffers.take(values.numel(), values.dtype)
        leaving = self._copies.to_host([(buffer.as_strided(size, stride), values)])
        moved = OffloadedActivation(buffer, leaving, size, stride)
        weakref.finalize(moved, self._buffers.give, buffer)
        call.moved.append(weakref.ref(moved))
        self._leaving.append((call, leaving, values, values._version))
        return moved

    def _release(self, latest: SavedCall | None = None) -> None:
        """Let go of what leaves the device, once it has: all but what the latest module has saved."""
        while self._leaving and self._leaving[0][0] is not latest:
            call, leaving, tensor, version = self._leaving.popleft()
            leaving.wait()
            if tensor._version != version:
                raise ScriptError(
                    f"module {call.name!r} changes a tensor of shape {tuple(tensor.shape)} in place that autograd "
                    "has saved, while it is on its way to the host; write it out of place, or leave the module out of "
                    "the layout rule with offload"
                )

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _SavedBelow):
            return saved.unpack(saved.packed)
        if not isinstance(saved, SavedTensor):
            return saved  # type: ignore[no-any-return]
        self._release()
        self._fetch(saved.call)
        before = None if saved.call.before is None else saved.call.before()
        if before is not None:
            self._fetch(before)
        moved, call = saved.moved, saved.call
        assert moved.arriving is not None
        assert moved.on_device is not None
        moved.arriving.wait()
        tensor = moved.on_device.as_strided(moved.size, moved.stride)
        call.waiting -= 1
        if call.waiting <= 0:  # a further backward through this call fetches anew
            for copy in (reference() for reference in call.moved):
                if copy is not None:
                    copy.arriving = copy.on_device = None
        return tensor

    def _fetch(self, call: SavedCall) -> None:
        for moved in (reference() for reference in call.moved):
            if moved is not None and moved.on_device is None:
                moved.on_device = torch.empty_like(moved.buffer, device=self._device)
                moved.arriving = self._copies.to_device([(moved.on_device, moved.buffer)])
