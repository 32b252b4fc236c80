"""Numbers of nodes and ranks on command lines: one number, or a range of which a run takes as many as there are."""

from collections.abc import Sequence
from dataclasses import dataclass

from tutti.errors import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRange:
    """A range of ranks per node, or of nodes."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def node_counts(value: int | str | CountRange | None) -> int | CountRange | None:
    """Return the number of nodes of 4 or "4", and the range of "1:4"; None for None.

    Raises:
        LaunchError: it is something else.

    Examples:
        >>> node_counts("1:4")
        CountRange(least=1, most=4)
    """
    if value is None or isinstance(value, CountRange):
        return value
    if isinstance(value, str) and ":" in value:
        return _range(value)
    try:
        count = int(value)
    except (ValueError, TypeError):
        count = 0
    if count < 1 or isinstance(value, (bool, float)):
        raise LaunchError(f"{value!r} is no number of nodes; give such as 4, or 1:4 for 1 to 4")
    return count


def rank_counts(value: int | str | Sequence[int] | CountRange | None) -> tuple[int, ...] | CountRange | None:
    """Return the ranks per node of 4, "4", "2,1" or (2, 1), and the range of "2:8"; None for None.

    Raises:
        LaunchError: it is something else.
    """
    if value is None or isinstance(value, CountRange):
        return value
    if isinstance(value, str) and ":" in value:
        return _range(value)
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else list(value)
    try:
        counts = tuple(int(part) for part in parts)
    except (ValueError, TypeError):
        raise LaunchError(f"{value!r} is not a number; give ranks per node, such as 4, or 2,1, or 2:8") from None
    if not counts or min(counts) < 1:
        raise LaunchError(f"{value}: every node needs 1 rank or more")
    return counts


def _range(text: str) -> CountRange:
    parts = text.split(":")
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in parts]
    if len(numbers) != 2 or min(numbers) < 1 or numbers[0] > numbers[1]:
        raise LaunchError(f"{text!r} is no range; give two numbers of 1 or more, the smaller one first, such as 1:4")
    return CountRange(least=numbers[0], most=numbers[1])
