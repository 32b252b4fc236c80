"""Sums of gradients that a plan compresses: bytes by the formula, time on the wire and in the kernels.

A ModelSpec knows bytes of gradients by module and no shapes: powersgd takes each module's for one square matrix, which
is the least that its thin matrices can be.
"""

import math
from collections.abc import Iterable
from typing import Final

from tutti.predict.compute import Array
from tutti.predict.groups import Group
from tutti.predict.overlap import Bucket
from tutti.spec.cluster import DeviceKind
from tutti.spec.compression import bucket_sent_nbytes
from tutti.spec.plan import Plan
from tutti.spec.words import AxisName

VALUE_NBYTES: Final = 4
"""Bytes of a gradient's value: models in other dtypes are rare, and their plans rarer."""

KERNEL_S_PER_VALUE: Final[dict[DeviceKind, float]] = {"cpu": 8e-9, "cuda": 1.5e-10}
"""Seconds to encode, add up, encode again and decode a value. Assumed: one-bit with error feedback was timed at 3.5 to
4.1 ns and decoding at 1.4 to 2.2 on one CPU core, the other methods not; CUDA from memory passes."""

_EXACT: Final[tuple[AxisName, ...]] = ("split", "stage")
"""Sums over these axes are exact (runtime.compressed)."""


def ratio(plan: Plan, group: Group, axes: tuple[AxisName, ...], nbytes: Array) -> float:
    """Bytes sent over those of a ring's exact sum, for gradients of `nbytes` by module; 1 where sums are exact."""
    how, total = plan.sync.compress, float(nbytes.sum())
    if how is None or any(plan.degree(axis) > 1 for axis in axes if axis in _EXACT) or group.ranks == 1 or not total:
        return 1.0
    numels = [math.ceil(one / VALUE_NBYTES) for one in nbytes.tolist() if one > 0]
    if how.method == "powersgd":
        shapes = [(math.isqrt(numel), math.isqrt(numel)) for numel in numels]
    else:
        shapes = [(numel,) for numel in numels]  # type: ignore[misc]
    exact = 2 * (group.ranks - 1) / group.ranks * total
    return bucket_sent_nbytes(how, shapes, group.ranks, VALUE_NBYTES) / exact


def kernel_s(plan: Plan, kind: DeviceKind, written: float, nbytes: float) -> float:
    """Seconds in the kernels for a bucket of `nbytes`; 0 where its `ratio`, `written`, is that of an exact sum."""
    if plan.sync.compress is None or written == 1.0:
        return 0.0
    return KERNEL_S_PER_VALUE[kind] * nbytes / VALUE_NBYTES


def kept_nbytes(plan: Plan, fused: Iterable[Bucket]) -> float:
    """What is kept back between steps, for buckets that are summed: twice, so that a step may be taken back."""
    how = plan.sync.compress
    if how is None or not how.keeps:
        return 0.0
    tensors = 2 if how.method == "dgc" else 1
    return 2 * tensors * sum(bucket.nbytes for bucket in fused)
