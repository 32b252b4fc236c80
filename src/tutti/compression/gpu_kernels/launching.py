"""How kernels are launched: blocks to tiles, on the tensors' own device, every operation rounded by itself."""

from typing import Any

import torch
from torch import Tensor

MOST = 8192
"""The largest block that a program holds in registers."""

TILE = 2048
"""Values that a program takes, where its block is no larger."""

SCATTERED = 512
"""So many where each has a place of its own to go to: more would not fit a thread's registers."""

ROUNDING = {"enable_fp_fusion": False}
"""A product and a sum are never contracted: the code would differ from a processor's."""

_PER_WARP = 512


def fits(block: int) -> bool:
    """Whether there are kernels for blocks of this size."""
    return block <= MOST


def launch(kernel: Any, programs: int, like: Tensor, *args: Any, warps: int = 4, **constants: Any) -> None:
    """`programs` of a kernel on the device of `like`, in its current stream."""
    with torch.cuda.device(like.get_device()):
        kernel[(programs,)](*args, **constants, num_warps=warps, **ROUNDING)


def over_blocks(kernel: Any, blocks: int, block: int, like: Tensor, *args: Any, **constants: Any) -> None:
    """A kernel over tiles of (rows, width): blocks one below the other, padded to a power of two."""
    width = 1 << (block - 1).bit_length()
    rows = max(1, TILE // width)
    shape = {"block": block, "rows": rows, "width": width}
    warps = max(4, rows * width // _PER_WARP)
    launch(kernel, -(-blocks // rows), like, *args, warps=warps, **shape, **constants)


def over_values(kernel: Any, count: int, like: Tensor, *args: Any, tile: int = TILE, **constants: Any) -> None:
    """A kernel over flat tiles of `count` values."""
    launch(kernel, -(-count // tile), like, *args, tile=tile, **constants)
