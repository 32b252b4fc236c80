"""A process group for the tests' second device that the host does not wait for, as NCCL's.

Gloo works on the memory of the device's tensors, which is host memory. Real ranks get real values, and no copy to the
host is made that a program would have to wait for.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import fakegpu

BACKEND = "fakeccl"

_METHODS = """
    broadcast allreduce allreduce_coalesced reduce allgather _allgather_base allgather_coalesced reduce_scatter
    _reduce_scatter_base alltoall alltoall_base send recv gather scatter barrier
""".split()  # noqa: SIM905
_NEWER = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""Names that newer versions of torch call, and Gloo's."""


def register() -> None:
    """Make the back end known to torch.distributed in this process."""
    if BACKEND.upper() not in dir(dist.Backend):
        dist.Backend.register_backend(BACKEND, DeviceGroup, devices=["cpu", fakegpu.NAME])


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU's tensor of the memory of a tensor of the device; others as they are."""
    if tensor.device.type != fakegpu.NAME or not tensor.numel():
        return tensor if tensor.device.type != fakegpu.NAME else torch.empty(tensor.shape, dtype=tensor.dtype)
    numel = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * (numel * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _mapped(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return on_host(value)
    return [_mapped(entry) for entry in value] if isinstance(value, list | tuple) else value


class DeviceGroup(dist.ProcessGroup):
    """The ranks of a group; see the module."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._used: deque[Any] = deque(maxlen=256)  # memory that an operation may still work on

    def size(self) -> int:
        return int(self._gloo.size())

    def rank(self) -> int:
        return int(self._gloo.rank())

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def pg_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> Any:
        return self.pg_name

    def __repr__(self) -> str:
        return f"DeviceGroup({self.rank()} of {self.size()})"


def _forward(name: str) -> Callable[..., Any]:
    def method(self: DeviceGroup, *arguments: Any, **named: Any) -> Any:
        mapped = [_mapped(argument) for argument in arguments]
        self._used.append((arguments, mapped))
        return getattr(self._gloo, name)(*mapped, **{key: _mapped(value) for key, value in named.items()})

    return method


for _name in _METHODS:
    setattr(DeviceGroup, _name, _forward(_name))
for _name, _older in _NEWER.items():
    setattr(DeviceGroup, _name, _forward(_older))
