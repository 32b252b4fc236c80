"""Numba kernels: one pass over memory on one core reads a gradient and writes its code and the new residual.

A kernel works block by block, so that a block is still in the first-level cache when it is read again. Each kernel
gives bit for bit the result of its plain PyTorch reference, which is defined beside the codec. Sums are accumulated in
`blocks.LANES` lanes that are added up in a fixed tree; no operation is contracted or reordered. Kernels have no thread
pool and no state, so forked processes may use them before or after their parent did. They release the interpreter's
lock.

Loops run over slices and 32-bit integers, so that the compiler vectorises them. Two things would make them 2 to 5 times
slower: an index computed as a sum, which might be negative, and arithmetic on bytes, which Numba widens to 64 bits.
Kernels are compiled at the first call with a dtype and cached on disk for the next process.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import numba
import numpy as np
from filelock import FileLock, Timeout

PATIENCE_S = 60.0
"""Seconds that a process waits for another that compiles the same kernel, before it compiles the kernel itself."""


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` for this processor: single-threaded, and without the interpreter's lock.

    The result is cached beside the function's file, or in the user's cache folder. One process compiles; others that
    need the kernel meanwhile wait and read it from the cache. If neither folder can be written, each process compiles.
    """
    try:
        jitted: Any = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return cast(Callable[..., Any], numba.njit(nogil=True)(function))
    compiled, lock = (
        jitted.compile,
        Path(jitted.stats.cache_path) / f"{function.__module__}.{function.__qualname__}.lock",
    )

    def in_turn(signature: Any) -> Any:
        with ExitStack() as stack:
            with suppress(Timeout, OSError, NotImplementedError):  # the holder is stuck, or there are no file locks
                stack.enter_context(FileLock(lock, timeout=PATIENCE_S, poll_interval=0.01))
            return compiled(signature)

    jitted.compile = in_turn
    return cast(Callable[..., Any], jitted)


def inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` into the kernels that call it.

    Keep it in the kernels' file: the disk cache does not notice changes in any other file.
    """
    return cast(Callable[..., Any], numba.njit(nogil=True, inline="always")(function))


def block_buffers(block: int, dtype: Any) -> tuple[Any, Any, Any, Any]:
    """Make the buffers of one block.

    Magnitudes are compared as integers: NaN is then above infinity, and a maximum needs no order of operations.

    Returns:
        A buffer of `block` values, the same memory as integers, infinity as an integer, and the bit mask of magnitudes.
    """
    x = np.zeros(block, dtype)
    whole = np.int32 if x.itemsize == 4 else np.int64
    infinity = np.array([np.inf], x.dtype).view(whole)[0]
    return x, x.view(whole), infinity, whole(np.iinfo(whole).max)


@inline
def _random_uniform(position, low, high):  # type: ignore[no-untyped-def]
    """Return number `position` of a stream, as codec_state.random_uniform defines it."""
    word = np.uint32(np.uint32(position) * np.uint32(0x9E3779B9) + low)
    word ^= word >> np.uint32(16)
    word = np.uint32(word * np.uint32(0x7FEB352D))
    word ^= high
    word ^= word >> np.uint32(15)
    word = np.uint32(word * np.uint32(0x846CA68B))
    word ^= word >> np.uint32(16)
    return np.float32(np.int32(word >> np.uint32(8))) * np.float32(2.0**-24)


@inline
def _scale_of(x, bits_of_x, size, l2, infinity, magnitude, lanes):  # type: ignore[no-untyped-def]
    """Return the block's largest magnitude or 2-norm as float32, NaN where it is not finite."""
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
def encode_levels(  # type: ignore[no-untyped-def]
    values, old, new, scales, given, packed, block, bits, l2, noise, low, high, x, bits_of_x, infinity, magnitude
):
    """Write signs and levels, and the residual of what was not sent.

    x = values + old; code = sign and floor(|x| levels / scale + u); new = x - its decoded value.

    `given`: the scales are given, not computed. `noise`: u is random, otherwise 1/2. `x`, `bits_of_x`, `infinity` and
    `magnitude` are from `block_buffers`. `old` and `new` of size 0: no error feedback.
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
        inputs = values[start : start + size]
        for j in range(size):
            x[j] = inputs[j]
        if feedback:
            residual = old[start : start + size]
            for j in range(size):
                x[j] += residual[j]
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
                draws[j] = real(_random_uniform(start + j, low, high))
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
def decode_add_levels(scales, packed, into, block, bits):  # type: ignore[no-untyped-def]
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
            negative = -(codes[j] >> top)  # all bits set, or none
            part[j] += real(((codes[j] & most) ^ negative) - negative) * unit


@kernel
def encode_min_max(values, old, new, ranges, codes, block, x, bits_of_x, infinity, magnitude):  # type: ignore[no-untyped-def]
    """Write one byte per value between the block's minimum and maximum, and the residual of what was not sent.

    x = values + old; code = floor((x - low) / step + 1/2), step = (high - low) / 255; new = x - its decoded value.

    `ranges`: (blocks, 2) low and high. `x`, `bits_of_x`, `infinity` and `magnitude` are from `block_buffers`. `old` and
    `new` of size 0: no error feedback.
    """
    n = values.size
    feedback = old.size > 0
    real = values.dtype.type
    sign = values.itemsize * 8 - 1
    for index in range(ranges.shape[0]):
        start = index * block
        size = min(block, n - start)
        inputs, written, left = values[start : start + size], codes[start : start + size], new[start : start + size]
        for j in range(size):
            x[j] = inputs[j]
        if feedback:
            residual = old[start : start + size]
            for j in range(size):
                x[j] += residual[j]
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
            ranges[index, :] = np.float32(np.nan)
            written[:] = 0
            if feedback:
                left[:] = x[:size]
            continue
        ranges[index, 0] = low
        ranges[index, 1] = high
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
def decode_add_min_max(ranges, codes, into, block):  # type: ignore[no-untyped-def]
    """into += low + code * step."""
    real = into.dtype.type
    for index in range(ranges.shape[0]):
        start = index * block
        base, high = real(ranges[index, 0]), real(ranges[index, 1])
        step = high / real(255) - base / real(255)
        step = real(0) if step <= real(2.0**-100) else step
        part, read = into[start : start + block], codes[start : start + block]
        for j in range(part.size):
            part[j] += base + real(np.int32(read[j])) * step


@inline
def _mean_abs(x, size, lanes):  # type: ignore[no-untyped-def]
    """Return sum |x| / size as float32, accumulated in 16 lanes that are added up in a tree."""
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
def encode_signs(values, old, new, scales, bits, block):  # type: ignore[no-untyped-def]
    """Write signs and one scale per block, and the residual of what was not sent.

    x = values + old; scales = mean |x| of each block; bits = signs; new = x - its decoded value. `old` and `new` of
    size 0: no error feedback.
    """
    n = values.size
    feedback = old.size > 0
    x = np.empty(block, values.dtype)
    lanes = np.empty(16, values.dtype)
    for index in range(scales.size):
        start = index * block
        size = min(block, n - start)
        inputs = values[start : start + size]
        for j in range(size):
            x[j] = inputs[j]
        if feedback:
            residual = old[start : start + size]
            for j in range(size):
                x[j] += residual[j]
        scale = _mean_abs(x, size, lanes)
        scales[index] = scale
        s = values.dtype.type(scale)
        if feedback:
            left = new[start : start + size]
            for j in range(size):
                left[j] = x[j] - (-s if x[j] < 0 else s)
        x[size : min(size + 7, block)] = 0  # padding must not set sign bits
        written = bits[start // 8 : start // 8 + (size + 7) // 8]
        for byte in range(written.size):
            code = np.uint8(0)
            for bit in range(8):
                code |= np.uint8(x[byte * 8 + bit] < 0) << np.uint8(bit)
            written[byte] = code


@kernel
def decode_add_signs(scales, bits, into, block):  # type: ignore[no-untyped-def]
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


@kernel
def collect_above(  # type: ignore[no-untyped-def]
    values, old, new, momentum, old_momentum, new_momentum, threshold, above, equal, x, bits_of_x, magnitude
):
    """Add residuals to values, and collect the positions of the largest sums.

    new = old + values, or old + u with u = momentum old_momentum + values if `old_momentum` is not empty. Places whose
    magnitude (as an integer) is above `threshold` go into `above`, and the first of those equal to it into `equal`.

    Returns how many positions went into each; (-1, ...) if `above` is too small.
    """
    n, block = values.size, x.size
    corrected = old_momentum.size > 0
    over, same = 0, 0
    for start in range(0, n, block):
        size = min(block, n - start)
        inputs, residual, left = values[start : start + size], old[start : start + size], new[start : start + size]
        if corrected:
            momentum_before, momentum_after = old_momentum[start : start + size], new_momentum[start : start + size]
            for j in range(size):
                x[j] = momentum * momentum_before[j] + inputs[j]
            for j in range(size):
                momentum_after[j] = x[j]
                x[j] = residual[j] + x[j]
        else:
            for j in range(size):
                x[j] = residual[j] + inputs[j]
        for j in range(size):
            left[j] = x[j]
        if over + size > above.size:
            return -1, same
        for group in range(0, size, 32):
            stop = min(group + 32, size)
            top = bits_of_x[group] & magnitude
            for j in range(group, stop):
                key = bits_of_x[j] & magnitude
                top = key if key > top else top
            if top < threshold:
                continue
            for j in range(group, stop):
                key = bits_of_x[j] & magnitude
                above[over] = start + j
                over += key > threshold
                if key == threshold and same < equal.size:
                    equal[same] = start + j
                    same += 1
    return over, same


@kernel
def take_values(positions, residual, momentum, indices, message_values):  # type: ignore[no-untyped-def]
    """Move the values of `residual` at the ordered `positions` into the message; the rounding error to float32 stays.

    `momentum`, if it is not empty, becomes 0 at these positions.
    """
    for j in range(positions.size):
        position = positions[j]
        value = np.float32(residual[position])
        indices[j] = position
        message_values[j] = value
        residual[position] -= residual.dtype.type(value)
        if momentum.size > 0:
            momentum[position] = 0


@kernel
def decode_add_pairs(indices, message_values, into):  # type: ignore[no-untyped-def]
    """into[index] += value, one after another, so that an index that occurs twice is added twice."""
    for j in range(indices.size):
        into[indices[j]] += into.dtype.type(message_values[j])


@inline
def _bound(keys, size, keep):  # type: ignore[no-untyped-def]
    """Return a key that at least `keep` of the first `size` keys reach.

    It is the `keep`-th largest of the maxima of groups of 16 keys.
    """
    groups = (size + 15) // 16
    if groups < keep:
        return keys.dtype.type(0)
    tops = np.empty(groups, keys.dtype)
    for group in range(groups):
        top = keys[group * 16]
        for lane in range(16):
            key = keys[group * 16 + lane]
            top = key if key > top else top
        tops[group] = top
    tops.sort()
    return tops[groups - keep]


@inline
def _choose(keys, size, keep, near, chosen):  # type: ignore[no-untyped-def]
    """Choose the `keep` largest keys.

    Candidates' positions go into `near`, in rising order, and `chosen` marks those that are among the largest. Returns
    the number of candidates and the position of the largest key.
    """
    bound = _bound(keys, size, keep)
    count, largest = 0, 0
    for j in range(size):
        near[count] = j
        count += keys[j] >= bound
    chosen[:count] = False
    for turn in range(min(keep, size)):
        best = -1
        for c in range(count):
            if not chosen[c] and (best < 0 or keys[near[c]] > keys[near[best]]):
                best = c
        chosen[best] = True
        if turn == 0:
            largest = near[best]
    return count, largest


@kernel
def encode_buckets(  # type: ignore[no-untyped-def]
    values, old, new, scales, indices, packed, block, keep, x, bits_of_x, infinity, magnitude
):
    """Write each bucket's `keep` largest values in 4 bits, and the residual of what was not sent.

    x = values + old; code = sign and 3-bit level relative to the bucket's largest magnitude; new = x - what is sent.

    `indices`: `keep` positions per bucket in rising order. A bucket shorter than `keep` is padded with position 0 and
    code 0.
    """
    n = values.size
    real = values.dtype.type
    keys = np.zeros(block, bits_of_x.dtype)
    near = np.empty(block, np.int64)
    chosen = np.empty(block, np.bool_)
    codes = np.empty(keep + keep % 2, np.uint8)
    for index in range(scales.size):
        start = index * block
        size = min(block, n - start)
        inputs, residual, left = values[start : start + size], old[start : start + size], new[start : start + size]
        for j in range(size):
            x[j] = inputs[j] + residual[j]
        for j in range(size):
            left[j] = x[j]
            keys[j] = bits_of_x[j] & magnitude
        keys[size:] = 0
        count, best = _choose(keys, size, keep, near, chosen)
        largest = keys[best]
        scale = np.float32(abs(x[best]))
        if largest >= infinity or not np.isfinite(scale):
            scale = np.float32(np.nan)
        elif scale < np.float32(2.0**-100):
            scale = np.float32(0)
        scales[index] = scale
        usable = scale > 0
        unit = real(scale) / real(7) if usable else real(0)
        inverse = real(7) / real(scale) if usable else real(0)
        codes[:] = 0
        slot = 0
        for c in range(count):
            if chosen[c]:
                j = near[c]
                indices[index * keep + slot] = j
                if usable:
                    level = abs(x[j]) * inverse + real(0.5)
                    level = np.floor(level if level < real(7) else real(7))
                    negative = x[j] < 0
                    codes[slot] = np.uint8(np.int32(level)) | (np.uint8(negative) << np.uint8(3))
                    left[j] = x[j] - (-(level * unit) if negative else level * unit)
                slot += 1
        for j in range(slot, keep):
            indices[index * keep + j] = 0
        for j in range(codes.size // 2):
            packed[index * (codes.size // 2) + j] = codes[2 * j] | codes[2 * j + 1] << 4


@kernel
def decode_add_buckets(scales, indices, packed, into, block, keep):  # type: ignore[no-untyped-def]
    """into += the decoded values."""
    real = into.dtype.type
    for index in range(scales.size):
        start = index * block
        unit = real(scales[index]) / real(7)
        for j in range(keep):
            code = packed[index * ((keep + 1) // 2) + j // 2] >> (4 * (j % 2)) & 15
            level = real(np.int32(code & 7)) * unit
            into[start + indices[index * keep + j]] += -level if code > 7 else level
