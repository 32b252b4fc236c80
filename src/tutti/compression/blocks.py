"""Flat values in blocks with one scale each: functions that the references of all block codecs share.

If a paper uses one scale for a layer, a column or a bucket, the blocks here are never larger.
"""

import torch
from torch import Tensor

from tutti.errors import PlanError

LANES = 16
SMALLEST_SCALE = 2.0**-100
"""Smallest scale of a block that is sent.

Blocks with a smaller scale are sent as zeros, because the scale's inverse would not be finite. Error feedback keeps
their values.
"""


def check_block(block: int, max_block: int = 2**20) -> None:
    """Refuse a block size whose codes do not fill whole bytes, or whose values do not fill whole rows of lanes.

    Args:
        block: number of values in a block.
        max_block: the largest block size.

    Raises:
        PlanError: the block size is not allowed.
    """
    if block < LANES or block % LANES or block > max_block:
        raise PlanError(f"block = {block}; give a multiple of {LANES}, at most {max_block}")


def count(numel: int, block: int) -> int:
    """Return the number of blocks of `numel` values."""
    return -(-numel // block)


def in_blocks(flat: Tensor, block: int) -> Tensor:
    """Return (blocks, block) values, padded with zeros."""
    rows = count(flat.numel(), block)
    padded = flat.new_zeros(rows * block)
    padded[: flat.numel()] = flat
    return padded.view(rows, block)


def sizes(numel: int, block: int, like: Tensor) -> Tensor:
    """Return the (blocks,) number of values in each block, in the dtype of `like`."""
    rows = count(numel, block)
    counts = torch.full((rows,), float(block), dtype=like.dtype, device=like.device)
    if rows:
        counts[-1] = numel - (rows - 1) * block
    return counts


def quotient(x: Tensor, y: int) -> Tensor:
    """Return x / y, rounded once. On a GPU, torch would multiply with the inverse of a Python number."""
    return x / torch.full_like(x, y)


def steps(scale: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return (value of a level, levels per unit), each rounded once; 0 where the scale is 0 or NaN."""
    usable, zero, num_levels = scale > 0, torch.zeros_like(scale), torch.full_like(scale, levels)
    return torch.where(usable, scale / num_levels, zero), torch.where(usable, num_levels / scale, zero)


def lane_sum(x: Tensor) -> Tensor:
    """Return (blocks,) sums over the rows of (blocks, block): `LANES` running sums, added up in a tree."""
    rows = x.view(x.shape[0], -1, LANES)
    lanes = x.new_zeros(x.shape[0], LANES)
    for row in range(rows.shape[1]):
        lanes = lanes + rows[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def finite_max(x: Tensor) -> Tensor:
    """Return the (blocks,) float32 largest magnitude of each row; NaN where a value or the result is not finite."""
    largest = x.abs().amax(dim=1).to(torch.float32)
    bad = ~(x.isfinite().all(dim=1) & largest.isfinite())
    return largest.masked_fill(bad, torch.nan)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack (blocks, block) codes of 1, 2, 4 or 8 `bits` into flat bytes, the first value in the lowest bits."""
    per_byte = 8 // bits
    spread = codes.reshape(-1, per_byte).to(torch.int32)
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.int32)
    return (spread << shifts).sum(dim=1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the first `numel` codes of flat bytes, int32."""
    shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.int32)
    codes = (packed.to(torch.int32)[:, None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten()[:numel]
