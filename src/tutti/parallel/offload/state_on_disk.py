"""Optimizer state in files: each update reads the state of some parameters, updates them, and writes it back.

While one group of parameters is updated, the state of the next is read and that of the one before is written
(ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857, section 5). A few buffers are all of the state that is in
memory. Between updates the entries of `optimizer.state` are the file itself, mapped as memory: what reads or changes
them, such as a checkpoint, needs no other code.
"""

import errno
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.direct_io import ALIGNMENT, GROUP_NBYTES, DirectFile, aligned, aligned_part, is_in_memory
from tutti.errors import PlanError, TrainingError
from tutti.optim.optimizer_traits import (
    check_steps_in_turn,
    group_settings,
    state_values_per_parameter,
    stepping_only,
    unhooked_step,
)
from tutti.parallel.offload.pinned_memory import allocate_host
from tutti.parallel.parallel_model import ParallelModel

_START_ALIGNMENT = 64
"""Tensors begin at multiples of it in a buffer, as those of torch's allocator do."""


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """One tensor of the state, within the bytes of its group.

    Attributes:
        start: its first byte.
        mapped: the tensor as part of the file.
    """

    parameter: nn.Parameter
    key: str
    start: int
    mapped: torch.Tensor

    def within(self, nbytes: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the same kind that lies in a copy of the group's bytes."""
        return _tensor_at(nbytes, self.start, self.mapped)


@dataclass(slots=True, eq=False)
class StateGroup:
    """Parameters that are updated together.

    Attributes:
        stored: their state in the file; empty before their first update.
        offset, nbytes: the bytes of the file that are theirs.
    """

    parameters: frozenset[nn.Parameter]
    stored: list[FileTensor] = field(default_factory=list)
    offset: int = 0
    nbytes: int = 0

    @property
    def has_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)


BUFFERS = 3
"""One is read, one is updated, one is written."""


