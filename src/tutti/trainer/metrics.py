"""Output of a run for people and tools: JSON lines, loggers and a progress display."""

import ctypes
import json
import math
import os
import stat
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tutti.comm.world import World
from tutti.config.run_folder import RunFolder
from tutti.config.step_rows import StepRowFiller, StepRowShortener
from tutti.terminal import PlainConsole
from tutti.trainer.deferred_results import DeferredNumber
from tutti.trainer.late_writer import LateWriter
from tutti.trainer.loggers import RunLoggers


def _json_value(value: Any) -> Any:
    """Replace values that JSON cannot hold: NaN and infinities become null, paths become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    return value


def _plain(value: Any) -> Any:
    """Return what JSON has for an object that its encoder does not know: paths are text, other numbers floats."""
    return str(value) if isinstance(value, Path) else _json_value(float(value))


_encode = json.JSONEncoder(allow_nan=False, default=_plain, separators=(",", ":")).encode

WRITE_EVERY_S = 0.25
"""Rows of steps reach their file at most this much later."""

WAITING_NBYTES = 4 << 20
"""Rows of up to this size wait in memory while their disk is full or read-only; later ones are lost."""

_TRY_AGAIN_S = 1.0

_RECENT_ROWS, _RECENT_S = 2000, 2.0
"""How many rows of steps ranks other than 0 keep, and of how many seconds."""


class RowFile:
    """Appends JSON lines to a file. Rows wait in memory for at most `WRITE_EVERY_S`; a thread encodes and writes them.

    A disk that is full or read-only ends no training: that is said once, and the rows wait in memory until they can be
    written. A row "unwritten" then tells how many were late and how many are lost. Rows of steps are written in a short
    form, which `read_rows` fills in.

    Args:
        path: the file; a line of it that a crash cut short is ended first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._torn = False
        self._open()
        self._shortener = StepRowShortener()
        self._lines: list[bytes] = []
        self._failure: _WriteFailure | None = None
        self._rows = LateWriter(self._append, WRITE_EVERY_S)
        _open_files.add(self)

    def append(self, row: dict[str, Any], *, now: bool) -> None:
        """Append a row.

        Args:
            row: its fields, which stay as they are.
            now: whether it is in the file when this returns, with all rows before it, if its disk can be written.
        """
        self._rows.add(row, now=now)

    def write(self) -> None:
        """Write the rows that wait in memory, as whole lines."""
        self._rows.flush()

    def close(self) -> None:
        """Write what waits, and close the file; later rows are dropped. Says what could not be written."""
        self._rows.close()
        if self._failure is not None:
            self._failure.tried_s = -math.inf
            self._write_lines()
        if self._failure is not None:
            lost = len(self._lines) + self._failure.lost
            _say(f"{lost} rows of {self._path} are lost ({self._failure.cause})")
        self._close_file()

    def _append(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            try:
                line = self._line(row)
            except Exception as error:  # a value that cannot be read or written
                self._shortener.forget()
                _say(f"a row {row.get('kind')!r} was not written to {self._path}: {type(error).__name__}: {error}")
            else:
                self._keep(line)
        self._write_lines()

    def _keep(self, line: bytes) -> None:
        """Let a line wait for being written; without end only while the disk can be written."""
        if self._failure is not None:
            self._failure.nbytes += len(line)
            if self._failure.nbytes > WAITING_NBYTES:
                self._failure.lost += 1
                self._shortener.forget()
                return
        self._lines.append(line)

    def _line(self, row: dict[str, Any]) -> bytes:
        if row.get("kind") == "step":
            values = {name: value if type(value) in _JSON_TYPES else _plain(value) for name, value in row.items()}
            row = self._shortener.shorten(values)
        try:
            text = _encode(row)
        except ValueError:  # NaN or an infinity
            text = _encode(_json_value(row))
        return text.encode() + b"\n"

    def _write_lines(self) -> None:
        failure, now = self._failure, time.monotonic()
        if failure is not None and now - failure.tried_s < _TRY_AGAIN_S:
            return
        lines = self._lines
        if failure is not None:
            row = {"kind": "unwritten", "cause": failure.cause, "seconds": round(now - failure.since_s, 3)}
            lines = [*lines, self._line({**row, "late": len(lines), "lost": failure.lost})]
        try:
            self._write_whole(b"".join(lines))
        except OSError as error:
            self._close_file()  # opened again: a file of a network may have become stale
            if failure is None:
                cause = error.strerror or str(error)
                nbytes = sum(map(len, lines))
                failure = self._failure = _WriteFailure(cause=cause, since_s=now, nbytes=nbytes)
                _say_once(
                    f"metrics cannot be written to the folder {self._path.parent} ({cause}); training goes on, and "
                    f"rows wait in memory, up to {WAITING_NBYTES >> 20} MiB: make room there, or let it be written"
                )
            failure.tried_s = now
            return
        self._lines, self._failure = [], None
        if failure is not None:
            rows = f"{failure.lost} rows were lost" if failure.lost else "no row was lost"
            _say(f"metrics are written to the folder {self._path.parent} again; {rows}")

    def _write_whole(self, data: bytes) -> None:
        """Write all of `data` or nothing.

        Raises:
            OSError: the disk is full, read-only or gone.
        """
        if not data:
            return
        file = self._open()
        if self._torn:
            data = b"\n" + data
        size, written = os.fstat(file).st_size, 0
        try:
            while written < len(data):
                written += os.write(file, data[written:])
        except OSError:
            self._torn = written > 0
            with suppress(OSError):
                os.ftruncate(file, size)
                self._torn = False
            raise
        self._torn = False

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            size = os.fstat(self._file).st_size
            self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        return self._file

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)


