"""How far tensors are apart, and how far they may be."""

import math
from collections.abc import Iterable

import torch

from tutti.verify.align import Alignment

TOLERANCE = {"float64": 1e-8, "float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
"""Largest difference of an element over the tensor's root mean square that is taken for rounding, by the least precise
dtype computed in. Rounding: about 1e-16, 1e-7, 1e-3 and 8e-3 an operation, times what long sums and cancellation add.
Bugs of distribution differ by 1e-3 to 1, which float64 tells apart from rounding without doubt."""

FLOOR = {"float64": 1e-2, "float32": 1e-2, "float16": 0.3, "bfloat16": 0.3}
"""A tensor is not measured against less than this part of its kind's root mean square: gradients that are zero but
for rounding (a bias before a normalisation) would else differ by any amount."""


def rms(tensors: Iterable[torch.Tensor]) -> float:
    """Root mean square over all finite elements of some tensors; 0 for none."""
    total, count = 0.0, 0
    for tensor in tensors:
        values = _comparable(tensor)
        values = values[torch.isfinite(values)]
        total += float((values * values).sum())
        count += values.numel()
    return math.sqrt(total / count) if count else 0.0


def difference(expected: torch.Tensor, got: torch.Tensor, scale: float) -> float:
    """Largest |expected - got| / scale over all elements; infinite where shapes or non-finite values differ."""
    if expected.shape != got.shape:
        return math.inf
    one, two = _comparable(expected), _comparable(got)
    same = (one == two) | (torch.isnan(one) & torch.isnan(two))
    gap = torch.where(same, 0.0, (one - two).abs())
    largest = float(gap.max()) if gap.numel() else 0.0
    if math.isnan(largest):
        return math.inf
    return largest / scale if scale > 0 else (math.inf if largest > 0 else 0.0)


def alignment_difference(alignment: Alignment, scale: float) -> float:
    """The largest difference of an alignment's pairs."""
    return max((difference(pair.expected, pair.got, scale) for pair in alignment), default=0.0)


def number_difference(expected: float, got: float) -> float:
    """Relative difference of two numbers."""
    if expected == got or (math.isnan(expected) and math.isnan(got)):
        return 0.0
    gap = abs(expected - got) / max(abs(expected), 1e-30)
    return gap if math.isfinite(gap) else math.inf


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().double()