class StateOnDisk:
    """The state of one optimizer in a file.

    Attributes:
        file: the file.
        needed_nbytes: what the state is expected to take.
    """

    def __init__(self, optimizer: Optimizer, file: DirectFile, device: torch.device) -> None:
        check_steps_in_turn(optimizer)
        per_value = state_values_per_parameter(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.file, self._optimizer, self._device = file, optimizer, device
        self._groups = [StateGroup(members) for members in _grouped(parameters, per_value)]
        padding = len(self._groups) * ALIGNMENT
        self.needed_nbytes = padding + sum(_state_nbytes(p, per_value) for p in parameters if p.requires_grad)
        self._end = 0
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * BUFFERS
        self._written: list[Future[None] | None] = [None] * BUFFERS
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="tutti-state-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tutti-state-write")
        self._raw = unhooked_step(optimizer)
        _replace_step(optimizer, self._step)
        optimizer.register_load_state_dict_post_hook(lambda _: self.adopt())

    @torch.no_grad()
    def adopt(self) -> None:
        """Move state to the file that is still in memory, as after `load_state_dict`."""
        for number, group in enumerate(self._groups):
            if not self._is_stored(group):
                self._write(group, number % BUFFERS)
                self._show_file(group)
        self._wait_written()

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """What the optimizer's own `step` does, some parameters at a time."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [group for group in self._groups if group.has_gradient]
        settings = group_settings(self._optimizer)
        reading = {0: self._read(groups[0], 0)} if groups else {}
        for number, group in enumerate(groups):
            if number + 1 < len(groups):
                reading[number + 1] = self._read(groups[number + 1], (number + 1) % BUFFERS)
            reading.pop(number).result()
            self._show_buffer(group, number % BUFFERS)
            with stepping_only(self._optimizer, group.parameters, settings):
                self._raw(self._optimizer)
            self._write(group, number % BUFFERS)
            self._show_file(group)
        self._wait_written()
        return loss

    def _read(self, group: StateGroup, slot: int) -> Future[None]:
        """Read a group's state into a buffer, once what the buffer held is written."""
        in_file, before = self._is_stored(group), self._written[slot]

        def read() -> None:
            if before is not None:
                before.result()
            if in_file and group.nbytes:
                self.file.read(self._buffer(slot, group.nbytes), group.offset)

        return self._reader.submit(read)

    def _show_buffer(self, group: StateGroup, slot: int) -> None:
        """Let the optimizer find the group's state in a buffer; state that is not in the file stays where it is."""
        if self._is_stored(group) and group.nbytes:
            buffer = self._buffer(slot, group.nbytes)
            for stored in group.stored:
                self._optimizer.state[stored.parameter][stored.key] = stored.within(buffer)

    def _show_file(self, group: StateGroup) -> None:
        for stored in group.stored:
            self._optimizer.state[stored.parameter][stored.key] = stored.mapped

    def _write(self, group: StateGroup, slot: int) -> None:
        """Write a group's state from a buffer; what the update has made or replaced is copied there first."""
        tensors = self._tensors(group)
        if not _same_kinds(group.stored, tensors):
            tensors = [(parameter, key, tensor.clone()) for parameter, key, tensor in tensors]  # may be in the buffer
            self._place(group, tensors)
        before = self._written[slot]
        if before is not None:
            before.result()
        if not group.nbytes:
            return
        buffer = self._buffer(slot, group.nbytes)
        moved = [
            (into, tensor.clone())  # it may be in the buffer, in the place of another
            for stored, (_, _, tensor) in zip(group.stored, tensors, strict=True)
            if tensor.data_ptr() != (into := stored.within(buffer)).data_ptr()
        ]
        for into, tensor in moved:
            into.copy_(tensor)
        self._written[slot] = self._writer.submit(self.file.write, buffer, group.offset)

    def _place(self, group: StateGroup, tensors: list[tuple[nn.Parameter, str, torch.Tensor]]) -> None:
        """Give a group bytes of the file that hold these tensors."""
        starts, end = [], 0
        for _, _, tensor in tensors:
            starts.append(end)
            end += aligned(tensor.numel() * tensor.itemsize, _START_ALIGNMENT)
        if aligned(end) > group.nbytes:
            group.offset, self._end = self._end, self._end + aligned(end)
        group.nbytes = aligned(end)
        _reserve(self.file, self._end)
        memory = self.file.mapped(group.offset, group.nbytes)
        group.stored = [
            FileTensor(parameter, key, start, _tensor_at(memory, start, tensor))
            for start, (parameter, key, tensor) in zip(starts, tensors, strict=True)
        ]

    def _tensors(self, group: StateGroup) -> list[tuple[nn.Parameter, str, torch.Tensor]]:
        """Return the group's state as it is; scalars, which stay in memory, are left out."""
        state = self._optimizer.state
        members = (p for of in self._optimizer.param_groups for p in of["params"] if p in group.parameters)
        return [
            (parameter, key, value)
            for parameter in members
            if parameter in state
            for key, value in state[parameter].items()
            if _is_stored_kind(value)
        ]

    def _is_stored(self, group: StateGroup) -> bool:
        """Whether the optimizer's entries are those in the file, and no others."""
        tensors = self._tensors(group)
        return len(tensors) == len(group.stored) and all(
            tensor is stored.mapped for stored, (_, _, tensor) in zip(group.stored, tensors, strict=True)
        )

    def _buffer(self, slot: int, nbytes: int) -> torch.Tensor:
        if len(self._buffers[slot]) < nbytes:
            largest = max(group.nbytes for group in self._groups)
            memory = allocate_host(largest + ALIGNMENT, torch.uint8, self._device)
            self._buffers[slot] = aligned_part(memory, largest)
        return self._buffers[slot][:nbytes]

    def _wait_written(self) -> None:
        for future in self._written:
            if future is not None:
                future.result()
        self._written = [None] * BUFFERS


def keep_state_on_disk(parallel: ParallelModel, run_folder: Path, say: Callable[[str], None]) -> None:
    """Move the optimizers' state to files, if the plan says so. Collective.

    Args:
        parallel: the model; its optimizers hold parameters in the host's memory.
        run_folder: where the files are if the plan names no folder.
        say: called with what the user should know about the folder.

    Raises:
        PlanError: on every rank, if it cannot be done on any.
    """
    sharding = parallel.plan.sharding
    if not sharding.on_disk:
        return
    folder = Path(sharding.nvme_path) if sharding.nvme_path else run_folder
    answers = parallel.world.gather(_move_to_disk(parallel, folder))
    for rank, (refusal, _) in enumerate(answers):
        if refusal:
            raise PlanError(f"rank {rank}: {refusal}")
    for _, note in answers:
        say(note)


