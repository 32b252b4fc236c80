"""In which order parts of a sum begin and are waited for."""

from typing import Any

import pytest

from tutti.runtime.consistency.travel import InTurns


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
    InTurns(parts, turns, 1).land()
    assert " ".join(said) == order
