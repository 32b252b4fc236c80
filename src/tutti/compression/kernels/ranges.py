"""Kernels of min-max codes: 8 bits an element between its block's smallest and largest value."""

import numpy as np

from tutti.compression.kernels.build import kernel


@kernel
def encode(values, old, new, scales, codes, block, x, bits_of_x, infinity, magnitude):  # type: ignore[no-untyped-def]
    """x = values + old; code = floor((x - low) / step + 1/2), step = (high - low) / 255; new = x - its decoded value.

    `scales`: (blocks, 2) low and high. `x`, `bits_of_x`, `infinity`, `magnitude`: as build.room makes them.
    """
    n = values.size
    feedback = old.size > 0
    real = values.dtype.type
    sign = values.itemsize * 8 - 1
    for index in range(scales.shape[0]):
        start = index * block
        size = min(block, n - start)
        mine, written, left = values[start : start + size], codes[start : start + size], new[start : start + size]
        for j in range(size):
            x[j] = mine[j]
        if feedback:
            kept = old[start : start + size]
            for j in range(size):
                x[j] += kept[j]
        first = x[0]
        least, most, largest = bits_of_x[0], bits_of_x[0], bits_of_x[0] & magnitude
        least ^= (least >> sign) & magnitude
        most = least
        for j in range(size):
            key = bits_of_x[j]
            size_of = key & magnitude
            key ^= (key >> sign) & magnitude  # in the order of the values
            largest = size_of if size_of > largest else largest
            least = key if key < least else least
            most = key if key > most else most
        bits_of_x[0] = least ^ ((least >> sign) & magnitude)
        low = np.float32(x[0])
        bits_of_x[0] = most ^ ((most >> sign) & magnitude)
        high = np.float32(x[0])
        x[0] = first
        if largest >= infinity or not (np.isfinite(low) and np.isfinite(high)):
            scales[index, :] = np.float32(np.nan)
            written[:] = 0
            if feedback:
                left[:] = x[:size]
            continue
        scales[index, 0] = low
        scales[index, 1] = high
        base = real(low)
        step = real(high) / real(255) - base / real(255)
        inverse = real(1) / step if step > real(2.0**-100) else real(0)
        step = step if step > real(2.0**-100) else real(0)
        for j in range(size):
            level = (x[j] - base) * inverse + real(0.5)
            level = level if level < real(255) else real(255)
            written[j] = np.uint8(np.int32(level if level > real(0) else real(0)))
        if feedback:
            for j in range(size):
                left[j] = x[j] - (base + real(np.int32(written[j])) * step)


@kernel
def decode_add(scales, codes, into, block):  # type: ignore[no-untyped-def]
    """into += low + code * step."""
    real = into.dtype.type
    for index in range(scales.shape[0]):
        start = index * block
        base, high = real(scales[index, 0]), real(scales[index, 1])
        step = high / real(255) - base / real(255)
        step = real(0) if step <= real(2.0**-100) else step
        part, read = into[start : start + block], codes[start : start + block]
        for j in range(part.size):
            part[j] += base + real(np.int32(read[j])) * step
