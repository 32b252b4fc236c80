"""Kernels of sign-and-level codes of 2, 4 or 8 bits with a scale a block.

Loops go over slices and whole numbers of 32 bits: those the compiler turns into vector instructions, while an index
that is a sum might be negative, and of two bytes Numba makes 64 bits. Either takes 2 to 5 times as long.
"""

import numpy as np

from tutti.compression.kernels.build import inline, kernel


@inline
def _uniform(place, low, high):  # type: ignore[no-untyped-def]
    """Number `place` of a stream, as compress.draw.uniform has it."""
    word = np.uint32(np.uint32(place) * np.uint32(0x9E3779B9) + low)
    word ^= word >> np.uint32(16)
    word = np.uint32(word * np.uint32(0x7FEB352D))
    word ^= high
    word ^= word >> np.uint32(15)
    word = np.uint32(word * np.uint32(0x846CA68B))
    word ^= word >> np.uint32(16)
    return np.float32(np.int32(word >> np.uint32(8))) * np.float32(2.0**-24)


@inline
def _scale_of(x, bits_of_x, size, l2, infinity, magnitude, lanes):  # type: ignore[no-untyped-def]
    """The block's largest magnitude or 2-norm as float32, NaN where it is not finite."""
    largest = bits_of_x[0] & magnitude
    for j in range(size):
        key = bits_of_x[j] & magnitude
        largest = key if key > largest else largest
    if largest >= infinity:
        return np.float32(np.nan)
    if l2:
        lanes[:] = 0
        rows = size // 16
        for row in range(rows):
            for lane in range(16):
                lanes[lane] += x[row * 16 + lane] * x[row * 16 + lane]
        for lane in range(size - rows * 16):
            lanes[lane] += x[rows * 16 + lane] * x[rows * 16 + lane]
        for half in (8, 4, 2, 1):
            for lane in range(half):
                lanes[lane] += lanes[lane + half]
        scale = np.float32(np.sqrt(lanes[0]))
    else:
        first = x[0]
        bits_of_x[0] = largest
        scale = np.float32(x[0])
        x[0] = first
    return scale if np.isfinite(scale) else np.float32(np.nan)


@inline
def _pack(codes, size, bits, packed):  # type: ignore[no-untyped-def]
    if bits == 8:
        for j in range(size):
            packed[j] = np.uint8(codes[j])
    elif bits == 4:
        for j in range((size + 1) // 2):
            packed[j] = np.uint8(codes[2 * j] | codes[2 * j + 1] << 4)
    else:
        for j in range((size + 3) // 4):
            low, high = codes[4 * j] | codes[4 * j + 1] << 2, codes[4 * j + 2] | codes[4 * j + 3] << 2
            packed[j] = np.uint8(low | high << 4)


@inline
def _unpack(packed, bits, codes):  # type: ignore[no-untyped-def]
    if bits == 8:
        for j in range(packed.size):
            codes[j] = np.int32(packed[j])
    elif bits == 4:
        for j in range(packed.size):
            codes[2 * j] = np.int32(packed[j]) & np.int32(15)
            codes[2 * j + 1] = np.int32(packed[j]) >> np.int32(4)
    else:
        for j in range(packed.size):
            for k in range(4):
                codes[4 * j + k] = (np.int32(packed[j]) >> np.int32(2 * k)) & np.int32(3)


@kernel
def encode(  # type: ignore[no-untyped-def]
    values, old, new, scales, given, packed, block, bits, l2, noise, low, high, x, bits_of_x, infinity, magnitude
):
    """x = values + old; code = sign and floor(|x| levels / scale + u); new = x - its decoded value.

    `given`: the scales are there already. `noise`: u is drawn, else 1/2. `x`, `bits_of_x`: room for a block and the
    same memory as whole numbers. `infinity`, `magnitude`: of the dtype, as whole numbers.
    """
    n = values.size
    feedback = old.size > 0
    real = values.dtype.type
    sign, most = np.int32(2 ** (bits - 1)), np.int32(2 ** (bits - 1) - 1)
    levels = real(most)
    codes = np.zeros(block + 4, np.int32)
    draws = np.full(block, real(0.5), values.dtype)
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
        if not given:
            scales[index] = _scale_of(x, bits_of_x, size, l2, infinity, magnitude, lanes)
        scale = scales[index]
        if scale < np.float32(2.0**-100):
            scale = np.float32(0)
            scales[index] = scale
        usable = scale > 0  # neither zero nor NaN
        unit = real(scale) / levels if usable else real(0)
        inverse = levels / real(scale) if usable else real(0)
        if noise:
            for j in range(size):
                draws[j] = real(_uniform(start + j, low, high))
        codes[size : size + 4] = 0
        if np.isnan(scale):
            codes[:size] = 0
        else:
            for j in range(size):
                level = abs(x[j]) * inverse + draws[j]
                codes[j] = np.int32(level if level < levels else levels) | (sign if x[j] < 0 else np.int32(0))
        if feedback:
            left = new[start : start + size]
            for j in range(size):
                level = real(codes[j] & most) * unit
                left[j] = x[j] - (-level if x[j] < 0 else level)
        begin = start * bits // 8
        _pack(codes, size, bits, packed[begin : begin + (size * bits + 7) // 8])


@kernel
def decode_add(scales, packed, into, block, bits):  # type: ignore[no-untyped-def]
    """into += sign * level * (scale / levels)."""
    n = into.size
    real = into.dtype.type
    most, top = np.int32(2 ** (bits - 1) - 1), np.int32(bits - 1)
    codes = np.empty(block + 4, np.int32)
    for index in range(scales.size):
        start = index * block
        size = min(block, n - start)
        unit = real(scales[index]) / real(most)
        begin = start * bits // 8
        _unpack(packed[begin : begin + (size * bits + 7) // 8], bits, codes)
        part = into[start : start + size]
        for j in range(size):
            negative = -(codes[j] >> top)  # all bits, or none
            part[j] += real(((codes[j] & most) ^ negative) - negative) * unit
