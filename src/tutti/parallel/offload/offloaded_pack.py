"""Packs whose parameters, gradients and optimizer state are in the host's memory.

The device holds a copy of the parameters: all the time (`resident`), or only while their unit computes. Gradients leave
the device when their unit's backward has ended. A thread adds up what arrives.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tutti.config.plan import Plan
from tutti.parallel.offload.copies import CopyPair, CopyStreams, PendingCopy
from tutti.parallel.offload.pinned_memory import StagingBuffers, allocate_host
from tutti.parallel.sharding.shard_collectives import Rows, ShardGroup, gather
from tutti.parallel.sharding.sharded_unit import Pack, Place

MAX_LEAVING = 2
"""Copies of gradients that may be on their way to the host: the device holds what they carry."""

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_MULTIPLYING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose weights autocast converts before every use."""


@dataclass(slots=True, kw_only=True, eq=False)
class HostState:
    """What the packs of a rank share.

    Attributes:
        device: where the rank computes.
        resident: the device keeps a copy of the parameters between steps.
        half: number format in which autocast multiplies matrices; None without autocast.
        copies: the copies between the two.
        buffers: where gradients arrive.
        leaving: gradients on their way to the host, and what they are copied from.
        worker: the thread that converts parameters and adds up gradients.
    """

    device: torch.device
    resident: bool
    half: torch.dtype | None = None
    copies: CopyStreams = field(init=False)
    buffers: StagingBuffers = field(init=False)
    leaving: deque[tuple[PendingCopy, torch.Tensor]] = field(init=False, default_factory=deque)
    worker: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.copies, self.buffers = CopyStreams(self.device), StagingBuffers(self.device)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="tutti-offload")

    @classmethod
    def of(cls, plan: Plan, device: torch.device) -> "HostState | None":
        """What the plan keeps on the host; None for nothing, or if a parameter's state alone is divided (level 1)."""
        if plan.sharding.offload == "none" or (plan.degree("shard") > 1 and plan.sharding.level == 1):
            return None
        return cls(device=device, resident=plan.sharding.offload == "optimizer", half=_HALVES.get(plan.precision))

    def to_host(self, arrived: torch.Tensor, segment: torch.Tensor) -> PendingCopy:
        """Copy gradients to the host, once few enough are on their way."""
        while len(self.leaving) >= MAX_LEAVING:
            self.leaving.popleft()[0].synchronize()
        copying = self.copies.to_host([(arrived, segment)])
        self.leaving.append((copying, segment))
        return copying

    def empty_device(self) -> None:
        """Wait until all gradients have left the device."""
        while self.leaving:
            self.leaving.popleft()[0].synchronize()

    def copied_dtype(self, places: list[Place]) -> torch.dtype:
        """The dtype of the device's copy of a parameter whose gradient no other rank adds to.

        It is the half precision where autocast would convert the parameter before every use: the same values are
        computed. Gradients are added up on the host, in the parameter's own dtype.
        """
        dtype: torch.dtype = getattr(*places[0]).dtype
        multiplied = self.half is not None and dtype is torch.float32 and all(_multiplies(m) for m, _ in places)
        return self.half if multiplied and self.half is not None else dtype

    def make_pack(self, named: list[tuple[str, list[Place]]], **arguments: Any) -> Pack:
        return OffloadedPack(named, state=self, **arguments)


def _multiplies(module: nn.Module) -> bool:
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        return True
    return any(type(module).forward is kind.forward for kind in _MULTIPLYING)


