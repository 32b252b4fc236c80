"""Measure how much tensors differ, and judge it by a tolerance."""

import math
from collections.abc import Iterable, Mapping

import torch

from tutti.config.verdict import Stage, TensorDifference
from tutti.verification.alignment import Alignment

TOLERANCE = {"float64": 1e-8, "float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
"""Largest difference that counts as rounding, by the least precise dtype of the computation.

Differences are those of an element over the tensor's root mean square. Rounding is about 1e-16, 1e-7, 1e-3 and 8e-3 per
operation, times what long sums and cancellation add. Bugs of distribution differ by 1e-3 to 1, which float64 clearly
distinguishes from rounding.
"""

ASKED_TOLERANCE = {"tf32": 0.1, "float16": 0.15, "bfloat16": 0.5}
"""The same for a precision that is asked for, where float64 agrees already.

What belongs to the precision itself, such as a loss scale that is not undone, changes whole tensors by a factor.
Rounding differs most in the largest of millions of elements: by 0.05 in a bfloat16 transformer of 8 layers, more in
deeper ones.
"""

FLOOR = {"float64": 1e-2, "float32": 1e-2, "float16": 0.3, "bfloat16": 0.3}
"""A tensor is compared against at least this fraction of the root mean square of its kind.

Gradients that are zero up to rounding (a bias before a normalisation) would otherwise differ by any amount.
"""


def rms(tensors: Iterable[torch.Tensor]) -> float:
    """Return the root mean square over all finite elements of the tensors; 0 for none."""
    total, count = 0.0, 0
    for tensor in tensors:
        values = _comparable(tensor)
        values = values[torch.isfinite(values)]
        total += float((values * values).sum())
        count += values.numel()
    return math.sqrt(total / count) if count else 0.0


def difference(expected: torch.Tensor, got: torch.Tensor, scale: float) -> float:
    """Return the largest |expected - got| / scale over all elements; infinite if shapes or non-finite values differ.

    Args:
        expected: one device's values.
        got: the ranks' values.
        scale: the size that differences are relative to.
    """
    if expected.shape != got.shape:
        return math.inf
    expected_values, got_values = _comparable(expected), _comparable(got)
    same = (expected_values == got_values) | (torch.isnan(expected_values) & torch.isnan(got_values))
    gap = torch.where(same, 0.0, (expected_values - got_values).abs())
    largest = float(gap.max()) if gap.numel() else 0.0
    if math.isnan(largest):
        return math.inf
    return largest / scale if scale > 0 else (math.inf if largest > 0 else 0.0)


def alignment_difference(alignment: Alignment, scale: float) -> float:
    """Return the largest difference among an alignment's pairs, relative to `scale`."""
    return max((difference(pair.expected, pair.got, scale) for pair in alignment), default=0.0)


def number_difference(expected: float, got: float, floor: float = 0.0) -> float:
    """Return the difference of two numbers relative to the first, or to `floor` if that is larger."""
    if expected == got or (math.isnan(expected) and math.isnan(got)):
        return 0.0
    gap = abs(expected - got) / max(abs(expected), floor, 1e-30)
    return gap if math.isfinite(gap) else math.inf


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().double()


class ToleranceChecker:
    """Judges differences by one tolerance, and counts them.

    Args:
        tolerance: largest relative difference that is accepted.
        floor: smallest scale of a tensor, as a fraction of the root mean square of its kind (FLOOR).

    Attributes:
        compared: number of comparisons.
        largest: the largest accepted difference.
        skipped: what could not be compared.
        grouped: tensors of batches that could not be compared because they depend on which samples are collated
            together, although the samples are equal.
    """

    def __init__(self, tolerance: float, floor: float) -> None:
        self.tolerance = tolerance
        self.floor = floor
        self.compared = 0
        self.largest: TensorDifference | None = None
        self.skipped: dict[str, None] = {}
        self.grouped: dict[str, None] = {}

    def judge(
        self,
        gaps: Mapping[int, float] | Mapping[int | None, float],
        *,
        stage: Stage,
        step: int,
        module: str = "",
        tensor: str,
    ) -> TensorDifference | None:
        """Judge one tensor.

        Args:
            gaps: relative difference by rank; the key None stands for all ranks together.
            stage: the stage of the step.
            step: counted from 0; -1 before the first.
            module: dotted name.
            tensor: name of the tensor.

        Returns:
            The difference if it exceeds the tolerance, else None.
        """
        self.compared += 1
        gap = max(gaps.values(), default=0.0)
        tensor_difference = TensorDifference(
            stage=stage,
            step=step + 1,
            module=module,
            tensor=tensor,
            relative_difference=gap if math.isfinite(gap) else None,
            ranks=tuple(rank for rank, rank_gap in gaps.items() if rank is not None and rank_gap > self.tolerance),
        )
        if gap > self.tolerance:
            return tensor_difference
        if self.largest is None or gap > (self.largest.relative_difference or 0.0):
            self.largest = tensor_difference
        return None

    def skip(self, what: str) -> None:
        """Record that something could not be compared."""
        self.skipped[what] = None

    def skip_grouped(self, name: str) -> None:
        """Record that a tensor of the batch could not be compared, but the samples before collate_fn are equal."""
        self.grouped[name] = None
