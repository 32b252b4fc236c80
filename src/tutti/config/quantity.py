"""A number that carries its evidence, and a curve of such numbers: what reports are made of."""

import math
from dataclasses import dataclass
from typing import Literal

from tutti.config.words import Evidence
from tutti.errors import SpecError

Split = Literal["train", "validation", "test", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number with its unit and where it comes from; `value` None: not recorded (then `evidence` is None too).

    Units: "s", "B", "B/s", "FLOP", "FLOP/s", "samples", "samples/s", "ratio" (shown in percent), "x" (a factor),
    "" for a plain number. `low` and `high` bound an estimate; `note` says how the number was made.
    """

    value: int | float | None = None
    unit: str = ""
    evidence: Evidence | None = None
    low: int | float | None = None
    high: int | float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) != (self.evidence is None):
            raise SpecError(
                f"value = {self.value} with evidence = {self.evidence}; give a number its evidence, and none to null"
            )
        for number in (self.value, self.low, self.high):
            if number is not None and not math.isfinite(number):
                raise SpecError(f"a quantity is {number}; write null for a number that is not there")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One value over the run; the four tuples are parallel. `time_s`: on the run's own clock, down time excluded."""

    name: str  # "training loss", "test accuracy"
    split: Split
    metric: str
    evidence: Evidence = "measured"
    steps: tuple[int, ...]
    samples: tuple[int, ...]
    time_s: tuple[float, ...]
    values: tuple[float, ...]
    note: str = ""
