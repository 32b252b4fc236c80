"""Stopping that all ranks agree on: one of them has got a signal, reached a time limit, or found a file.

Each rank puts what it asks for into the losses' message, so all ranks learn of it in the same step. They save a
checkpoint once its batch is done and leave with exit code 75, which says that the run can be resumed.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

from tutti.errors import RESUMABLE

FILE_NAME = "stop"
"""A file of this name in the run folder stops the run."""

_FILE_PERIOD_S = 1.0


class StopRequest(IntEnum):
    """Why a rank asks all of them to stop; the number is its word in the losses' message."""

    NONE = 0
    TERMINATED = 1
    USER_SIGNAL = 2
    TIME_LIMIT = 3
    FILE = 4


_SIGNALS = {signal.SIGTERM: StopRequest.TERMINATED, signal.SIGUSR1: StopRequest.USER_SIGNAL}

_DESCRIBED = {
    StopRequest.TERMINATED: "got SIGTERM",
    StopRequest.USER_SIGNAL: "got SIGUSR1",
    StopRequest.TIME_LIMIT: "reached the time limit",
    StopRequest.FILE: f"found the file {FILE_NAME} in the run folder",
}


class _Signals:
    """The signals that this process has got while Jobs trained; the handlers are installed as long as one does."""

    def __init__(self) -> None:
        self.received = StopRequest.NONE
        self.training: list[Stopping] = []
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Handle SIGTERM, and SIGUSR1 unless the script handles it; does nothing outside the main thread."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if number is signal.SIGUSR1 and _is_handled(number):
                continue
            self._before[number] = signal.signal(number, self._receive)
            signal.siginterrupt(number, False)  # what libraries wait for goes on

    def remove(self) -> None:
        """Put back the handlers from before, where the script has not set others since."""
        if threading.current_thread() is not threading.main_thread():
            return
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Note a signal. A SIGTERM that comes because another rank has failed has its usual effect.

        So does a second one, unless a launcher passes on what a scheduler has sent to all processes already.
        """
        name = signal.Signals(number)
        supervised = any(one.supervised for one in self.training)
        again = name is signal.SIGTERM and self.received is StopRequest.TERMINATED and not supervised
        if again or (name is signal.SIGTERM and any(one.failed_elsewhere() for one in self.training)):
            self.remove()
            os.kill(os.getpid(), number)
            return
        self.received = _SIGNALS[name]


_signals = _Signals()


def _is_handled(number: signal.Signals) -> bool:
    """Whether something in this process handles a signal, also in C (faulthandler)."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return True
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not Linux
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


class Stopping:
    """Whether a run is to stop.

    Args:
        folder: the run folder.
        stop_at_s: Unix time in seconds after which the run stops; None: it has no limit.
        signals: whether SIGTERM and SIGUSR1 stop the run.
        supervised: whether a launcher ends this process where it does not stop in time.

    Attributes:
        reason: why all ranks stop, once they have agreed; empty before.
        save: writes a checkpoint of the run and returns its folder. Collective.
        left: whether the run has stopped.
    """

    def __init__(
        self, folder: Path, *, stop_at_s: float | None = None, signals: bool = True, supervised: bool = False
    ) -> None:
        self._folder, self._stop_at_s, self._uses_signals = folder, stop_at_s, signals
        self.supervised = supervised
        self._looked_at_s = time.monotonic()
        self._file_found = False
        self.reason = ""
        self.left = False
        self.save: Callable[[], Path] | None = None

    @property
    def word(self) -> int:
        """What this rank asks for now."""
        if self._uses_signals and _signals.received:
            return int(_signals.received)
        if self._stop_at_s is not None and time.time() >= self._stop_at_s:
            return int(StopRequest.TIME_LIMIT)
        now = time.monotonic()
        if now - self._looked_at_s >= _FILE_PERIOD_S:
            self._looked_at_s, self._file_found = now, (self._folder / FILE_NAME).exists()
        return int(StopRequest.FILE if self._file_found else StopRequest.NONE)

    def note(self, words: Sequence[int]) -> None:
        """Take in what each rank has asked for in a step."""
        if self.reason or not any(words):
            return
        request = StopRequest(next(word for word in words if word))
        ranks = [rank for rank, word in enumerate(words) if word == request]
        who = "all ranks" if len(ranks) == len(words) > 1 else "the process" if len(words) == 1 else f"rank {ranks[0]}"
        self.reason = f"{who} {_DESCRIBED[request]}"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals while the context lasts, which may be entered again within itself."""
        _signals.training.append(self)
        if self._uses_signals:
            _signals.install()
        try:
            yield
        finally:
            if self in _signals.training:
                _signals.training.remove(self)
            if not _signals.training:
                _signals.remove()

    def forget(self) -> None:
        """Listen no more: the process leaves the run without a stop."""
        self.left = True
        while self in _signals.training:
            _signals.training.remove(self)
        if not _signals.training:
            _signals.remove()

    def others(self) -> list["Stopping"]:
        """Those of other Jobs that train now, whose state a stop would lose."""
        return [one for one in dict.fromkeys(_signals.training) if one is not self]

    def leave(self) -> None:
        """End the process: the run has been saved.

        Raises:
            SystemExit: with code `RESUMABLE`, so that the script's `finally` blocks run.
        """
        (self._folder / FILE_NAME).unlink(missing_ok=True)  # else the resumed run would stop at once
        for one in (self, *self.others()):
            one.left = True
        _signals.received = StopRequest.NONE
        raise SystemExit(RESUMABLE)

    def failed_elsewhere(self) -> bool:
        """Whether a rank has failed, because of which the launcher ends the others."""
        return any(self._folder.glob("ranks/*/error.json"))