@dataclass(slots=True, kw_only=True)
class _WriteFailure:
    """A file that cannot be written at present.

    Attributes:
        cause: what the system says.
        since_s, tried_s: when it was first and last tried, by the monotonic clock.
        nbytes: size of the rows since then.
        lost: rows that were given up.
    """

    cause: str
    since_s: float
    tried_s: float = -math.inf
    nbytes: int = 0
    lost: int = 0


_RESERVED_NBYTES = 8192

_JSON_TYPES = {str, int, float, bool, type(None), dict, list}

_open_files: "weakref.WeakSet[RowFile]" = weakref.WeakSet()

_said: set[str] = set()


def _say(message: str) -> None:
    """Print a message on standard error, which may be on the disk that is full."""
    with suppress(OSError, ValueError):
        print(f"tutti: {message}", file=sys.stderr, flush=True)


def _reserve_room_on_stderr() -> None:
    """Let a message still be written to standard error when its disk is full, if it is a file, as under `tutti run`."""
    keep_size = 1
    with suppress(OSError, ValueError, AttributeError):  # not Linux, or not a file
        state = os.fstat(2)
        if stat.S_ISREG(state.st_mode):
            offset, nbytes = ctypes.c_int64(state.st_size), ctypes.c_int64(_RESERVED_NBYTES)
            ctypes.CDLL(None).fallocate(2, keep_size, offset, nbytes)


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _say(message)


class MetricsLog:
    """Appends rows to the run folder. Rank 0 writes the run's metrics; every rank writes its own step timings.

    Attributes:
        offset_s: seconds that were on the run's clock when it was resumed; 0 on other ranks than 0.
        loggers: also get the numbers of the run's metrics, once they are started.
        recent: on other ranks than 0, the latest rows of steps, if they are kept: rank 0 may die before it writes them.
    """

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self.rank = rank
        self._path = folder.metrics
        self.offset_s = last_time_s(folder.metrics) if rank == 0 else 0.0
        folder.rank(rank).mkdir(parents=True, exist_ok=True)
        _reserve_room_on_stderr()
        self._mine = RowFile(folder.rank(rank) / "metrics.jsonl")
        self._run = RowFile(folder.metrics) if rank == 0 else None
        self._held: list[list[tuple[str, float, dict[str, Any]]]] = []
        self.loggers: RunLoggers | None = None
        self.recent: deque[tuple[float, dict[str, Any]]] | None = None

    def keep_recent(self) -> None:
        """Keep the latest rows of steps on ranks other than 0."""
        self.recent = deque(maxlen=_RECENT_ROWS) if self._run is None else None

    def unwritten(self) -> list[dict[str, Any]]:
        """Return the latest rows of steps that rank 0 may not have written."""
        rows = [*(self.recent or ())]
        return [values for time_s, values in rows if time_s > rows[-1][0] - _RECENT_S]

    def add_missing(self, rows: list[dict[str, Any]], last_step: int) -> None:
        """Write the rows of steps up to `last_step` that are missing at the end of the run's metrics."""
        if self._run is not None and rows:
            written = max((row["step"] for row in read_rows(self._path) if row.get("kind") == "step"), default=0)
            for row in rows:
                if written < row["step"] <= last_step:
                    self.row("step", 0.0, **row)

    def row(self, kind: str, time_s: float, **values: Any) -> None:
        """Write one row of the run's metrics; those of steps a little later. Ranks other than 0 ignore it.

        Args:
            kind: kind of the row, such as "step".
            time_s: seconds since this process' clock started.
            **values: fields of the row.
        """
        if self._run is None:
            if self.recent is not None and kind == "step":
                self.recent.append((time_s, values))
            return
        if self._held:
            self._held[-1].append((kind, time_s, values))
            return
        self._run.append({"kind": kind, **values, "time_s": round(self.offset_s + time_s, 6)}, now=kind != "step")
        if self.loggers is not None:
            self.loggers.row(kind, values)

    def hold(self) -> None:
        """A row comes later than those after it: let these wait until `release`, which is called in this order."""
        self._held.append([])

    def release(self, kind: str, time_s: float, **values: Any) -> None:
        """Write the row that others wait for, and then those that waited for it."""
        later, self._held = self._held, []
        self.row(kind, time_s, **values)
        for row_kind, row_time_s, row_values in later[0]:
            self.row(row_kind, row_time_s, **row_values)
        self._held = later[1:]

    def timing(self, **values: Any) -> None:
        """Write one row of this rank's own file; those of steps a little later."""
        self._mine.append(values, now=values.get("kind") != "step")

    def write(self) -> None:
        """Write the rows that wait in memory."""
        for file in filter(None, (self._mine, self._run)):
            file.write()

    def close(self, *, failed: bool = False) -> None:
        """Write and close the files, and finish the loggers; they learn whether the run has `failed`."""
        for file in filter(None, (self._mine, self._run)):
            file.close()
        if self.loggers is not None:
            self.loggers.close(failed=failed)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON lines file, also those that this process has yet to write.

    Lines that a crash cut short are left out, and what short rows of steps leave out is filled in.
    """
    write_rows()
    rows, filler = [], StepRowFiller()
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                rows.append(filler.fill(row))
    return rows


def write_rows() -> None:
    """Write the rows that wait in this process's memory."""
    for file in list(_open_files):
        file.write()