class OffloadedPack(Pack):
    """A pack whose segment is on the host.

    Args:
        named: the parameters, and the modules that hold them.
        state: what all packs share.
        arguments: those of `Pack`.
    """

    leaves = True

    def __init__(self, named: list[tuple[str, list[Place]]], *, state: HostState, **arguments: Any) -> None:
        self._state = state
        super().__init__(named, home=torch.device("cpu"), device=state.device, **arguments)
        self._fresh = False
        self._copy: torch.Tensor | None = None
        self._segment: torch.Tensor | None = None
        self._converted: Future[None] | None = None
        self._arriving: PendingCopy | None = None
        self._gradient: torch.Tensor | None = None
        self._added: list[Future[None]] = []
        self._present = [False] * len(named)

    @property
    def on_device_nbytes(self) -> int:
        """Bytes of the parameters that the device holds now."""
        whole = 0 if self._memory is None else self._memory.tensor.untyped_storage().nbytes()
        return whole + (0 if self._segment is None else self._segment.untyped_storage().nbytes())

    def refresh(self) -> None:
        """The host's parameters may have changed: what the device holds is copied again before its next use."""
        self._fresh = False
        if self.dtype != self.flat.dtype:
            if self._copy is None:
                self._copy = allocate_host(self.flat.numel(), self.dtype, self.device)
            self._converted = self._state.worker.submit(_copy, self._copy, self.flat)

    def synchronize(self) -> None:
        """Wait until nothing reads the host's parameters, which may then change."""
        if self._arriving is not None:
            self._arriving.synchronize()
        self._arriving = None

    def begin_gradients(self) -> None:
        """Gradients are added up from zero."""
        self._wait_added()
        self._present = [False] * len(self.parameters)

    def launch(self, shard_group: ShardGroup) -> None:
        if self.degree == 1:
            self._launch_whole()
            return
        segment = self._segment
        if segment is None or not self._fresh:
            self._segment = segment = torch.empty_like(self.flat, device=self.device)
            self._arriving = self._state.copies.to_device([(segment, self.flat)])
        rows = self._rows()  # of the stream that computes with them
        with self._state.copies.inwards():
            self._exchange = gather(segment, shard_group, lambda: rows, self._place)
        self._fresh = self._state.resident
        if not self._state.resident:
            self._segment = None  # the exchange holds it until it is complete

    def fill(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
        self._settle()

    def drop(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
        self._settle()
        if self._memory is not None and not (self._state.resident and self.degree == 1):
            self._memory.free()
            self._fresh = self._fresh and self.degree > 1

    def materialise(self, flat: torch.Tensor, device: torch.device) -> None:
        pinned = self._at_rest(flat.numel(), flat.dtype, torch.device("cpu"))
        super().materialise(pinned.copy_(flat), device)

    def sum_of(self, rows: Rows) -> torch.Tensor:
        if isinstance(rows, torch.Tensor):
            return rows.view(-1) if self.degree == 1 else rows.sum(0)
        first, second = rows
        return first + second

    def take_away(self, segment: torch.Tensor, there: list[bool]) -> None:
        """Copy this rank's part of the reduced gradients to the host, and add it to what earlier backwards gave."""
        state = self._state
        if self._gradient is None:
            self._gradient = allocate_host(self.pieces.size, self.flat.dtype, self.device)
        arrived = state.buffers.take(segment.numel(), segment.dtype)
        copying = state.to_host(arrived, segment)
        if self.degree == 1 and not self.others:
            self.rooms.give(segment)
        first = not self._added
        self._added.append(state.worker.submit(self._add, copying, arrived, there, first=first))

    def give_gradients(self, segment: torch.Tensor | None, there: list[bool]) -> None:
        self._wait_added()
        for parameter, piece, present in zip(self.parameters, self.mine, self._present, strict=True):
            if parameter.shard.requires_grad and present:
                assert self._gradient is not None
                parameter.shard.grad = piece.within(self._gradient)

    def _at_rest(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "meta":
            return super()._at_rest(numel, dtype, device)
        return allocate_host(numel, dtype, self._state.device)

    def _launch_whole(self) -> None:
        """Copy the whole parameters, unless the device has them."""
        if self._fresh:
            return
        self._allocate_whole()
        assert self._memory is not None
        if self._converted is not None:
            self._converted.result()
        self._converted = None
        source = self.flat if self._copy is None else self._copy
        self._arriving = self._state.copies.to_device(self._pairs_of(self._memory.tensor.data, source))
        self._fresh = True

    def _pairs_of(self, memory: torch.Tensor, source: torch.Tensor) -> list[CopyPair]:
        if all(parameter.absent.is_contiguous() for parameter in self.parameters):
            return [(memory.as_strided(source.shape, (1,)), source)]
        wholes = [parameter.whole.data for parameter in self.parameters]
        return [(whole, piece.within(source)) for whole, piece in zip(wholes, self.mine, strict=True)]

    @torch.no_grad()
    def _add(self, copying: PendingCopy, arrived: torch.Tensor, there: list[bool], *, first: bool) -> None:
        """On the thread: add what has arrived."""
        copying.synchronize()
        assert self._gradient is not None
        values, flags = arrived[: self.pieces.size], arrived[self.pieces.size :].tolist()
        if first:
            self._gradient.copy_(values)
        else:
            self._gradient.add_(values)
        here = [own or flag > 0 for own, flag in zip(there, flags, strict=True)]
        self._present = [before or now for before, now in zip(self._present, here, strict=True)]
        self._state.buffers.give(arrived)

    def _wait_added(self) -> None:
        self._state.empty_device()
        for future in self._added:
            future.result()
        self._added = []


@torch.no_grad()
def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)
