"""How replicas may differ between the moments in which they are brought together: a mode's parameters, checked.

Modes and the papers they follow are in docs/consistency.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Literal

from tutti.config.vocabulary import SyncMode
from tutti.errors import PlanError

OwnState = Literal["own", "averaged", "corrected"]
"""What becomes of the optimizer's state where replicas are averaged: each keeps its own, or it is averaged too, or each
keeps its own with second moments that are made smaller by what is noise of its part of the batch."""

REQUIRED = None
"""Stands for a parameter that the user must give."""

PARAMETERS: Mapping[SyncMode, Mapping[str, int | float | str | None]] = {
    "synchronous": {},
    "local": {"period": REQUIRED, "optimizer_state": "own", "delay": 0},
    "post-local": {"period": REQUIRED, "after": REQUIRED, "optimizer_state": "own", "delay": 0},
    "one-shot": {},
    "diloco": {"period": REQUIRED, "outer_rate": 0.7, "outer_momentum": 0.9},
    "adasum": {"period": 1},
    "ring": {"period": 1},
    "shift-one": {"period": 1},
    "push": {"period": 1},
    "elastic": {"period": 1, "pull": 0.9},
    "stale": {"bound": REQUIRED},
    "asynchronous": {},
    "ad-psgd": {},
    "hogwild": {},
    "ensemble": {},
}
"""What each mode is told, the first one first, with the value it has where nobody says; `REQUIRED` has none. Sources:
outer rate and momentum from DiLoCo (Douillard et al. 2023, arXiv 2311.08105), pull from EASGD (Zhang et al. 2015, arXiv
1412.6651: beta = 0.9)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """Parameters of a mode in which replicas differ; None where the mode's own value stands (see `PARAMETERS`).

    `period`: updates between two moments in which replicas are brought together. `after`: updates that are synchronous
    first. `outer_rate`, `outer_momentum`: of DiLoCo's outer optimizer. `pull`: how far the centre of elastic averaging
    moves to the mean of the replicas, 0 .. 1; a replica moves pull / replicas of its way to the centre. `bound`:
    updates that a replica may be ahead of the slowest when it begins another. `delay`: updates that are made between an
    average's beginning and its end, at most the period; with 0 replicas wait for it.
    """

    period: int | None = None
    after: int | None = None
    outer_rate: float | None = None
    outer_momentum: float | None = None
    pull: float | None = None
    optimizer_state: OwnState | None = None
    bound: int | None = None
    delay: int | None = None

    def __post_init__(self) -> None:
        if self.period is not None and self.period < 1:
            raise PlanError(f"sync.relaxed.period = {self.period}; give a number of updates of 1 or more")
        if self.after is not None and self.after < 0:
            raise PlanError(f"sync.relaxed.after = {self.after}; give a number of updates of 0 or more")
        if self.outer_rate is not None and not (isfinite(self.outer_rate) and self.outer_rate > 0):
            raise PlanError(f"sync.relaxed.outer_rate = {self.outer_rate}; give a number above 0, such as 0.7")
        if self.outer_momentum is not None and not 0 <= self.outer_momentum < 1:
            raise PlanError(f"sync.relaxed.outer_momentum = {self.outer_momentum}; give a number of 0 or more, below 1")
        if self.pull is not None and not 0 < self.pull <= 1:
            raise PlanError(f"sync.relaxed.pull = {self.pull}; give a number above 0 and at most 1, such as 0.9")
        for name in ("bound", "delay"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise PlanError(f"sync.relaxed.{name} = {value}; give a number of updates of 0 or more")

    def told(self) -> dict[str, int | float | str]:
        """The parameters that were given."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) is not None}


def check_mode(mode: SyncMode, relaxed: Relaxed) -> None:
    """Raise PlanError for a parameter that the mode does not have, or one that it lacks."""
    known = PARAMETERS[mode]
    for name, value in relaxed.told().items():
        if name not in known:
            has = f"has {', '.join(known)}" if known else "has no parameters"
            raise PlanError(f'sync.relaxed.{name} = {value} with sync.mode = "{mode}", which {has}; leave it out')
    for name, default in known.items():
        if default is REQUIRED and getattr(relaxed, name) is None:
            raise PlanError(f'sync.mode = "{mode}" needs sync.relaxed.{name}; give a number of updates')
    if relaxed.delay and relaxed.period is not None and relaxed.delay > relaxed.period:
        raise PlanError(
            f"sync.relaxed.delay = {relaxed.delay} with period = {relaxed.period}: the next average would begin before "
            f"the last is over; give at most {relaxed.period}"
        )
    if relaxed.delay and relaxed.optimizer_state == "averaged":
        raise PlanError(
            f'sync.relaxed.delay = {relaxed.delay} with optimizer_state = "averaged": only parameters are averaged '
            "while replicas go on; leave one of them out"
        )


def settled(mode: SyncMode, relaxed: Relaxed) -> Relaxed:
    """The parameters with the mode's own values where none were given."""
    return Relaxed(**{**PARAMETERS[mode], **relaxed.told()})  # type: ignore[arg-type]
