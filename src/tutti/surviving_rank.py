"""What a rank keeps when another one is lost, and its process goes on: the launcher's code and the Job meet here.

A rank that survives runs its script again, and its Job continues from the training state that this process still has.
The launcher's part (`tutti.launch.survival`) ends the old run by `leave`; the Job's part registers what knows how.
"""

import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """The training state of a run that this process has left.

    Attributes:
        step: updates that are in it.
        state: the state, in the form that the Job understands; None where there is none to continue from.
        drawn: whether the script draws from global generators between steps.
        rows: the latest rows of metrics.
        refusal: why there is none, as a clause.
    """

    step: int = 0
    state: Any = None
    drawn: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    refusal: str = ""


class LeavableRun(Protocol):
    """A Job's run that its process can leave while other ranks are lost."""

    def leave(self) -> KeptState:
        """End the run without communication, and return its state."""
        ...


@dataclass(slots=True)
class SurvivingRank:
    """This process, as far as it outlives the loss of other ranks.

    Attributes:
        enabled: whether the launcher lets it.
        runs: the runs of the script that is running.
        kept: the state from before; it stays until the next run has a state of its own.
        peer_lost: whether another rank of this generation is lost, so that waits for others are in vain.
    """

    enabled: bool = False
    runs: list[LeavableRun] = field(default_factory=list)
    kept: KeptState | None = None
    peer_lost: bool = False

    def leave(self) -> KeptState:
        """End the script's runs, and return the newest state that this process has."""
        runs, self.runs = self.runs, []
        states = [run.leave() for run in runs]
        if len(states) > 1:
            self.kept = KeptState(refusal="the script makes several Jobs")
        elif states and (self.kept is None or self.kept.state is None or states[0].state is not None):
            self.kept = states[0]
        return self.kept or KeptState(refusal="no rank had a state yet")

    def check(self) -> None:
        """Raise if a rank is lost, instead of waiting for others.

        Raises:
            RuntimeError: one is.
        """
        if self.peer_lost:
            raise RuntimeError("Connection closed by peer: another rank is lost, and this one goes on without it")


SURVIVING_RANK = SurvivingRank()
"""The process' own."""


_HEADER = struct.Struct("<qqqqq")
_FILE_NBYTES = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind:
    """What a rank has left behind in its `LastingFile`.

    Attributes:
        step: updates made so far.
        drawn: whether its script draws from global generators between steps.
        first: some bytes.
        second: more bytes.
    """

    step: int
    drawn: bool = False
    first: bytes = b""
    second: bytes = b""


class LastingFile:
    """A small file of a rank, which others can read once the rank is lost.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _FILE_NBYTES)
            self._memory = mmap.mmap(file, _FILE_NBYTES)
        finally:
            os.close(file)
        self._count = 0

    def write(self, written: LeftBehind) -> None:
        """Replace what is in the file."""
        self._count += 1
        data = written.first + written.second
        self._memory[-8:] = struct.pack("<q", self._count)
        self._memory[_HEADER.size : _HEADER.size + len(data)] = data
        self._memory[: _HEADER.size] = _HEADER.pack(
            self._count, written.step, written.drawn, len(written.first), len(data)
        )


def read_lasting(path: Path) -> LeftBehind | None:
    """Return what a rank has written last into its `LastingFile`; None if nothing, or it was writing when it died."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _FILE_NBYTES:
        return None
    count, step, drawn, first, nbytes = _HEADER.unpack_from(data)
    if not count or struct.unpack_from("<q", data, _FILE_NBYTES - 8) != (count,):
        return None
    stored = data[_HEADER.size : _HEADER.size + nbytes]
    return LeftBehind(step=step, drawn=bool(drawn), first=stored[:first], second=stored[first:])
