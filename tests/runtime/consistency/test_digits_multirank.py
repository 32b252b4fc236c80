"""Handwritten digits with the modes that the planner may choose, at their longest periods: what it counts them with
(plan.ways) stands on this."""

import pytest

from harness import preload, run_ranks
from runtime.digits import Reached, reach
from tutti.plan.ways import WAYS

preload("sklearn.datasets")

APART = sorted((way for way in WAYS if way.mode != "synchronous"), key=lambda way: way.relaxed.period or 1)

LONGEST = {way.words: way for way in {(way.mode, way.compress, bool(way.relaxed.delay)): way for way in APART}.values()}
"""By its words: of each mode and code, waited for or delayed, the way with the longest period."""


def reach_with(ways: list[str]) -> dict[str, Reached]:
    """What is reached in every way."""
    return {words: reach(words, plan_of=LONGEST[words].of) for words in ways}


@pytest.mark.timeout(600)
@pytest.mark.long
def test_digits_are_learnt_in_every_mode_that_may_be_chosen() -> None:
    for found in run_ranks(reach_with, 4, list(LONGEST), timeout_s=590):
        for way, one in found.items():
            assert one.accuracy >= 0.97, f"{way}: {one}"
            assert one.last <= 0.05, f"{way}: {one}"
