"""The measuring itself: every tensor compared goes through here, and the largest tolerated difference is kept."""

import math
from collections.abc import Mapping

from tutti.config.verdict import Stage, TensorDifference


class Gauge:
    """Judges differences by one tolerance. `compared`: how many; `largest`: the largest tolerated one.

    `floor`: what a tensor is measured against at least, as part of its kind's root mean square (measure.FLOOR).
    """

    def __init__(self, tolerance: float, floor: float) -> None:
        self.tolerance = tolerance
        self.floor = floor
        self.compared = 0
        self.largest: TensorDifference | None = None
        self.skipped: dict[str, None] = {}

    def judge(
        self,
        gaps: Mapping[int, float] | Mapping[int | None, float],
        *,
        stage: Stage,
        step: int,
        module: str = "",
        tensor: str,
    ) -> TensorDifference | None:
        """The difference of one tensor if a gap exceeds the tolerance, else None. `gaps`: by rank (None: all together);
        `step` counts from 0, -1 before the first."""
        self.compared += 1
        gap = max(gaps.values(), default=0.0)
        found = TensorDifference(
            stage=stage,
            step=step + 1,
            module=module,
            tensor=tensor,
            relative_difference=gap if math.isfinite(gap) else None,
            ranks=tuple(rank for rank, one in gaps.items() if rank is not None and one > self.tolerance),
        )
        if gap > self.tolerance:
            return found
        if self.largest is None or gap > (self.largest.relative_difference or 0.0):
            self.largest = found
        return None

    def skip(self, what: str) -> None:
        """Remember that something could not be compared."""
        self.skipped[what] = None
