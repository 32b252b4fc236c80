"""When replicas are compared bit for bit: so seldom that it takes at most a two-hundredth of the steps' time."""

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

LARGEST_PART = 0.005
"""Of the time of steps, what comparisons may take."""

FIRST, LEAST = 3, 10
"""The step, from 0, that is compared first, when optimizers have made their state; and fewest steps between two."""

_UNKNOWN_EXCHANGE_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class HashTimes:
    """What one rank has measured.

    Attributes:
        reading_s: how long it has read its tensors.
        exchange_s: how long the exchange of the comparison before took, with the wait for other ranks.
        step_s: the median time of its last steps.
    """

    reading_s: float
    exchange_s: float
    step_s: float


@dataclass(slots=True)
class HashSchedule:
    """Chooses the steps, from 0, in which replicas are compared. All ranks choose the same.

    Attributes:
        every: steps between two comparisons; 0 before the first one.
        following: the step of the next one.
        good_step: updates after which replicas were equal last; None before the first comparison.
        exact: whether replicas are equal bit for bit, as the first comparison has shown; True before it.
        exchange_s: how long the last exchange took.
    """

    every: int = 0
    following: int = FIRST
    good_step: int | None = None
    exact: bool = True
    exchange_s: float = _UNKNOWN_EXCHANGE_S
    _began_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def begin(self, step: int) -> bool:
        """A step begins: return whether replicas are compared in it."""
        self._began_s.append(time.perf_counter())
        return self.exact and step >= self.following

    def step_s(self) -> float:
        """Return the median time from one step to the next."""
        times = list(self._began_s)
        return statistics.median(b - a for a, b in pairwise(times)) if len(times) > 1 else 0.0

    def choose(self, step: int, times: Sequence[HashTimes]) -> None:
        """Choose the next step.

        Args:
            step: of this comparison.
            times: of all ranks.

        Examples:
            >>> schedule = HashSchedule()
            >>> schedule.choose(3, [HashTimes(reading_s=0.009, exchange_s=0.001, step_s=0.1)])
            >>> schedule.every, schedule.following
            (20, 23)
        """
        # The rank that comes last waits for none: its exchange is what an exchange takes.
        cost_s = max(each.reading_s for each in times) + min(each.exchange_s for each in times)
        step_s = min(each.step_s for each in times)
        self.every = max(LEAST, math.ceil(cost_s / (LARGEST_PART * step_s))) if step_s > 0 else LEAST
        self.following = step + self.every
