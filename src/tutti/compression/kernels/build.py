"""How kernels are compiled: at the first call with a dtype, kept on disk for the next process."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import numba
import numpy as np
from filelock import FileLock, Timeout

PATIENCE_S = 60.0
"""For so long a process waits for another that compiles the same kernel, then it does so itself."""


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled for this processor, single-threaded, without the interpreter's lock.

    Kept beside its file, or in the user's cache folder: one process compiles, and those that want it meanwhile wait and
    read it. Compiled anew in each process where neither folder can be written.
    """
    try:
        made: Any = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return cast(Callable[..., Any], numba.njit(nogil=True)(function))
    compiled, lock = made.compile, Path(made.stats.cache_path) / f"{function.__module__}.{function.__qualname__}.lock"

    def in_turn(signature: Any) -> Any:
        with ExitStack() as held:
            with suppress(Timeout, OSError, NotImplementedError):  # whoever has it is stuck; a file system has no locks
                held.enter_context(FileLock(lock, timeout=PATIENCE_S, poll_interval=0.01))
            return compiled(signature)

    made.compile = in_turn
    return cast(Callable[..., Any], made)


def inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled into the kernels that call it. Keep it in their file: the disk's copy looks at no other."""
    return cast(Callable[..., Any], numba.njit(nogil=True, inline="always")(function))


def room(block: int, dtype: Any) -> tuple[Any, Any, Any, Any]:
    """(room for a block, the same memory as whole numbers, infinity as a whole number, the mask of magnitudes).

    Magnitudes compare as whole numbers: NaN is above infinity, and a maximum over them needs no order of operations.
    """
    x = np.zeros(block, dtype)
    whole = np.int32 if x.itemsize == 4 else np.int64
    infinity = np.array([np.inf], x.dtype).view(whole)[0]
    return x, x.view(whole), infinity, whole(np.iinfo(whole).max)
