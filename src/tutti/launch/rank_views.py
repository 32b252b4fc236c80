"""What can be seen of a rank from outside: its flight record, its Python stacks, and its process."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from tutti.config import serialization
from tutti.config.run_folder import RunFolder
from tutti.errors import EventRecordError, SpecError
from tutti.event_record import FILE_NAME, EventRecord, RecordState, read_record, start_ticks
from tutti.launch import process_tree
from tutti.process_stacks import dumped_stacks, frames_of_worker
from tutti.stack_watch import ANSWER, ASK, StackAnswer, StackFrame

ANSWER_S = 1.5
"""Seconds that ranks have to answer where they are; one that holds the interpreter's lock cannot."""

_PY_SPY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """A living process, as the system sees it.

    Attributes:
        pid: its number.
        letter: R running, S sleeping, D waiting for a disk or another device, T stopped, t stopped by a debugger.
        place: the function of the kernel in which it waits; empty if that is not told.
        cpu_s: processor time of it and of what it has started.
        switches: how often its main thread has begun to wait.
        nbytes: bytes that it has read and written.
    """

    pid: int
    letter: str
    place: str = ""
    cpu_s: float = 0.0
    switches: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWorker:
    """A worker of a data loader that does not get on.

    Attributes:
        pid: its process.
        letter: as of `ProcessState`.
        frames: its calls, from the innermost to those of the data set.
    """

    pid: int
    letter: str
    frames: tuple[StackFrame, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRank:
    """A rank as it is seen from outside.

    Attributes:
        record: its flight record; None if there is none.
        damage: why its record cannot be read; empty if it can.
        process: its process; None if it has ended, or runs on another host that has not told of it.
        elsewhere: whether it ran on another host.
        stack: what it answered; None if it did not.
        native: the stack that a rank without an answer has written at a signal, or that py-spy has seen.
        failed: the calls, from the innermost of the script's, in which a rank that has ended had waited too long.
        worker: the worker that a rank waits for which wants the next batch of its loader; None if there is none.
    """

    rank: int
    record: EventRecord | None = None
    damage: str = ""
    process: ProcessState | None = None
    elsewhere: bool = False
    stack: StackAnswer | None = None
    native: str = ""
    failed: tuple[StackFrame, ...] = ()
    worker: LoaderWorker | None = None

    @property
    def lives(self) -> bool:
        """Whether the rank is known to run, or may run on another host."""
        return self.process is not None or self.elsewhere


def ranks_in(folder: RunFolder) -> list[int]:
    """Return the ranks that have a folder in a run folder."""
    with contextlib.suppress(OSError):
        return sorted(int(path.name) for path in (folder.path / "ranks").iterdir() if path.name.isdigit())
    return []


def view_ranks(
    folder: RunFolder,
    ranks: Iterable[int],
    *,
    ask: bool = True,
    told: Mapping[int, ProcessState] = MappingProxyType({}),
) -> list[ObservedRank]:
    """Look at ranks, all at once.

    Args:
        folder: of the run.
        ranks: whom to look at.
        ask: whether to ask living ranks for their stacks; that takes up to about two seconds.
        told: the processes of ranks on other hosts, as those have told.
    """
    first = {rank: _look(folder.rank(rank), rank, told.get(rank)) for rank in ranks}
    living = [rank for rank, view in first.items() if view.lives and not _is_stopped(view)] if ask else []
    answers = ask_ranks(folder, living)
    views = []
    for rank, view in first.items():
        stack, native = answers.get(rank), ""
        if stack is None and rank in living and view.process is not None and not view.elsewhere:
            native = _native_stack(folder.rank(rank), view.process.pid)
        worker = _busy_worker(folder.rank(rank), view) if rank in living else None
        views.append(replace(view, stack=stack, native=native, worker=worker))
    return views


def _busy_worker(folder: Path, view: ObservedRank) -> LoaderWorker | None:
    """Return the worker of a rank's loader that is stopped, or reads a sample, if the rank waits for a batch."""
    events = view.record.events if view.record is not None else ()
    if view.process is None or view.elsewhere or not any(e.kind == "loader" and e.ended_s is None for e in events):
        return None
    for pid in sorted(process_tree.descendants([view.process.pid])):
        process = _process(pid)
        if process is not None and process.letter in "Tt":
            return LoaderWorker(pid=pid, letter=process.letter)
        if process is not None and (frames := frames_of_worker(folder, pid)):
            return LoaderWorker(pid=pid, letter=process.letter, frames=tuple(frames))
    return None


def _is_stopped(view: ObservedRank) -> bool:
    return view.process is not None and view.process.letter in "Tt"


def _look(folder: Path, rank: int, told: ProcessState | None) -> ObservedRank:
    try:
        record = read_record(folder / FILE_NAME)
    except EventRecordError as error:
        return ObservedRank(rank=rank, damage=str(error) if (folder / FILE_NAME).exists() else "")
    elsewhere = record.state.host != socket.gethostname()[:64]
    process = told if elsewhere else process_of(record.state)
    return ObservedRank(rank=rank, record=record, process=process, elsewhere=elsewhere and not record.state.ended)


def process_of(state: RecordState) -> ProcessState | None:
    """Return the process that writes a record, if it lives on this host."""
    if not process_tree.is_alive(state.pid) or start_ticks(state.pid) != state.started_ticks:
        return None
    return _process(state.pid)


def _process(pid: int) -> ProcessState | None:
    proc = Path(f"/proc/{pid}")
    try:
        letter = (proc / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    place, switches, nbytes = "", 0, 0
    with contextlib.suppress(OSError):
        place = (proc / "wchan").read_text(errors="replace").strip("0\n")
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = (proc / "task" / str(pid) / "status").read_text(errors="replace")
        switches = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (proc / "io").read_text(errors="replace").split("\n")
        nbytes = sum(int(line.split()[1]) for line in lines[:2])
    cpu_s = sum(_cpu_s(each) for each in (pid, *process_tree.descendants([pid])))
    return ProcessState(pid=pid, letter=letter, place=place, cpu_s=cpu_s, switches=switches, nbytes=nbytes)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def ask_ranks(folder: RunFolder, ranks: Iterable[int]) -> dict[int, StackAnswer]:
    """Ask living ranks where they are; return the answers that came in time, by rank."""
    asked: dict[int, int] = {}
    for rank in ranks:
        with contextlib.suppress(OSError):
            ask = folder.rank(rank) / ASK
            ask.touch()
            os.utime(ask)
            asked[rank] = ask.stat().st_mtime_ns
    answers: dict[int, StackAnswer] = {}
    until = time.monotonic() + ANSWER_S
    while asked.keys() - answers.keys() and time.monotonic() < until:
        time.sleep(0.05)
        for rank in asked.keys() - answers.keys():
            with contextlib.suppress(SpecError):
                answer = serialization.load(StackAnswer, folder.rank(rank) / ANSWER)
                if answer.asked == asked[rank]:
                    answers[rank] = answer
    for rank in asked:
        with contextlib.suppress(OSError):
            (folder.rank(rank) / ASK).unlink()
    return answers


def _native_stack(folder: Path, pid: int) -> str:
    """Return the stacks of a rank that cannot answer: by py-spy where it is installed, else by the rank's signal."""
    if (spy := shutil.which("py-spy")) is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            seen = subprocess.run(
                [spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_PY_SPY_S, check=False
            )
            if seen.returncode == 0:
                return seen.stdout
    return dumped_stacks(folder, pid)


def continue_command(pid: int) -> str:
    """Return the command that lets a stopped process go on."""
    return f"kill -{signal.SIGCONT.name.removeprefix('SIG')} {pid}"
