"""In which order parts of a sum begin and are waited for."""

from typing import Any

import pytest

from tutti.local_sgd.delayed_reduction import ReductionInRounds


class Part:
    """A leg of some rounds that says when it is asked for the next."""

    def __init__(self, name: str, rounds: int, said: list[str]) -> None:
        self.name, self.left, self.said = name, rounds, said

    def next(self) -> bool:
        self.said.append(f"{self.name}{self.left}")
        self.left -= 1
        return self.left >= 0


@pytest.mark.parametrize(
    ("turns", "order"),
    [
        (1, "a1 b1 a0 c1 b0 c0"),
        (2, "a2 b2 a1 c2 a0 b1 b0 c1 c0"),
    ],
)
def test_a_part_begins_before_those_on_their_way_are_waited_for(turns: int, order: str) -> None:
    """What is sent travels while another is read. The number is of rounds that are left; 0: the last is waited for."""
    said: list[str] = []
    parts: Any = [Part(name, turns, said) for name in "abc"]
    ReductionInRounds(parts, turns, 1).finish()
    assert " ".join(said) == order


@pytest.mark.parametrize(
    ("parts", "updates", "order"),
    [
        ("a", 1, ["a2 a1", "a0"]),  # both in the only one
        ("a", 2, ["a2", "a1", "a0"]),
        ("a", 3, ["a2", "a1", "", "a0"]),
        ("ab", 4, ["a2", "b2 a1", "a0 b1", "", "b0"]),
        ("abcdef", 8, ["a2", "b2 a1", "c2 a0 b1", "d2 b0 c1", "e2 c0 d1", "f2 d0 e1", "e0 f1", "", "f0"]),
    ],
)
def test_turns_are_at_even_distances_of_updates(parts: str, updates: int, order: list[str]) -> None:
    """A round has an update's time before it is waited for. The last entry: when the sums are taken in."""
    said: list[str] = []
    legs: Any = [Part(name, 2, said) for name in parts]
    travel = ReductionInRounds(legs, 2, updates)
    found = []
    for update in range(1, updates + 1):
        travel.advance(update)
        found.append(" ".join(said))
        said.clear()
    travel.finish()
    assert [*found, " ".join(said)] == order