def last_time_s(path: Path) -> float:
    """Return the last reading of the run's clock in a metrics file; 0 for a new one."""
    return max((float(row.get("time_s") or 0.0) for row in read_rows(path)), default=0.0)


class ProgressDisplay:
    """Messages and a progress bar on standard error, on rank 0 only.

    The bar is shown only on a terminal, and not under `tutti run`, which shows its own.

    Args:
        world: the ranks.
        supervised: whether `tutti run` watches the ranks.
        wanted: whether the script wants a bar.
    """

    def __init__(self, world: World, *, supervised: bool, wanted: bool = True) -> None:
        self.speaks, self.wanted = world.is_main, wanted
        self._console = PlainConsole(stderr=True)
        self._watched = self.speaks and wanted and not supervised and self._console.is_terminal
        self._bar: Progress | None = None
        self._said: set[str] = set()
        self._late: float | DeferredNumber = math.nan

    def say(self, message: str) -> None:
        """Print a message the first time it comes; an empty one prints nothing."""
        if message and self.speaks and message not in self._said:
            self._said.add(message)
            with suppress(OSError):  # standard error may be on a full disk, or its reader gone
                self._console.print(f"tutti: {message}", markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, total: int | None, loss: float | DeferredNumber, throughput: float, unit: str) -> None:
        """Show the progress after a step.

        Args:
            step: steps made so far.
            total: steps of the whole run, if known.
            loss: global loss of the step.
            throughput: units per second.
            unit: what the batch counts: "samples" or "tokens".
        """
        if not self._watched:
            return
        if self._bar is None:
            columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()]
            # Lines that the script prints appear above the bar. Redirected into a file, they go there unchanged.
            self._bar = Progress(*columns, console=self._console, transient=True, redirect_stdout=sys.stdout.isatty())
            self._bar.add_task("", total=total)
            self._bar.start()
        if isinstance(loss, DeferredNumber):  # an accelerator still computes it: show the one before
            loss, self._late = self._late, loss
        text = f"loss {loss:.4f}  {throughput:,.0f} {unit}/s"
        self._bar.update(self._bar.task_ids[0], completed=step, total=total, description=text)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


class Throughput:
    """Samples or tokens per second, smoothed over about ten steps."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last = clock()
        self._rate = 0.0

    def update(self, amount: float) -> float:
        """Add one step's amount and return the rate."""
        now = self._clock()
        rate = amount / max(now - self._last, 1e-9)
        self._rate = rate if self._rate == 0.0 else 0.9 * self._rate + 0.1 * rate
        self._last = now
        return self._rate


def redirect_other_ranks(world: World, path: str) -> None:
    """Append what ranks other than 0 print to the file `path`, so that a line appears once and not once per rank."""
    if not world.is_main:
        sys.stdout.flush()
        sys.stdout = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - open until the process ends
