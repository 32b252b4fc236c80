"""Random numbers by counting: one in [0, 1) for each place of a gradient, the same from a kernel and from torch."""

import torch
from torch import Tensor

Key = tuple[int, int]
"""Two words of 32 bits: one stream of numbers."""

STEP, FIRST, SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
MASK = 0xFFFFFFFF


def key_of(*words: int) -> Key:
    """The stream of these whole numbers (seed, rank, step, ...), by splitmix64 over each in turn."""
    state = 0
    for word in words:
        state = _mix((state ^ (word & (2**64 - 1))) + 0x9E3779B97F4A7C15)
    return state & MASK, state >> 32


def uniform(numel: int, key: Key, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers 0 to numel - 1 of a stream, multiples of 2^-24 in [0, 1): a hash of the place and the key."""
    place = torch.arange(numel, device=device, dtype=torch.int64)
    word = (place * STEP + key[0]) & MASK
    word = ((word ^ (word >> 16)) * FIRST) & MASK
    word = word ^ key[1]
    word = ((word ^ (word >> 15)) * SECOND) & MASK
    word = word ^ (word >> 16)
    return (word >> 8).to(dtype) * 2.0**-24


def _mix(word: int) -> int:
    word &= 2**64 - 1
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return word ^ (word >> 31)
