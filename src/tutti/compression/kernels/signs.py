"""Kernels of 1-bit codes: a scale a block, a sign an element."""

import numpy as np

from tutti.compression.kernels.build import inline, kernel


@inline
def _mean_abs(x, size, lanes):  # type: ignore[no-untyped-def]
    """sum |x| / size in 16 lanes, added up in a tree."""
    lanes[:] = 0
    rows = size // 16
    for row in range(rows):
        for lane in range(16):
            lanes[lane] += abs(x[row * 16 + lane])
    for lane in range(size - rows * 16):
        lanes[lane] += abs(x[rows * 16 + lane])
    for half in (8, 4, 2, 1):
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
    return np.float32(lanes[0] / lanes.dtype.type(size))


@kernel
def encode(values, old, new, scales, bits, block):  # type: ignore[no-untyped-def]
    """x = values + old; scales = mean |x| a block; bits = signs; new = x - its decoded value.

    `old` and `new` of size 0: no error feedback.
    """
    n = values.size
    feedback = old.size > 0
    x = np.empty(block, values.dtype)
    lanes = np.empty(16, values.dtype)
    for index in range(scales.size):
        start = index * block
        size = min(block, n - start)
        mine = values[start : start + size]
        for j in range(size):
            x[j] = mine[j]
        if feedback:
            kept = old[start : start + size]
            for j in range(size):
                x[j] += kept[j]
        scale = _mean_abs(x, size, lanes)
        scales[index] = scale
        s = values.dtype.type(scale)
        if feedback:
            left = new[start : start + size]
            for j in range(size):
                left[j] = x[j] - (-s if x[j] < 0 else s)
        x[size : min(size + 7, block)] = 0  # signs of what is not there
        written = bits[start // 8 : start // 8 + (size + 7) // 8]
        for byte in range(written.size):
            code = np.uint8(0)
            for bit in range(8):
                code |= np.uint8(x[byte * 8 + bit] < 0) << np.uint8(bit)
            written[byte] = code


@kernel
def decode_add(scales, bits, into, block):  # type: ignore[no-untyped-def]
    """into += the decoded values."""
    n = into.size
    for index in range(scales.size):
        start = index * block
        size = min(block, n - start)
        s = into.dtype.type(scales[index])
        part, read = into[start : start + size], bits[start // 8 : start // 8 + (size + 7) // 8]
        for byte in range(size // 8):
            code = np.int32(read[byte])
            for bit in range(8):
                part[byte * 8 + bit] += -s if (code >> np.int32(bit)) & np.int32(1) else s
        for j in range(size // 8 * 8, size):
            part[j] += -s if (read[j // 8] >> (j % 8)) & 1 else s
