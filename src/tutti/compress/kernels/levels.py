"""Kernels of sign-and-level codes of 2, 4 or 8 bits with a scale a block."""

import numpy as np

from tutti.compress.kernels.build import inline, kernel


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
def _pack(codes, size, bits, packed, base):  # type: ignore[no-untyped-def]
    if bits == 8:
        for j in range(size):
            packed[base + j] = codes[j]
    elif bits == 4:
        for j in range((size + 1) // 2):
            packed[base + j] = codes[2 * j] | codes[2 * j + 1] << 4
    else:
        for j in range((size + 3) // 4):
            four = codes[4 * j] | codes[4 * j + 1] << 2 | codes[4 * j + 2] << 4 | codes[4 * j + 3] << 6
            packed[base + j] = four


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
    levels = real(2 ** (bits - 1) - 1)
    codes = np.zeros(block + 4, np.uint8)
    draws = np.full(block, real(0.5), values.dtype)
    lanes = np.empty(16, values.dtype)
    for index in range(scales.size):
        start = index * block
        size = min(block, n - start)
        for j in range(size):
            x[j] = values[start + j]
        if feedback:
            for j in range(size):
                x[j] += old[start + j]
        if not given:
            scales[index] = _scale_of(x, bits_of_x, size, l2, infinity, magnitude, lanes)
        scale = scales[index]
        if scale < np.float32(2.0**-100):
            scale = np.float32(0)
            scales[index] = scale
        codes[size : size + 4] = 0
        usable = scale > 0  # neither zero nor NaN
        unit = real(scale) / levels if usable else real(0)
        inverse = levels / real(scale) if usable else real(0)
        if noise:
            for j in range(size):
                draws[j] = real(_uniform(start + j, low, high))
        if np.isnan(scale):
            codes[:size] = 0
            if feedback:
                for j in range(size):
                    new[start + j] = x[j]
        else:
            for j in range(size):
                level = abs(x[j]) * inverse + draws[j]
                level = np.floor(level if level < levels else levels)
                negative = x[j] < 0
                if feedback:
                    new[start + j] = x[j] - (-(level * unit) if negative else level * unit)
                codes[j] = np.uint8(np.int32(level)) | (np.uint8(negative) << np.uint8(bits - 1))
        _pack(codes, size, bits, packed, start * bits // 8)


@kernel
def decode_add(scales, packed, into, block, bits):  # type: ignore[no-untyped-def]
    """into += sign * level * (scale / levels)."""
    n = into.size
    real = into.dtype.type
    most = 2 ** (bits - 1) - 1
    codes = np.empty(block + 4, np.uint8)
    for index in range(scales.size):
        start = index * block
        size = min(block, n - start)
        unit = real(scales[index]) / real(most)
        base = start * bits // 8
        if bits == 8:
            for j in range(size):
                codes[j] = packed[base + j]
        elif bits == 4:
            for j in range((size + 1) // 2):
                codes[2 * j] = packed[base + j] & 15
                codes[2 * j + 1] = packed[base + j] >> 4
        else:
            for j in range((size + 3) // 4):
                for k in range(4):
                    codes[4 * j + k] = (packed[base + j] >> (2 * k)) & 3
        for j in range(size):
            level = real(np.int32(codes[j] & np.uint8(most))) * unit
            into[start + j] += -level if codes[j] > most else level
