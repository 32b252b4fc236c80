"""Memory of the host: what a step frees, the next step gets back without asking the system.

glibc returns large blocks to the system when they are freed, so a training loop, which frees and asks for the same
gradients and activations in every step, pays a page fault for each of their pages in every step.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_MOST = 2**31 - 1  # mallopt takes an int


def keep_freed_memory() -> bool:
    """Let the C library's allocator keep what is freed; returns whether it did (it does nothing outside glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MOST)) and bool(mallopt(_TRIM_THRESHOLD, _MOST))
