"""The runs of an array: `tutti submit --array 'lr=0.1,0.01 seed=0-3' train.py --lr {lr} --seed {seed}`."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.errors import LaunchError

MOST_RUNS = 1000
"""The most runs of one array, as many as schedulers take without being configured for more."""

INDEX = "index"
"""What the number of a run is called in words, and the only name where an array is numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRun:
    """One run of an array.

    Attributes:
        number: its own.
        values: what the names in braces stand for.
    """

    number: int
    values: dict[str, str]

    @property
    def title(self) -> str:
        """Its values as text, such as "lr=0.1 seed=2"."""
        return " ".join(f"{name}={value}" for name, value in self.values.items())

    def words(self, words: Sequence[str]) -> list[str]:
        """Return words with the values in the place of names in braces; other braces stay."""
        known = {INDEX: str(self.number), **self.values}
        pattern = re.compile(r"\{(" + "|".join(map(re.escape, known)) + r")\}")
        return [pattern.sub(lambda match: known[match.group(1)], word) for word in words]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArray:
    """The runs of an array, and how many of them may run at once; None for all."""

    runs: tuple[ArrayRun, ...]
    at_once: int | None = None


def parse_array(text: str, words: Sequence[str]) -> RunArray:
    """Return the runs of --array.

    Args:
        text: numbers such as "0-7" or "1,4", or names with values, such as "lr=0.1,0.01 seed=0-3", all combinations of
            which run. "%2" at the end lets two run at once.
        words: the arguments in which the names stand in braces.

    Raises:
        LaunchError: it is something else, has too many runs, or a name stands in no word.

    Examples:
        >>> [run.title for run in parse_array("lr=0.1,0.01 seed=0-1", ["{lr}{seed}"]).runs]
        ['lr=0.1 seed=0', 'lr=0.1 seed=1', 'lr=0.01 seed=0', 'lr=0.01 seed=1']
    """
    listed, percent, limit = (
        text.strip().rpartition("%") if re.search(r"%\d+$", text.strip()) else (text.strip(), "", "")
    )
    at_once = int(limit) if percent else None
    if at_once == 0 or not listed.strip():
        raise LaunchError(f"--array {text}: nothing would run; write such as 0-7 or 'lr=0.1,0.01 seed=0-3'")
    if "=" not in listed:
        return RunArray(runs=_numbered(text, listed), at_once=at_once)
    names: dict[str, list[str]] = {}
    for part in listed.split():
        name, equals, values = part.partition("=")
        if not equals or not name.isidentifier() or name == INDEX or name in names or not all(values.split(",")):
            raise LaunchError(
                f"--array {text}: {part!r} is no name with values, or names one twice; write such as 'lr=0.1,0.01 "
                "seed=0-3'"
            )
        if not any(f"{{{name}}}" in word for word in words):
            raise LaunchError(f"--array {text}: no argument has {{{name}}}, so its values would change nothing; add it")
        names[name] = [value for each in values.split(",") for value in _spelled(text, each)]
    count = 1
    for spelled in names.values():
        count *= len(spelled)
    _check_count(text, count)
    return RunArray(
        runs=tuple(
            ArrayRun(number=number, values=dict(zip(names, chosen, strict=True)))
            for number, chosen in enumerate(itertools.product(*names.values()))
        ),
        at_once=at_once,
    )


def _numbered(text: str, listed: str) -> tuple[ArrayRun, ...]:
    numbers: list[int] = []
    for part in listed.split(","):
        for value in _spelled(text, part.strip()):
            if not value.isdecimal() or int(value) in numbers:
                raise LaunchError(
                    f"--array {text}: {part.strip()!r} is no number or range of them, or repeats one; write such as 0-7"
                )
            numbers.append(int(value))
    _check_count(text, len(numbers))
    return tuple(ArrayRun(number=number, values={INDEX: str(number)}) for number in numbers)


def _spelled(text: str, value: str) -> list[str]:
    """Return the numbers of a range such as "0-3" or "0-8:2"; another value as it is."""
    match = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", value)
    if match is None:
        return [value]
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if last < first or step == 0:
        raise LaunchError(f"--array {text}: the range {value} is empty; write such as 0-7")
    _check_count(text, (last - first) // step + 1)
    return [str(number) for number in range(first, last + 1, step)]


def _check_count(text: str, count: int) -> None:
    if count > MOST_RUNS:
        raise LaunchError(f"--array {text}: {count} runs are more than the {MOST_RUNS} of one array; submit several")
