"""A second device for tests, "fakegpu": host memory and the CPU's kernels, but a device of its own to torch.

An operation that mixes tensors of the CPU and of the device fails, as it does with a GPU; Gloo knows nothing of it; and
whatever the host must wait for (`item()`, copies to the host, `nonzero`) is counted, or refused. It is always some
operations behind the host: until then events are not done, and copies that did not block have not arrived. It is built
once, by the C++ compiler, into the folder of built files.

Example, in a process of its own, since torch then takes the device for the process's accelerator:
    >>> fakegpu.load()
    >>> torch.ones(3, device="fakegpu") + torch.ones(3)
    Traceback (most recent call last):
    RuntimeError: Expected all tensors to be on the same device, but argument other of aten::add.Tensor is on cpu ...
"""

import fcntl
import hashlib
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import include_paths

NAME = "fakegpu"
_SOURCE = Path(__file__).with_name("fakegpu.cpp")
_BUILD = Path(__file__).parents[2] / "build" / NAME
_LIBRARIES = Path(torch.__file__).parent / "lib"

needs_fakegpu = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler (g++) to build the device")


def load() -> torch.device:
    """Build the device if needed, register it with torch in this process, and return it."""
    device = torch.device("privateuseone", 0)
    if not hasattr(torch, NAME):
        torch.ops.load_library(str(build()))
        torch.ops.fakegpu.register_hooks()
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _DeviceModule(f"torch.{NAME}"))
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return device


def build() -> Path:
    """Build the device's library unless it is there for this source and this torch; return its file."""
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    library = _BUILD / f"libfakegpu-{key}.so"
    if library.exists():
        return library
    _BUILD.mkdir(parents=True, exist_ok=True)
    with open(_BUILD / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            includes = [f"-I{path}" for path in [*include_paths(), sysconfig.get_paths()["include"]]]
            libraries = [f"-L{_LIBRARIES}", "-lc10", "-ltorch_cpu", "-ltorch"]
            command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", *includes, str(_SOURCE), *libraries]
            unfinished = library.with_suffix(".part")
            subprocess.run([*command, "-o", str(unfinished)], check=True)
            unfinished.rename(library)
    return library


def synchronizations() -> int:
    """How often the host has waited for the device in this process."""
    return torch.ops.fakegpu.synchronizations()


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Within it, an operation for which the host must wait for the device fails, with its name."""
    torch.ops.fakegpu.refuse(True)
    try:
        yield
    finally:
        torch.ops.fakegpu.refuse(False)


def live_nbytes() -> int:
    """Bytes of device memory in use. Outputs that the CPU's kernels allocate by themselves are not in it."""
    return torch.ops.fakegpu.live_nbytes()


class _DeviceModule(ModuleType):
    """What torch and others expect of `torch.<device>`."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize()

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    def Stream(self, device: Any = None, **options: Any) -> torch.Stream:
        return torch.Stream(device=NAME, **options)

    @contextmanager
    def stream(self, stream: torch.Stream) -> Iterator[None]:
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        torch.ops.fakegpu.seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.ops.fakegpu.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.ops.fakegpu.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, device: Any = None) -> int:
        return live_nbytes()

    def max_memory_allocated(self, device: Any = None) -> int:
        return torch.ops.fakegpu.peak_nbytes()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        torch.ops.fakegpu.reset_peak()

    def empty_cache(self) -> None:
        pass
