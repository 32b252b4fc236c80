"""Launch kernels over tiles, on the tensors' device, with FMA fusion off."""

from typing import Any

import torch
from torch import Tensor

MAX_BLOCK = 8192
"""The largest block that a program holds in registers."""

TILE = 2048
"""Number of values that a program takes, unless its block is larger."""

SCATTER_TILE = 512
"""Tile size for scatter kernels; a larger tile spills registers."""

ROUNDING = {"enable_fp_fusion": False}
"""No fused multiply-add: messages must have the same bits as on the CPU."""

_PER_WARP = 512


def fits(block: int) -> bool:
    """Return whether kernels exist for blocks of this size."""
    return block <= MAX_BLOCK


def launch(kernel: Any, programs: int, on_device_of: Tensor, *args: Any, warps: int = 4, **constants: Any) -> None:
    """Launch `programs` programs of a kernel on the device of `on_device_of`, in its current stream."""
    with torch.cuda.device(on_device_of.get_device()):
        kernel[(programs,)](*args, **constants, num_warps=warps, **ROUNDING)


def over_blocks(kernel: Any, blocks: int, block: int, on_device_of: Tensor, *args: Any, **constants: Any) -> None:
    """Launch a kernel over tiles of (rows, width): one block per row, padded to a power of two.

    Args:
        kernel: the kernel; it gets `block`, `rows` and `width` as constants.
        blocks: number of blocks.
        block: values per block.
        on_device_of: a tensor on the device.
        args: arguments of the kernel.
        constants: further constants of the kernel.
    """
    width = 1 << (block - 1).bit_length()
    rows = max(1, TILE // width)
    shape = {"block": block, "rows": rows, "width": width}
    warps = max(4, rows * width // _PER_WARP)
    launch(kernel, -(-blocks // rows), on_device_of, *args, warps=warps, **shape, **constants)


def over_values(kernel: Any, count: int, on_device_of: Tensor, *args: Any, tile: int = TILE, **constants: Any) -> None:
    """Launch a kernel over flat tiles of `count` values.

    Args:
        kernel: the kernel; it gets `tile` as a constant.
        count: number of values.
        on_device_of: a tensor on the device.
        args: arguments of the kernel.
        tile: number of values that a program takes.
        constants: further constants of the kernel.
    """
    launch(kernel, -(-count // tile), on_device_of, *args, tile=tile, **constants)
