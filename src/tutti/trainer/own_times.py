"""The ranks' own times in steps, before they meet: which rank is slower than the others.

Each rank's own time of the step before rides in the losses' message as one number: its wait for data, and the rest
without waits for other ranks. All ranks add up the same numbers, so all of them find the same slow rank.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tutti.config.prediction import Phase
from tutti.machine import ProcessLoad

WINDOW_STEPS, WINDOW_S = 32, 2.0
"""A window has a multiple of so many steps, and its slowest rank at least so many seconds of its own."""

FACTOR, LEAST_EXCESS_S = 1.5, 0.3
"""A rank is slow if its own time in a window is this factor of the others' median, and so much longer."""

_FIRST_STEPS = 5
"""These warm up, and are left out."""

_UNIT_S, _HALF = 1e-5, 1 << 26
"""Times ride in units of 10 microseconds; two of 26 bits fit into a float64, also their sums over a window."""

_MOST = _HALF // (2 * WINDOW_STEPS)
"""Of one step: 10 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTimesWindow:
    """The own times of all ranks in some steps.

    Attributes:
        first, last: the steps, from 1.
        steps: how many.
        data_s, own_s: each rank's wait for data, and the rest of its own time.
        longest_s: this rank's own time in its longest step.
        load: what the system has counted of this rank's process.
        computed: the steps of which `own_s` is known; 0: all.
        step_s: how long a step of this rank took on average, with waits.
    """

    first: int
    last: int
    steps: int
    data_s: Sequence[float]
    own_s: Sequence[float]
    longest_s: float
    load: Mapping[str, float]
    computed: int = 0
    step_s: float = 0.0

    def excess_s(self, rank: int, peers: Sequence[int]) -> float:
        """Return by how much a rank's own time exceeds the median of the others', 0 if it is not slow.

        Args:
            rank: the rank.
            peers: the ranks that compute the same on other samples, with it.

        Examples:
            >>> window = OwnTimesWindow(
            ...     first=6, last=37, steps=32, data_s=(0, 3, 0), own_s=(1, 1, 2), longest_s=0.1, load={}
            ... )
            >>> [window.excess_s(rank, [0, 1, 2]) for rank in range(3)]
            [0.0, 2.5, 0.0]
        """
        totals = [data + own for data, own in zip(self.data_s, self.own_s, strict=True)]
        others = [totals[other] for other in peers if other != rank]
        if not others:
            return 0.0
        usual = statistics.median(others)
        excess = totals[rank] - usual
        return excess if totals[rank] > FACTOR * usual and excess >= LEAST_EXCESS_S else 0.0

    def times(self) -> list[float]:
        """Return each rank's own time of a step."""
        computed = self.computed or self.steps
        return [data / self.steps + own / computed for data, own in zip(self.data_s, self.own_s, strict=True)]

    def at_whole_shares(
        self, parts: Sequence[float], rank: int, fixed: Sequence[float] = (), *, stream: bool = False
    ) -> "OwnTimesWindow":
        """Return the window as it would be if the ranks' shares of the batch were whole.

        Args:
            parts: which part of its share each rank has had.
            rank: this rank, whose own facts the window has.
            fixed: what part of each rank's own time does not follow its share; empty: none of it.
            stream: whether waits for data do not follow the share: each rank reads all samples.
        """
        if all(part == 1.0 for part in parts):
            return self
        fixed = fixed or [0.0] * len(parts)
        factors = [same + (1.0 - same) / part for same, part in zip(fixed, parts, strict=True)]
        load = {name: count if name == "clock_hz" else count * factors[rank] for name, count in self.load.items()}
        of_data = [1.0] * len(parts) if stream else factors
        return replace(
            self,
            data_s=[seconds * factor for seconds, factor in zip(self.data_s, of_data, strict=True)],
            own_s=[seconds * factor for seconds, factor in zip(self.own_s, factors, strict=True)],
            longest_s=self.longest_s * factors[rank],
            load=load,
        )

    def relative_time(self, rank: int, peers: Sequence[int]) -> float:
        """Return a rank's own time of a step, divided by the median of the others'; 1 if there are none.

        Args:
            rank: the rank.
            peers: as in `excess_s`.

        Examples:
            >>> window = OwnTimesWindow(
            ...     first=6, last=37, steps=32, data_s=(0, 3, 0), own_s=(1, 1, 3), longest_s=0.1, load={}
            ... )
            >>> [window.relative_time(rank, [0, 1, 2]) for rank in range(3)]
            [0.2857142857142857, 2.0, 1.2]
        """
        times = self.times()
        others = [times[other] for other in peers if other != rank]
        usual = statistics.median(others) if others else 0.0
        return times[rank] / usual if usual > 0 else 1.0


@dataclass(slots=True)
class OwnTimes:
    """Adds up the own times of ranks, window by window.

    Attributes:
        column: this rank's number of its last step, for the message.
        slow: the slow ranks of the last window, with the kind of cause.
    """

    column: float = 0.0
    slow: dict[int, str] = field(default_factory=dict)
    _seen: int = 0
    _steps: int = 0
    _longest_s: float = 0.0
    _computed: int = 0
    _noted: int = 0
    _wall_s: float = 0.0
    _sums: np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None = None
    _load: ProcessLoad | None = None

    def note(self, phases: Mapping[Phase, float], *, exact: bool) -> None:
        """Note this rank's own times of a step.

        Args:
            phases: seconds by phase.
            exact: whether they are those of the device; else only the wait for data is known.
        """
        data_s, own_s = phases["data"], 0.0
        if exact:
            own_s = phases["forward"] + phases["backward"] + phases["optimizer"] + phases["other"]
        if data_s + own_s > self._longest_s:
            self._longest_s = data_s + own_s
        self._noted += 1
        self._wall_s += sum(phases.values())
        self.column = float(min(int(data_s / _UNIT_S), _MOST) * _HALF + min(int(own_s / _UNIT_S), _MOST))

    def add(self, columns: Sequence[float], step: int) -> OwnTimesWindow | None:
        """Add the numbers of all ranks in a step; return the window if it is complete.

        Args:
            columns: the number of each rank.
            step: number of the step that the numbers are of, from 1.
        """
        self._seen += 1
        if self._seen <= _FIRST_STEPS or self._sums is None:
            self._begin(len(columns))
            return None
        self._sums += columns
        self._steps += 1
        self._computed += any(column % _HALF for column in columns)
        if self._steps % WINDOW_STEPS:
            return None
        data, own = np.divmod(self._sums, _HALF)
        if float((data + own).max()) * _UNIT_S < WINDOW_S:
            return None
        assert self._load is not None
        window = OwnTimesWindow(
            first=step - self._steps + 1,
            last=step,
            steps=self._steps,
            data_s=(data * _UNIT_S).tolist(),
            own_s=(own * _UNIT_S).tolist(),
            longest_s=self._longest_s,
            load=self._load.passed(),
            computed=self._computed,
            step_s=self._wall_s / max(self._noted, 1),
        )
        self._begin(len(columns))
        return window

    def restart(self) -> None:
        """Forget the window, and leave out the next steps: from now on ranks have other shares."""
        self._seen, self._sums = 0, None

    def _begin(self, ranks: int) -> None:
        self._sums, self._steps, self._longest_s = np.zeros(ranks), 0, 0.0
        self._computed, self._noted, self._wall_s = 0, 0, 0.0
        if self._seen >= _FIRST_STEPS:
            self._load = ProcessLoad()
