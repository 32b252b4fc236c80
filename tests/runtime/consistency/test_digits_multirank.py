"""Handwritten digits with the modes that the planner may choose, at their longest periods: what it counts them with
(plan.ways) stands on this."""

import pytest

from harness import preload, run_ranks
from runtime.digits import Reached, reach
from tutti.plan.ways import WAYS

preload("sklearn.datasets")

LONGEST = {way.mode: way for way in sorted(WAYS, key=lambda way: way.relaxed.period or 1) if way.mode != "synchronous"}
"""By mode: the way with the longest period."""


def reach_with(modes: list[str]) -> dict[str, Reached]:
    """What is reached in every mode."""
    return {mode: reach(mode, plan_of=LONGEST[mode].of) for mode in modes}  # type: ignore[index]


@pytest.mark.timeout(600)
@pytest.mark.long
def test_digits_are_learnt_in_every_mode_that_may_be_chosen() -> None:
    for found in run_ranks(reach_with, 4, list(LONGEST), timeout_s=590):
        for mode, one in found.items():
            assert one.accuracy >= 0.97, f"{mode}: {one}"
            assert one.last <= 0.05, f"{mode}: {one}"
