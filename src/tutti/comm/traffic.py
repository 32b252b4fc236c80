"""Traffic: bytes this rank sends, how long its communication is in progress, and how long the rank waits for it.

Every communication belongs to a `CommChannel`: one kind of data over some axes of the mesh. A mechanism tells its
channel when it starts a communication and when it waits for one. Waiting is *exposed* communication: the clock moves it
out of the phase in which it happened. Time in progress without waiting is hidden behind compute.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tutti.comm.clock import PhaseClock
from tutti.config.vocabulary import AxisName, TrafficKind
from tutti.event_record import ACTIVE, RecordedWait

GRADIENT_TRAFFIC: tuple[TrafficKind, ...] = ("gradients", "parameters")
"""Kinds of data that `sent_nbytes` of a step's row counts."""

ACTIVATION_TRAFFIC: tuple[TrafficKind, ...] = ("activations", "halos", "tokens", "vectors", "keys", "heads", "messages")
"""Kinds of data that `exchanged_nbytes` of a step's row counts: activations and, in backward, their gradients."""

_UNTIMED: tuple[TrafficKind, ...] = ("messages", "scalars")
"""Kinds of data whose time in progress is not known here.

Receives between stages are posted long before the sender has begun. The all-reduce of the losses is only seen to have
ended after backward.
"""


