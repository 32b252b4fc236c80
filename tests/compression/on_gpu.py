"""Triton's kernels where there is no GPU, each way in a process of its own: interpreted, or compiled for a device.

Triton asks when it is first loaded whether it shall interpret; the tests' own process never loads it.
"""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch

from compression.codecs import gradient
from tutti.compression.codec import Codec, _trial
from tutti.compression.qsgd import Levels, _by_triton
from tutti.compression.top_k import TopK

Arrays = dict[str, np.ndarray]
Call = Callable[..., Any]
"""Calls a function of this file, with its arguments, in the other process."""


@contextmanager
def process(**environment: str) -> Iterator[Call]:
    """A process with these variables, for as long as it is needed; skips the test where Triton is not installed."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed: make long installs it (Linux)")
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for name, value in environment.items():
            patch.setenv(name, value)
        pool.submit(os.getpid).result(timeout=60)
        yield lambda function, *args: pool.submit(function, *args).result(timeout=110)


def step(codec: Codec, values: np.ndarray, old: Arrays, count: int = 0, given: np.ndarray | None = None) -> Arrays:
    """One step by Triton: the message, what is decoded and added to ones, and what is kept back, by its name."""
    flat = torch.from_numpy(values)
    state = codec.state(flat.numel(), dtype=flat.dtype, seed=3)
    state.count = count
    for name, kept in old.items():
        state.old[name].copy_(torch.from_numpy(kept))
    message, into = torch.zeros(codec.nbytes(flat.numel()), dtype=torch.uint8), torch.ones_like(flat)
    if given is None:
        codec.encode_by_triton(flat, state, message)
    else:
        assert isinstance(codec, Levels)
        _by_triton(codec, flat, state, message, torch.from_numpy(given))
    codec.decode_add_by_triton(message, into)
    return {"message": message.numpy(), "into": into.numpy(), **{name: new.numpy() for name, new in state.new.items()}}


def searched(codec: TopK, values: np.ndarray, old: Arrays) -> np.ndarray | None:
    """The places that the search finds, None where it gives up."""
    from tutti.compression.gpu_kernels import sparse_kernels

    flat = torch.from_numpy(values)
    state = codec.state(flat.numel(), dtype=flat.dtype)
    for name, kept in old.items():
        state.old[name].copy_(torch.from_numpy(kept))
    count, momentum = codec.count(flat.numel()), codec._momentum(flat, state)
    places = sparse_kernels.largest_sums(flat, state.old["residual"], state.new["residual"], momentum, count)
    return None if places is None else places.numpy()


def decoded(codec: Codec, message: np.ndarray, numel: int) -> np.ndarray:
    """What a message adds to zeros, by Triton."""
    into = torch.zeros(numel)
    codec.decode_add_by_triton(torch.from_numpy(message), into)
    return into.numpy()


def telescoped(codec: Codec, numel: int, steps: int) -> Arrays:
    """What went in over so many steps, what came out, and what is kept, in float64."""
    state = codec.state(numel, dtype=torch.float64)
    total, out = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    message = torch.zeros(codec.nbytes(numel), dtype=torch.uint8)
    for number in range(steps):
        values = gradient("normal", numel, torch.float64, number)
        total += values
        codec.encode_by_triton(values, state, message)
        codec.decode_add_by_triton(message, out)
        state.commit()
    return {"total": total.numpy(), "out": out.numpy(), "residual": state.old["residual"].numpy()}


def trial(codec: Codec) -> list[np.ndarray]:
    """What `device` compares on a GPU before it counts."""
    return [one.numpy() for one in _trial(codec, torch.device("cpu"), "triton")]


class Driver:
    """What Triton asks a device's driver for before it launches a kernel."""

    def __init__(self, backend: str, architecture: int | str, threads: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(backend, architecture, threads)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)

    def get_current_stream(self, device: str) -> int:
        return 0


Compiled = tuple[str, int, list[str]]
"""A kernel's name, its binary's bytes, and instructions in it that round otherwise than a processor (NVIDIA's)."""


def compiled(codec: Codec, dtype: str, numel: int, target: tuple[str, int | str, int]) -> list[Compiled]:
    """Every kernel that the codec launches for so many values, compiled to the end for (backend, architecture, threads
    of a warp), on the way that a launch takes until it asks the device to begin.
    """
    import triton

    from tutti.compression.gpu_kernels import launching, sparse_kernels

    triton.runtime.driver.set_active(Driver(*target))
    found: list[Compiled] = []

    def compile_only(kernel: Any, programs: int, like: Any, *args: Any, warps: int = 4, **constants: Any) -> None:
        for _ in range(2):  # the second one finds it, and looks whether it still holds
            made = kernel.warmup(*args, **constants, grid=(programs,), num_warps=warps, **launching.ROUNDING)
        binary, ptx = made.asm["cubin" if target[0] == "cuda" else "hsaco"], made.asm.get("ptx", "")
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        found.append((name, len(binary), sorted(set(INEXACT.findall(ptx)))))

    launching.launch = sparse_kernels.launch = compile_only
    real = getattr(torch, dtype)
    state = codec.state(numel, dtype=real)
    message, flat = torch.zeros(codec.nbytes(numel), dtype=torch.uint8), torch.zeros(numel, dtype=real)
    codec.encode_by_triton(flat, state, message)
    if isinstance(codec, TopK):  # without a device the search finds nothing, so there is nothing to take
        places = torch.arange(codec.count(numel))
        sparse_kernels.take_values(places, flat, state.new.get("momentum", flat[:0]), *codec.pairs(message, numel))
    codec.decode_add_by_triton(message, flat)
    return found


INEXACT = re.compile(r"\S*(?:(?<!cvt\.rmi)\.ftz|fma\.rn\.f|div\.full|\.approx)\S*")
"""Of PTX: subnormal numbers taken for 0 (floors of them are), products and sums contracted, quotients and roots that
are only near.
"""
