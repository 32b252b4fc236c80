"""What is said of plans that compress: the plan with exact sums is verified, the rest is measured and told."""

import pytest

from verify.running import verdict_on


@pytest.mark.parametrize(("words", "near", "far"), [("one-bit", 0.1, 10.0), ("bfloat16", 1e-4, 1e-2)])
def test_the_exact_part_passes_and_the_distance_is_told(words: str, near: float, far: float) -> None:
    verdict = verdict_on("correct/mlp.py", world_size=2, steps=3, compress=words)
    assert verdict.passed, verdict.sentence
    assert "where sums are exact" in verdict.sentence
    note = verdict.notes[-1]
    assert f"({words})" in note
    assert "all ranks have the same bits" in note
    low, _, high = note.rpartition("gradients are ")[2].partition(" of their")[0].partition(" to ")
    assert near < float(low) <= float(high or low) < far
    assert "Not proved" in note


@pytest.mark.long
def test_momenta_are_seen_from_the_second_step_on() -> None:
    verdict = verdict_on("correct/mlp.py", world_size=2, steps=3, compress="byte-adam,freeze_step=100")
    assert verdict.passed, verdict.sentence
    note = verdict.notes[-1]
    assert "(byte-adam,freeze_step=100)" in note
    assert "over the 2 steps after it" in note
    assert "all ranks have the same bits" in note
    low, _, high = note.rpartition("stand for are ")[2].partition(" of their")[0].partition(" to ")
    assert 1e-4 < float(low) <= float(high or low) < 1


@pytest.mark.long
def test_zero_one_adam_is_seen_where_its_second_moment_does_not_learn() -> None:
    verdict = verdict_on("correct/mlp.py", world_size=2, steps=3, compress="zero-one-adam,freeze_step=100")
    assert verdict.passed, verdict.sentence
    note = verdict.notes[-1]
    assert "(zero-one-adam,freeze_step=100)" in note
    assert "over the 2 steps after it" in note
    assert "all ranks have the same bits" in note


@pytest.mark.long
def test_sufficient_factors_are_compared_like_exact_sums() -> None:
    verdict = verdict_on("factors/wide.py", world_size=2, steps=3, compress="factors")
    assert verdict.passed, verdict.sentence
    assert "where sums are exact" not in verdict.sentence
    assert not any("compressed" in note for note in verdict.notes)


def test_what_is_wrong_of_the_exact_part_is_found_all_the_same() -> None:
    verdict = verdict_on("broken/mean_over_ranks.py", compress="one-bit")
    assert not verdict.passed
    assert verdict.cause is not None