@dataclass(slots=True, kw_only=True)
class ChannelTotals:
    """Totals of one channel since they were last taken.

    Attributes:
        axes: the axes of the mesh, joined by "+".
        carried: the kind of data.
        count: number of operations started.
        nbytes: bytes this rank has sent.
        in_progress_s: seconds in which at least one operation had begun and was not known to have ended; None where
            this is not known. It is an upper bound: an end is noticed only when the operation is waited for or polled,
            or when the channel's next one starts.
        exposed_s: seconds waited, by the phase in which the rank waited.
    """

    axes: str
    carried: TrafficKind
    count: int = 0
    nbytes: int = 0
    in_progress_s: float | None = 0.0
    exposed_s: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return the totals as written into a metrics row, with seconds rounded to a tenth of a microsecond."""
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
    """The accounting of one kind of data over some axes of the mesh. It costs about a microsecond per operation.

    `with channel.waiting(nbytes):` accounts for a blocking operation.

    Args:
        traffic: the rank's traffic, which has the clock.
        axes: the axes of the mesh, joined by "+".
        carried: the kind of data.

    Attributes:
        about: which data it carries, in words for the flight record.
    """

    __slots__ = ("_began", "_open", "_outer", "_pending", "_since", "_total", "about", "traffic")

    def __init__(self, traffic: "Traffic", axes: str = "", carried: TrafficKind = "scalars") -> None:
        self.traffic = traffic
        self._total = ChannelTotals(axes=axes, carried=carried)
        self._open, self._since, self._began = 0, 0.0, 0.0
        self._outer: RecordedWait = (0, 0)
        self._pending: list[CommHandle] = []
        self.about = f"{carried} over {axes}" if axes else carried

    def __deepcopy__(self, memo: dict[int, Any]) -> "CommChannel":
        return self

    def start(self, works: Iterable[Any], nbytes: int = 0) -> "CommHandle":
        """Record a started operation.

        Args:
            works: the work handles of the operation, in the order in which they must be waited for.
            nbytes: bytes this rank sends.

        Returns:
            The handle to wait for.
        """
        self._pending = [handle for handle in self._pending if not handle.poll()]
        self._begin(nbytes)
        handle = CommHandle(self, list(works))
        if ACTIVE.recorder is not None:
            for work in handle._works:
                ACTIVE.recorder.about(work, self.about)
        self._pending.append(handle)
        return handle

    def waiting(self, nbytes: int = 0) -> "CommChannel":
        """Account for a blocking operation of `nbytes` sent bytes: `with channel.waiting(nbytes): exchange()`.

        The rank counts as waiting from the start of the block to its end.
        """
        self._began = self._begin(nbytes)
        if ACTIVE.recorder is not None:
            self._outer = ACTIVE.recorder.wait_begins(self.about)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *problem: object) -> None:
        if ACTIVE.recorder is not None:
            ACTIVE.recorder.wait_ends(self._outer, failed=problem[0] is not None)
        self.ended(self._began)

    def ended(self, waited_since: float | None) -> None:
        """Record the end of an operation.

        Args:
            waited_since: when the rank began to wait for it (`PhaseClock.stream_time`); None if it did not wait.
        """
        clock = self.traffic.clock
        now = clock.stream_time()
        if waited_since is not None:
            self._expose(now - waited_since)
        self._open -= 1
        if not self._open:
            self._pass(now)

    def add_exposed(self, since: float) -> None:
        """Count the time from `since` as exposed, because this rank worked for communication instead of computing."""
        self._expose(self.traffic.clock.stream_time() - since)

    def correct_nbytes(self, nbytes: int) -> None:
        """Add `nbytes` to the byte count, once the true, data-dependent size is known."""
        self._total.nbytes += nbytes

    def _expose(self, seconds: float) -> None:
        phase, exposed = self.traffic.clock.count_as_exposed(seconds), self._total.exposed_s
        exposed[phase] = exposed.get(phase, 0.0) + seconds

    def take(self) -> ChannelTotals:
        """Return the totals since the last call; operations in progress go on."""
        if self._open:
            self._pass(self.traffic.clock.stream_time())
        total = self._total
        self._total = ChannelTotals(axes=total.axes, carried=total.carried)
        if total.carried in _UNTIMED:
            total.in_progress_s = None
        return total

    @property
    def idle(self) -> bool:
        """Whether nothing was recorded since the last `take`, and no operation is in progress."""
        total = self._total
        return not (self._open or total.count or total.nbytes or total.in_progress_s or total.exposed_s)

    def _begin(self, nbytes: int) -> float:
        now = self.traffic.clock.stream_time()
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
    """One operation in progress."""

    __slots__ = ("_channel", "_works")

    def __init__(self, channel: CommChannel, works: list[Any]) -> None:
        self._channel, self._works = channel, works

    def wait(self) -> None:
        """Wait for the operation; further calls return at once.

        Each work is waited for only once, because waiting again for one of Gloo's receives would wait for another
        message.
        """
        if self._works:
            since = self._channel.traffic.clock.stream_time()
            recorder = ACTIVE.recorder
            outer = recorder.wait_begins(self._channel.about) if recorder is not None else (0, 0)
            failed = True
            try:
                while self._works:
                    self._works.pop(0).wait()
                failed = False
            finally:
                if recorder is not None:
                    recorder.wait_ends(outer, failed=failed)
            self._channel.ended(since)

    def poll(self) -> bool:
        """Return whether the operation has completed; the time that the call takes counts as exposed.

        Use it instead of `is_completed` where polling does part of the operation's work.
        """
        if not self._works:
            return True
        since = self._channel.traffic.clock.stream_time()
        if self._ended(since):
            return True
        self._channel.add_exposed(since)
        return False

    def is_completed(self) -> bool:
        """Return whether the operation has completed, without waiting. Raises the error that made it fail."""
        return not self._works or self._ended(None)

    def _ended(self, waited_since: float | None) -> bool:
        """Return whether all works have completed; if so, record the end of the operation once."""
        if not all(work.is_completed() for work in self._works):
            return False
        while self._works:
            self._works.pop(0).wait()
        self._channel.ended(waited_since)
        return True


class Traffic:
    """All channels of a rank, on one clock.

    Args:
        clock: the clock of the step loop; None: a clock of its own, for use outside a run.
    """

    def __init__(self, clock: PhaseClock | None = None) -> None:
        self.clock = clock or PhaseClock(torch.device("cpu"))
        self._channels: dict[tuple[str, TrafficKind], CommChannel] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Traffic":
        return self

    def channel(self, carried: TrafficKind, axes: Iterable[AxisName] = ()) -> CommChannel:
        """Return the channel of this kind of data over `axes`: the same object for the same arguments."""
        key = ("+".join(axes), carried)
        if key not in self._channels:
            self._channels[key] = CommChannel(self, *key)
        return self._channels[key]

    def take(self) -> list[ChannelTotals]:
        """Return the totals since the last call of each channel that was used."""
        totals = [channel.take() for channel in self._channels.values() if not channel.idle]
        return [total for total in totals if total.count or total.exposed_s]


def untracked_channel() -> CommChannel:
    """Return a channel whose totals nobody reads, for mechanisms used outside a run."""
    return Traffic().channel("scalars")


def sent_nbytes(totals: Iterable[ChannelTotals]) -> int:
    """Return the bytes of gradients and of parameters that this rank has sent."""
    return sum(total.nbytes for total in totals if total.carried in GRADIENT_TRAFFIC)


def exchanged_nbytes(totals: Iterable[ChannelTotals]) -> int:
    """Return the bytes of activations and their gradients that this rank has sent."""
    return sum(total.nbytes for total in totals if total.carried in ACTIVATION_TRAFFIC)
