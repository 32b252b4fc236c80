"""Traffic: what this rank exchanges with others: bytes, how long exchanges are under way, how long it waits for them.

Every exchange of a mechanism belongs to a lane: one kind of thing over some axes of the mesh. A mechanism keeps its
lane and says there when it starts an exchange and when it waits for one. Waiting is *exposed* communication, and the
clock moves it out of the phase in which it happened; what is under way and not waited for is hidden behind compute.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tutti.comm.clock import PhaseClock
from tutti.config.words import AxisName, Carried

SENT: tuple[Carried, ...] = ("gradients", "parameters")
"""What `sent_nbytes` of a step's row counts."""

EXCHANGED: tuple[Carried, ...] = ("activations", "halos", "tokens", "vectors", "keys", "heads", "messages")
"""What `exchanged_nbytes` of a step's row counts: activations, and their gradients on the way back."""

_NEVER_KNOWN: tuple[Carried, ...] = ("messages", "scalars")
"""When these are under way is not known here: messages between stages are expected long before the sender has begun,
and that a loss is summed is noticed only when backward is over."""


@dataclass(slots=True, kw_only=True)
class Total:
    """One lane since it was last taken. `axes`: joined by "+". `under_way_s`: seconds in which at least one exchange
    had begun and was not known to have ended (a ceiling: its end is noticed when it is waited for, or when the lane's
    next one starts); None where it is not known. `exposed_s`: seconds waited, by the phase in which that was.
    """

    axes: str
    carried: Carried
    count: int = 0
    nbytes: int = 0
    under_way_s: float | None = 0.0
    exposed_s: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """As written into a metrics row; seconds to a tenth of a microsecond."""
        waited = {phase: round(seconds, 7) for phase, seconds in self.exposed_s.items()}
        under_way = None if self.under_way_s is None else round(self.under_way_s, 7)
        return {
            "axes": self.axes,
            "carried": self.carried,
            "count": self.count,
            "nbytes": self.nbytes,
            "under_way_s": under_way,
            "exposed_s": waited,
        }


class Lane:
    """Exchanges that carry one kind of thing over some axes of the mesh. Costs about a microsecond an exchange.

    As a context manager, after `waiting`: an exchange that is waited for where it stands.
    """

    __slots__ = ("_began", "_flying", "_open", "_since", "_total", "traffic")

    def __init__(self, traffic: "Traffic", axes: str = "", carried: Carried = "scalars") -> None:
        self.traffic = traffic
        self._total = Total(axes=axes, carried=carried)
        self._open, self._since, self._began = 0, 0.0, 0.0
        self._flying: list[Flight] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Lane":
        return self

    def start(self, works: Iterable[Any], nbytes: int = 0) -> "Flight":
        """An exchange was started just now: what to wait for, and the bytes this rank sends with it."""
        self._flying = [flight for flight in self._flying if not flight.go_on()]
        self._begin(nbytes)
        flight = Flight(self, list(works))
        self._flying.append(flight)
        return flight

    def waiting(self, nbytes: int = 0) -> "Lane":
        """`with lane.waiting(nbytes): exchange`: one that this rank waits for from its start to its end."""
        self._began = self._begin(nbytes)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *problem: object) -> None:
        self.ended(self._began)

    def ended(self, waited_since: float | None) -> None:
        """An exchange has ended; None: nobody waited for it."""
        clock = self.traffic.clock
        now = clock.moment()
        if waited_since is not None:
            self._expose(now - waited_since)
        self._open -= 1
        if not self._open:
            self._pass(now)

    def spent(self, since: float) -> None:
        """From `since` on this rank has worked for exchanges instead of computing."""
        self._expose(self.traffic.clock.moment() - since)

    def corrected(self, nbytes: int) -> None:
        """What was sent beside what was said when it began: how much, only the values told."""
        self._total.nbytes += nbytes

    def _expose(self, seconds: float) -> None:
        phase, exposed = self.traffic.clock.waited(seconds), self._total.exposed_s
        exposed[phase] = exposed.get(phase, 0.0) + seconds

    def take(self) -> Total:
        """What has happened since the last time; what is under way goes on."""
        if self._open:
            self._pass(self.traffic.clock.moment())
        total = self._total
        self._total = Total(axes=total.axes, carried=total.carried)
        if total.carried in _NEVER_KNOWN:
            total.under_way_s = None
        return total

    def _begin(self, nbytes: int) -> float:
        now = self.traffic.clock.moment()
        if not self._open:
            self._since = now
        self._open += 1
        self._total.count += 1
        self._total.nbytes += nbytes
        return now

    def _pass(self, now: float) -> None:
        assert self._total.under_way_s is not None
        self._total.under_way_s += now - self._since
        self._since = now


class Flight:
    """One exchange under way."""

    __slots__ = ("_lane", "_works")

    def __init__(self, lane: Lane, works: list[Any]) -> None:
        self._lane, self._works = lane, works

    def wait(self) -> None:
        """Wait for it, once: Gloo's receive waits for another message when it is asked again."""
        if self._works:
            since = self._lane.traffic.clock.moment()
            while self._works:
                self._works.pop(0).wait()
            self._lane.ended(since)

    def go_on(self) -> bool:
        """As is_completed, of an exchange for which this rank works when asked: that time is exposed."""
        if not self._works:
            return True
        since = self._lane.traffic.clock.moment()
        if self._ended(since):
            return True
        self._lane.spent(since)
        return False

    def is_completed(self) -> bool:
        """Whether it has ended, as far as is known without waiting. Raises what made it fail: that is an end, too."""
        return not self._works or self._ended(None)

    def _ended(self, waited_since: float | None) -> bool:
        """Whether all of it has; if so, the lane hears of it once: waiting is exposed up to the moment it ends."""
        if not all(work.is_completed() for work in self._works):
            return False
        while self._works:
            self._works.pop(0).wait()
        self._lane.ended(waited_since)
        return True


class Traffic:
    """All lanes of a rank, on one clock."""

    def __init__(self, clock: PhaseClock | None = None) -> None:
        self.clock = clock or PhaseClock(torch.device("cpu"))
        self._lanes: dict[tuple[str, Carried], Lane] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Traffic":
        return self

    def lane(self, carried: Carried, axes: Iterable[AxisName] = ()) -> Lane:
        """The lane of what is carried over `axes`; the same one for the same question."""
        key = ("+".join(axes), carried)
        if key not in self._lanes:
            self._lanes[key] = Lane(self, *key)
        return self._lanes[key]

    def take(self) -> list[Total]:
        """What every lane carried since the last time, those that carried something."""
        totals = [lane.take() for lane in self._lanes.values()]
        return [total for total in totals if total.count or total.exposed_s]


def lone_lane() -> Lane:
    """A lane that nobody reads: of a mechanism's parts outside of a run."""
    return Traffic().lane("scalars")


def sent_nbytes(totals: Iterable[Total]) -> int:
    """Bytes of gradients and of divided parameters that this rank has sent."""
    return sum(total.nbytes for total in totals if total.carried in SENT)


def exchanged_nbytes(totals: Iterable[Total]) -> int:
    """Bytes of activations and their gradients that this rank has sent."""
    return sum(total.nbytes for total in totals if total.carried in EXCHANGED)
