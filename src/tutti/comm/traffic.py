"""Traffic: bytes this rank sends, how long its communication is in flight, and how long it waits for it.

Every communication belongs to a `CommChannel`: one kind of data over some axes of the mesh. A mechanism tells its
channel when it starts a communication and when it waits for one. Waiting is *exposed* communication: the clock moves it
out of the phase in which it happened. Time in flight without waiting is hidden behind compute.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tutti.comm.clock import PhaseClock
from tutti.config.vocabulary import AxisName, TrafficKind

GRADIENT_TRAFFIC: tuple[TrafficKind, ...] = ("gradients", "parameters")
"""What `sent_nbytes` of a step's row counts."""

ACTIVATION_TRAFFIC: tuple[TrafficKind, ...] = ("activations", "halos", "tokens", "vectors", "keys", "heads", "messages")
"""What `exchanged_nbytes` of a step's row counts: activations, and their gradients on the way back."""

_UNTIMED: tuple[TrafficKind, ...] = ("messages", "scalars")
"""When these are under way is not known here: messages between stages are expected long before the sender has begun,
and that a loss is summed is noticed only when backward is over."""


@dataclass(slots=True, kw_only=True)
class ChannelTotals:
    """One lane since it was last taken. `axes`: joined by "+". `in_progress_s`: seconds in which at least one exchange
    had begun and was not known to have ended (a ceiling: its end is noticed when it is waited for, or when the lane's
    next one starts); None where it is not known. `exposed_s`: seconds waited, by the phase in which that was.
    """

    axes: str
    carried: TrafficKind
    count: int = 0
    nbytes: int = 0
    in_progress_s: float | None = 0.0
    exposed_s: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """As written into a metrics row; seconds to a tenth of a microsecond."""
        waited = {phase: round(seconds, 7) for phase, seconds in self.exposed_s.items()}
        in_progress = None if self.in_progress_s is None else round(self.in_progress_s, 7)
        return {
            "axes": self.axes,
            "carried": self.carried,
            "count": self.count,
            "nbytes": self.nbytes,
            "in_progress_s": in_progress,
            "exposed_s": waited,
        }


class CommChannel:
    """Communication of one kind of data over some axes of the mesh. Costs about a microsecond per operation.

    `with channel.waiting(nbytes):` accounts for a blocking operation.
    """

    __slots__ = ("_began", "_flying", "_open", "_since", "_total", "traffic")

    def __init__(self, traffic: "Traffic", axes: str = "", carried: TrafficKind = "scalars") -> None:
        self.traffic = traffic
        self._total = ChannelTotals(axes=axes, carried=carried)
        self._open, self._since, self._began = 0, 0.0, 0.0
        self._flying: list[CommHandle] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "CommChannel":
        return self

    def start(self, works: Iterable[Any], nbytes: int = 0) -> "CommHandle":
        """Record a started operation. `nbytes`: bytes this rank sends. Returns the handle to wait for."""
        self._flying = [handle for handle in self._flying if not handle.poll()]
        self._begin(nbytes)
        handle = CommHandle(self, list(works))
        self._flying.append(handle)
        return handle

    def waiting(self, nbytes: int = 0) -> "CommChannel":
        """`with lane.waiting(nbytes): exchange`: one that this rank waits for from its start to its end."""
        self._began = self._begin(nbytes)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *problem: object) -> None:
        self.ended(self._began)

    def ended(self, waited_since: float | None) -> None:
        """Record the end of an operation; `waited_since`: None if nobody waited for it."""
        clock = self.traffic.clock
        now = clock.moment()
        if waited_since is not None:
            self._expose(now - waited_since)
        self._open -= 1
        if not self._open:
            self._pass(now)

    def add_exposed(self, since: float) -> None:
        """Count the time from `since` as exposed: this rank worked for communication instead of computing."""
        self._expose(self.traffic.clock.moment() - since)

    def correct_nbytes(self, nbytes: int) -> None:
        """Correct the byte count once the true, data-dependent size is known."""
        self._total.nbytes += nbytes

    def _expose(self, seconds: float) -> None:
        phase, exposed = self.traffic.clock.waited(seconds), self._total.exposed_s
        exposed[phase] = exposed.get(phase, 0.0) + seconds

    def take(self) -> ChannelTotals:
        """Totals since the last call; operations in flight go on."""
        if self._open:
            self._pass(self.traffic.clock.moment())
        total = self._total
        self._total = ChannelTotals(axes=total.axes, carried=total.carried)
        if total.carried in _UNTIMED:
            total.in_progress_s = None
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
        assert self._total.in_progress_s is not None
        self._total.in_progress_s += now - self._since
        self._since = now


class CommHandle:
    """One operation in flight."""

    __slots__ = ("_channel", "_works")

    def __init__(self, channel: CommChannel, works: list[Any]) -> None:
        self._channel, self._works = channel, works

    def wait(self) -> None:
        """Wait for it, once: Gloo's receive waits for another message when it is asked again."""
        if self._works:
            since = self._channel.traffic.clock.moment()
            while self._works:
                self._works.pop(0).wait()
            self._channel.ended(since)

    def poll(self) -> bool:
        """As `is_completed`, where polling does part of the work: the time it takes counts as exposed."""
        if not self._works:
            return True
        since = self._channel.traffic.clock.moment()
        if self._ended(since):
            return True
        self._channel.add_exposed(since)
        return False

    def is_completed(self) -> bool:
        """Whether it has completed, as far as is known without waiting. Raises what made it fail."""
        return not self._works or self._ended(None)

    def _ended(self, waited_since: float | None) -> bool:
        """Whether all works have completed; the channel is told once, and waiting counts up to then."""
        if not all(work.is_completed() for work in self._works):
            return False
        while self._works:
            self._works.pop(0).wait()
        self._channel.ended(waited_since)
        return True


class Traffic:
    """All channels of a rank, on one clock."""

    def __init__(self, clock: PhaseClock | None = None) -> None:
        self.clock = clock or PhaseClock(torch.device("cpu"))
        self._channels: dict[tuple[str, TrafficKind], CommChannel] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Traffic":
        return self

    def channel(self, carried: TrafficKind, axes: Iterable[AxisName] = ()) -> CommChannel:
        """The channel of this kind of data over `axes`; the same object for the same arguments."""
        key = ("+".join(axes), carried)
        if key not in self._channels:
            self._channels[key] = CommChannel(self, *key)
        return self._channels[key]

    def take(self) -> list[ChannelTotals]:
        """Totals of every channel since the last call, of those that carried something."""
        totals = [channel.take() for channel in self._channels.values()]
        return [total for total in totals if total.count or total.exposed_s]


def untracked_channel() -> CommChannel:
    """A channel that nobody reads, for mechanisms used outside a run."""
    return Traffic().channel("scalars")


def sent_nbytes(totals: Iterable[ChannelTotals]) -> int:
    """Bytes of gradients and of divided parameters that this rank has sent."""
    return sum(total.nbytes for total in totals if total.carried in GRADIENT_TRAFFIC)


def exchanged_nbytes(totals: Iterable[ChannelTotals]) -> int:
    """Bytes of activations and their gradients that this rank has sent."""
    return sum(total.nbytes for total in totals if total.carried in ACTIVATION_TRAFFIC)
