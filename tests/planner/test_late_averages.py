"""How many samples are counted for averages that are applied later, or encoded in few bits."""

import pytest

from tutti.config.sync_notation import parse_sync
from tutti.planner.relaxed_strategies import RELAXED_STRATEGIES, Each

BY_WORDS = {strategy.words: strategy for strategy in RELAXED_STRATEGIES}


@pytest.mark.parametrize(
    ("words", "each"),
    [
        ("local:period=8", Each(0.01, 0.1)),
        ("local:period=8,delay=1", Each(0.015, 0.1)),
        ("local:period=8,delay=2", Each(0.015, 0.1)),
        ("local:period=4,delay=2", Each(0.05, 0.15)),
        ("local:period=8,delay=4", Each(0.05, 0.15)),
        ("local:period=8,delay=8", Each(0.14, 0.3)),
        ("post-local:period=8,after=4", Each(0.01, 0.085)),
        ("local:period=8,optimizer_state=corrected", Each(others=0.025)),
        ("local:period=8,optimizer_state=corrected,delay=2", Each(others=0.035)),
        ("local:period=8,optimizer_state=corrected,delay=4", Each(others=0.055)),
        ("post-local:period=8,after=4,optimizer_state=corrected", Each(others=0.02)),
    ],
)
def test_the_later_averages_are_taken_in_the_more_samples_count(words: str, each: Each) -> None:
    assert BY_WORDS[words].each == each
    assert BY_WORDS[words].relaxed.stated() == parse_sync(words).relaxed.stated()


def test_changes_in_two_bits_count_for_a_little_more_and_are_no_code_of_gradients() -> None:
    counted = {bits: BY_WORDS[f"local:period=8,delay=2 in qsgd,bits={bits}"].samples for bits in (8, 4, 2)}
    assert counted == {8: 1.0, 4: 1.0, 2: 1.02}
    two = [strategy for strategy in RELAXED_STRATEGIES if strategy.compress is not None and strategy.compress.bits == 2]
    assert {strategy.mode for strategy in two} == {"local"}