def _move_to_disk(parallel: ParallelModel, folder: Path) -> tuple[str, str]:
    """Return (why it cannot be done, what the user should know); "" for each where there is nothing to say."""
    needed, direct, loaded = 0, True, LoadedState(folder)
    try:
        for optimizer in parallel.optimizers:
            file = DirectFile(folder, f"the state of {type(optimizer).__name__}")
            on_disk = StateOnDisk(optimizer, file, parallel.world.device)
            needed, direct = on_disk.needed_nbytes, file.direct
            file.reserve(needed)
            on_disk.adopt()
            optimizer.register_load_state_dict_post_hook(loaded.release)
    except OSError as error:
        return _too_small(folder, needed, error), ""
    except (PlanError, TrainingError) as error:
        return str(error), ""
    parallel.layout.states.allocate = loaded.allocate
    return "", _note(folder, direct)


class LoadedState:
    """Memory for the state of a checkpoint while it is read, which is a file as well."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._end = folder, 0
        self._file: DirectFile | None = None

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros."""
        if self._file is None:
            self._file, self._end = DirectFile(self._folder, "the state of a checkpoint"), 0
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        start, self._end = self._end, self._end + aligned(nbytes, _START_ALIGNMENT)
        _reserve(self._file, self._end)
        return self._file.mapped(start, nbytes).view(dtype).view(shape)

    def release(self, optimizer: Optimizer) -> None:
        """Let the file end with the tensors in it, once an optimizer has taken them over."""
        self._file = None


def _reserve(file: DirectFile, nbytes: int) -> None:
    """Let a file have so many bytes.

    Raises:
        TrainingError: its file system does not have them.
    """
    try:
        file.reserve(nbytes)
    except OSError as error:
        raise TrainingError(_too_small(file.folder, nbytes, error)) from None


def _grouped(parameters: list[nn.Parameter], per_value: float) -> list[frozenset[nn.Parameter]]:
    """Cut parameters into groups of at most `GROUP_NBYTES` bytes of state, in their order."""
    groups: list[list[nn.Parameter]] = []
    nbytes = 0
    for parameter in dict.fromkeys(parameters):
        its = _state_nbytes(parameter, per_value)
        if not groups or nbytes + its > GROUP_NBYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(parameter)
        nbytes += its
    return [frozenset(group) for group in groups]


def _state_nbytes(parameter: nn.Parameter, per_value: float) -> int:
    return int(max(per_value, 1.0) * parameter.numel() * parameter.itemsize) + 2 * _START_ALIGNMENT


def _is_stored_kind(value: Any) -> bool:
    """Whether a value of the state goes to the file: a tensor of more than one number in the host's memory."""
    if type(value) not in (torch.Tensor, nn.Parameter) or not value.is_cpu or value.layout is not torch.strided:
        return False
    return bool(value.dim() and value.numel() and torch.ops.aten.is_non_overlapping_and_dense(value))


def _same_kinds(stored: list[FileTensor], tensors: list[tuple[nn.Parameter, str, torch.Tensor]]) -> bool:
    """Whether tensors are of the shapes, in the order, that a group has bytes for."""
    if len(stored) != len(tensors):
        return False
    for known, (parameter, key, tensor) in zip(stored, tensors, strict=True):
        same = known.mapped.dtype == tensor.dtype and known.mapped.size() == tensor.size()
        if known.parameter is not parameter or known.key != key or not same:
            return False
        if known.mapped.stride() != tensor.stride():
            return False
    return True


def _tensor_at(nbytes: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of another's kind in flat memory."""
    part = nbytes[start : start + like.numel() * like.itemsize].view(like.dtype)
    return part.as_strided(like.size(), like.stride(), part.storage_offset())


def _replace_step(optimizer: Optimizer, step: Callable[[Callable[[], Any] | None], Any]) -> None:
    """Let an optimizer's `step` call this function between its hooks."""

    def update(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedulers look whether it was called
        return step(closure)

    hooked: Any = Optimizer.profile_hook_step(update)
    hooked._wrapped_by_lr_sched = True
    optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]


def _note(folder: Path, direct: bool) -> str:
    if is_in_memory(folder):
        return f"{folder} is a file system in memory, where the optimizer's state takes as much of it as without nvme"
    return "" if direct else f"{folder} does not take direct I/O: the optimizer's state passes through the page cache"


def _too_small(folder: Path, needed: int, error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"sharding.nvme_path: {folder} cannot hold the optimizer's state ({error.strerror}); name an existing "
            "folder that this user may write to"
        )
    free = shutil.disk_usage(folder).free
    return (
        f"the optimizer's state takes {needed / 2**30:.3g} GiB for each rank, but {folder} has {free / 2**30:.3g} GiB "
        "free; free space, name another folder in sharding.nvme_path, or use more ranks on a shard axis"
    )
