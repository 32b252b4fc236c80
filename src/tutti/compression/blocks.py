"""Flat values in blocks with a scale each: what the references of all block codecs share.

Where the papers use one scale for a layer, a column or a bucket, a block is never coarser.
"""

import torch
from torch import Tensor

from tutti.errors import PlanError

LANES = 16
SMALLEST_SCALE = 2.0**-100
"""Blocks with a smaller scale are sent as zeros, since the scale's inverse would not be finite. Error feedback keeps
them."""


def check_block(block: int, most: int = 2**20) -> None:
    """Raise PlanError unless blocks are whole bytes of code and whole rows of lanes."""
    if block < LANES or block % LANES or block > most:
        raise PlanError(f"block = {block}; a block is a multiple of {LANES}, at most {most}")


def count(numel: int, block: int) -> int:
    """Number of blocks of `numel` values."""
    return -(-numel // block)


def in_blocks(flat: Tensor, block: int) -> Tensor:
    """(blocks, block) values, padded with zeros."""
    rows = count(flat.numel(), block)
    padded = flat.new_zeros(rows * block)
    padded[: flat.numel()] = flat
    return padded.view(rows, block)


def sizes(numel: int, block: int, like: Tensor) -> Tensor:
    """(blocks,) number of values of each block, in the dtype of `like`."""
    rows = count(numel, block)
    counts = torch.full((rows,), float(block), dtype=like.dtype, device=like.device)
    if rows:
        counts[-1] = numel - (rows - 1) * block
    return counts


def quotient(x: Tensor, y: int) -> Tensor:
    """x / y, rounded once. torch on a GPU would multiply with the inverse of a Python number."""
    return x / torch.full_like(x, y)


def steps(scale: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """(value of a level, levels per unit), each rounded once; 0 where the scale is 0 or NaN."""
    usable, zero, most = scale > 0, torch.zeros_like(scale), torch.full_like(scale, levels)
    return torch.where(usable, scale / most, zero), torch.where(usable, most / scale, zero)


def lane_sum(x: Tensor) -> Tensor:
    """(blocks,) sums over the rows of (blocks, block): `LANES` running sums, added up in a tree."""
    rows = x.view(x.shape[0], -1, LANES)
    lanes = x.new_zeros(x.shape[0], LANES)
    for row in range(rows.shape[1]):
        lanes = lanes + rows[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def finite_max(x: Tensor) -> Tensor:
    """(blocks,) float32 largest magnitude of each row; NaN where a value or the result is not finite."""
    largest = x.abs().amax(dim=1).to(torch.float32)
    bad = ~(x.isfinite().all(dim=1) & largest.isfinite())
    return largest.masked_fill(bad, torch.nan)


def pack(codes: Tensor, bits: int) -> Tensor:
    """(blocks, block) codes of `bits` (1, 2, 4, 8) -> flat bytes, the first value in the lowest bits."""
    per_byte = 8 // bits
    spread = codes.reshape(-1, per_byte).to(torch.int32)
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.int32)
    return (spread << shifts).sum(dim=1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Flat bytes -> the first `numel` codes, int32."""
    shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.int32)
    codes = (packed.to(torch.int32)[:, None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten()[:numel]
