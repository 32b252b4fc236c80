"""What is said of plans that compress: the plan with exact sums is verified, the rest is measured and told."""

import pytest

from verify.running import verdict_on


def distances(note: str, after: str) -> tuple[float, float]:
    """The smallest and the largest distance that a note tells after these words."""
    low, _, high = note.rpartition(after)[2].partition(" of their")[0].partition(" to ")
    return float(low), float(high or low)


@pytest.mark.parametrize(("words", "near", "far"), [("one-bit", 0.1, 10.0), ("bfloat16", 1e-4, 1e-2)])
def test_the_exact_part_passes_and_the_distance_is_told(words: str, near: float, far: float) -> None:
    verdict = verdict_on("correct/mlp.py", world_size=2, steps=3, compress=words)
    assert verdict.passed, verdict.sentence
    assert "with exact reductions" in verdict.sentence
    note = verdict.notes[-1]
    assert f"({words})" in note
    assert "all ranks have the same bits" in note
    low, high = distances(note, "one device's by ")
    assert near < low <= high < far
    assert "Not proved" in note


@pytest.mark.long
@pytest.mark.parametrize("method", ["byte-adam", "zero-one-adam"])
def test_momenta_are_seen_from_the_second_step_on(method: str) -> None:
    """And 0/1 Adam where its second moment does not learn."""
    verdict = verdict_on("correct/mlp.py", world_size=2, steps=3, compress=f"{method},freeze_step=100")
    assert verdict.passed, verdict.sentence
    note = verdict.notes[-1]
    assert f"({method},freeze_step=100)" in note
    assert "over the 2 steps after it" in note
    assert "all ranks have the same bits" in note
    if method == "byte-adam":
        low, high = distances(note, "one device's by ")
        assert 1e-4 < low <= high < 1


@pytest.mark.long
def test_sufficient_factors_are_compared_like_exact_sums() -> None:
    verdict = verdict_on("factors/wide.py", world_size=2, steps=3, compress="factors")
    assert verdict.passed, verdict.sentence
    assert "with exact reductions" not in verdict.sentence
    assert not any("compressed" in note for note in verdict.notes)


def test_what_is_wrong_of_the_exact_part_is_found_all_the_same() -> None:
    verdict = verdict_on("broken/mean_over_ranks.py", compress="one-bit")
    assert not verdict.passed
    assert verdict.cause is not None
