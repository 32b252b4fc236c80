"""Launching kernels: blocks become tiles, on the tensors' own device, and every operation is rounded separately."""

from typing import Any

import torch
from torch import Tensor

MOST = 8192
"""The largest block that a program holds in registers."""

TILE = 2048
"""Values that a program takes, unless its block is larger."""

SCATTERED = 512
"""Values that a program takes where each goes to a place of its own: more would not fit a thread's registers."""

ROUNDING = {"enable_fp_fusion": False}
"""A product and a sum are never contracted: the code would differ from that of a CPU."""

_PER_WARP = 512


def fits(block: int) -> bool:
    """Return whether kernels exist for blocks of this size."""
    return block <= MOST


def launch(kernel: Any, programs: int, like: Tensor, *args: Any, warps: int = 4, **constants: Any) -> None:
    """Launch `programs` programs of a kernel on the device of `like`, in its current stream."""
    with torch.cuda.device(like.get_device()):
        kernel[(programs,)](*args, **constants, num_warps=warps, **ROUNDING)


def over_blocks(kernel: Any, blocks: int, block: int, like: Tensor, *args: Any, **constants: Any) -> None:
    """Launch a kernel over tiles of (rows, width): one block per row, padded to a power of two.

    Args:
        kernel: the kernel; it gets `block`, `rows` and `width` as constants.
        blocks: number of blocks.
        block: values per block.
        like: a tensor on the device.
        args: arguments of the kernel.
        constants: further constants of the kernel.
    """
    width = 1 << (block - 1).bit_length()
    rows = max(1, TILE // width)
    shape = {"block": block, "rows": rows, "width": width}
    warps = max(4, rows * width // _PER_WARP)
    launch(kernel, -(-blocks // rows), like, *args, warps=warps, **shape, **constants)


def over_values(kernel: Any, count: int, like: Tensor, *args: Any, tile: int = TILE, **constants: Any) -> None:
    """Launch a kernel over flat tiles of `count` values.

    Args:
        kernel: the kernel; it gets `tile` as a constant.
        count: number of values.
        like: a tensor on the device.
        args: arguments of the kernel.
        tile: values that a program takes.
        constants: further constants of the kernel.
    """
    launch(kernel, -(-count // tile), like, *args, tile=tile, **constants)
