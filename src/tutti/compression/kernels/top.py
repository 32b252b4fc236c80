"""Kernels of sparse codes: the largest values and their places."""

import numpy as np

from tutti.compression.kernels.build import inline, kernel


@kernel
def collect(  # type: ignore[no-untyped-def]
    values, old, new, momentum, old_momentum, new_momentum, threshold, above, equal, x, bits_of_x, magnitude
):
    """new = old + values, or old + u with u = momentum old_momentum + values where that has a size.

    Puts the places whose magnitude (as a whole number) is above `threshold` into `above`, and the first of those that
    are equal to it into `equal`. Returns how many of both; -1 where `above` is too small.
    """
    n, block = values.size, x.size
    corrected = old_momentum.size > 0
    over, same = 0, 0
    for start in range(0, n, block):
        size = min(block, n - start)
        mine, kept, left = values[start : start + size], old[start : start + size], new[start : start + size]
        if corrected:
            went, goes = old_momentum[start : start + size], new_momentum[start : start + size]
            for j in range(size):
                x[j] = momentum * went[j] + mine[j]
            for j in range(size):
                goes[j] = x[j]
                x[j] = kept[j] + x[j]
        else:
            for j in range(size):
                x[j] = kept[j] + mine[j]
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
def take(places, kept, momentum, indices, found):  # type: ignore[no-untyped-def]
    """Write the values of `kept` at `places` (in order) out, and leave there what rounding took away.

    `momentum`, where it has a size, is 0 there from now on.
    """
    for j in range(places.size):
        place = places[j]
        value = np.float32(kept[place])
        indices[j] = place
        found[j] = value
        kept[place] -= kept.dtype.type(value)
        if momentum.size > 0:
            momentum[place] = 0


@kernel
def decode_add(indices, found, into):  # type: ignore[no-untyped-def]
    """into[index] += value, one after another: an index that comes twice adds twice."""
    for j in range(indices.size):
        into[indices[j]] += into.dtype.type(found[j])


@inline
def _bound(keys, size, keep):  # type: ignore[no-untyped-def]
    """A key that at least `keep` of the first `size` keys reach: that of the `keep`-th largest of group maxima."""
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
    """Mark the `keep` largest keys in `chosen`, beside their places in `near`; (how many are near, the largest's)."""
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
    """x = values + old; of each bucket the `keep` largest, as 4-bit sign and level of the largest; new = x - sent.

    `indices`: `keep` places a bucket in rising order; behind the last one of a short bucket, 0 with the code 0.
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
        mine, kept, left = values[start : start + size], old[start : start + size], new[start : start + size]
        for j in range(size):
            x[j] = mine[j] + kept[j]
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
        place = 0
        for c in range(count):
            if chosen[c]:
                j = near[c]
                indices[index * keep + place] = j
                if usable:
                    level = abs(x[j]) * inverse + real(0.5)
                    level = np.floor(level if level < real(7) else real(7))
                    negative = x[j] < 0
                    codes[place] = np.uint8(np.int32(level)) | (np.uint8(negative) << np.uint8(3))
                    left[j] = x[j] - (-(level * unit) if negative else level * unit)
                place += 1
        for j in range(place, keep):
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
