"""Timeline: one predicted step as it falls, rank by rank, and what each rank holds. All of it is predicted."""

from dataclasses import dataclass
from typing import Literal

from tutti.config.prediction import Estimate, RankMemory

Doing = Literal[
    "data", "forward", "backward", "weights", "optimizer", "communication", "bubble", "waiting", "other", "hidden"
]
"""What a rank does: data: it waits for its batch, or loads it itself; forward, backward (weights: the half of it for
weight gradients, where apart), optimizer; exposed communication; a bubble: idle until another stage's result comes;
waiting for slower ranks; other: what a step costs besides; hidden: communication while it computes."""

DOINGS: dict[Doing, str] = {
    "data": "loading of data",
    "forward": "forward",
    "backward": "backward",
    "weights": "weight gradients",
    "optimizer": "optimizer",
    "communication": "exposed communication",
    "bubble": "bubble",
    "waiting": "waiting for slower ranks",
    "other": "other",
    "hidden": "hidden communication",
}
"""In words, in the order in which they are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """From `start_s` to `end_s` of the step; `what` says more in words."""

    doing: Doing
    start_s: float
    end_s: float
    what: str = ""

    @property
    def lasts_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Ranks that do the same at the same time. `ranks` in words, `count` of them; `bars` follow each other without
    gaps over the step, but for what the timeline leaves out; `hidden` runs beside them, drawn at the end of what hides
    it. `seconds`: of the whole step by what is done, hidden communication among it. Of a rank of them, at its peak
    (`full_when`): what holds its `memory`, and how much it may hold."""

    ranks: str
    count: int
    stage: int
    bars: tuple[Bar, ...]
    hidden: tuple[Bar, ...]
    seconds: dict[Doing, float]
    memory: RankMemory
    memory_limit_nbytes: float
    full_when: str

    @property
    def busy_s(self) -> float:
        """Seconds of computing."""
        return sum(self.seconds.get(doing, 0.0) for doing in ("forward", "backward", "weights", "optimizer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A part of the step that is not drawn: microbatches between that repeat what is before and after."""

    start_s: float
    end_s: float
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step of a plan by tracks, those of the first stage first. `tracks_left_out`: more than were asked for."""

    step_time_s: Estimate
    world_size: int
    num_microbatches: int
    tracks: tuple[Track, ...]
    tracks_left_out: int = 0
    left_out: LeftOut | None = None
    version: int = 1
