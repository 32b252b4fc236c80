"""The view of a running run: the first rank's output as it comes, and one live line of progress beneath it."""

import codecs
import contextlib
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from tutti.config.run_folder import RunFolder
from tutti.config.step_rows import StepRowFiller
from tutti.errors import TrainingError
from tutti.launch.launcher import LaunchSpec


class Watcher(Protocol):
    """Shows what ranks do while they run. A context manager: entered before they start, left after they have ended."""

    def __enter__(self) -> "Watcher": ...

    def __exit__(self, *exception: object) -> None: ...

    def follow(self, spec: LaunchSpec) -> None:
        """Show what is started next, which may have other ranks."""
        ...

    def update(self) -> None:
        """Show new output."""
        ...


class Silent:
    """A watcher that shows nothing."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def follow(self, spec: LaunchSpec) -> None:
        """Show nothing."""

    def update(self) -> None:
        """Show nothing."""


class Stalls(Silent):
    """A watcher that shows nothing and ends a run whose ranks show no sign of progress.

    Signs are files that the ranks write: output, metrics, recordings, checkpoints.

    Args:
        spec: what is started.
        name: how messages call the script.
        folder: where the ranks write, at any depth.
    """

    def __init__(self, spec: LaunchSpec, name: str, folder: Path) -> None:
        self._spec, self._name, self._folder = spec, name, folder
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._since = time.monotonic()
        self._looked = 0.0

    def update(self) -> None:
        """Look for progress.

        Raises:
            TrainingError: there was none for the time limit of the run.
        """
        now = time.monotonic()
        if now - self._looked < min(1.0, self._spec.timeout_s / 4):
            return
        self._looked = now
        seen = _written(self._folder)
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since > self._spec.timeout_s:
            ranks = "1 rank" if self._spec.world_size == 1 else f"{self._spec.world_size} ranks"
            raise TrainingError(
                f"{self._name} hangs on {ranks}: it showed no progress for {self._spec.timeout_s:g} s (no output, no "
                "step); correct what it waits for, or raise --timeout"
            )


def _written(folder: Path) -> tuple[int, int, int]:
    """Return the number of files below a folder, their size in bytes, and when the newest was written."""
    states = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            states.append(path.stat())
    return len(states), sum(s.st_size for s in states), max((s.st_mtime_ns for s in states), default=0)


def watcher_for(spec: LaunchSpec, *, stdout: TextIO, console: Console, progress: bool = True) -> Watcher:
    """Return a watcher that shows the output of this node's first rank, with a progress bar on a terminal.

    Args:
        spec: what is started on this node.
        stdout: takes the rank's standard output.
        console: takes its standard error, and the bar if it is a terminal.
        progress: whether a bar is wanted.
    """
    if console.is_terminal and progress:
        return LiveWatcher(spec, stdout=stdout, console=console)
    return PlainWatcher(spec, stdout=stdout, stderr=console.file)


class PlainWatcher:
    """Copies the first rank's output, unchanged."""

    def __init__(self, spec: LaunchSpec, *, stdout: TextIO, stderr: Any) -> None:
        self._streams, self._rank = (stdout, stderr), -1
        self._tails: tuple[Tail, ...] = ()
        self.follow(spec)

    def follow(self, spec: LaunchSpec) -> None:
        """Copy the output of these ranks' first one."""
        self.update()
        if spec.first_rank != self._rank:
            self._rank = spec.first_rank
            folder = RunFolder(spec.folder).rank(spec.first_rank)
            self._tails = Tail(folder / "stdout.log"), Tail(folder / "stderr.log")

    def __enter__(self) -> "PlainWatcher":
        return self

    def __exit__(self, *exception: object) -> None:
        self.update()

    def update(self) -> None:
        """Copy new output."""
        for tail, stream in zip(self._tails, self._streams, strict=False):
            text = tail.read()
            if text:
                stream.write(text)
                stream.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """The progress of training: the newest step, and the mean rate of the last steps.

    Attributes:
        rate_per_s: samples or tokens (`unit`) per second.
        left_s: seconds that are left.
    """

    step: int
    total_steps: int | None
    loss: float | None
    rate_per_s: float | None
    unit: str
    left_s: float | None

    @property
    def words(self) -> str:
        """Loss, throughput and time left, as far as they are known."""
        parts = []
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        if self.rate_per_s is not None:
            parts.append(f"{self.rate_per_s:,.4g} {self.unit}/s")
        if self.left_s is not None:
            minutes, seconds = divmod(round(self.left_s), 60)
            hours, minutes = divmod(minutes, 60)
            parts.append(f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left")
        return ", ".join(parts)


class Meter:
    """Computes progress from rows of metrics, averaged over the last `window` steps."""

    def __init__(self, window: int = 20) -> None:
        self._steps: deque[dict[str, Any]] = deque(maxlen=window)

    def add(self, row: dict[str, Any]) -> None:
        """Count a row if it describes a step."""
        if row.get("kind") == "step":
            self._steps.append(row)

    def now(self) -> Progressed | None:
        """Return the current progress, or None before the first step."""
        if not self._steps:
            return None
        newest = self._steps[-1]
        unit = "tokens" if newest.get("tokens") else "samples"
        wall_s = sum(float(row.get("wall_s") or 0) for row in self._steps)
        amount = sum(float(row.get(unit) or 0) for row in self._steps)
        total = newest.get("total_steps")
        left = max(0, total - newest["step"]) * wall_s / len(self._steps) if total else None
        return Progressed(
            step=newest["step"],
            total_steps=total,
            loss=newest.get("loss"),
            rate_per_s=amount / wall_s if wall_s > 0 else None,
            unit=unit,
            left_s=left,
        )


class LiveWatcher:
    """Shows the first rank's lines above one live line: bar, steps, loss, throughput and time left."""

    def __init__(self, spec: LaunchSpec, *, stdout: TextIO, console: Console) -> None:
        self._stdout = stdout
        self._rows = RowTail(RunFolder(spec.folder).metrics)
        self._meter = Meter()
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("starting", total=None, words="")
        self._rank, self._ranks = -1, ""
        self._tails: tuple[LineTail, ...] = ()
        self.follow(spec)

    def follow(self, spec: LaunchSpec) -> None:
        """Show the lines of these ranks' first one."""
        self._ranks = f"{spec.world_size} rank{'s' if spec.world_size > 1 else ''}"
        self._progress.update(self._task, description=f"{self._ranks} starting")
        if spec.first_rank != self._rank:
            self._show(*(tail.flush() for tail in self._tails))
            self._rank = spec.first_rank
            rank = RunFolder(spec.folder).rank(spec.first_rank)
            self._tails = LineTail(rank / "stdout.log"), LineTail(rank / "stderr.log")

    def __enter__(self) -> "LiveWatcher":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._show(*(tail.flush() for tail in self._tails))
        self._progress.stop()

    def update(self) -> None:
        """Show new lines and the current progress."""
        self._show(*(tail.read() for tail in self._tails))
        for row in self._rows.read():
            self._meter.add(row)
            if row.get("kind") == "start" and row.get("progress") is False:  # Job(progress=False)
                self._progress.update(self._task, visible=False)
        at = self._meter.now()
        if at is not None:
            self._progress.update(
                self._task, description=self._ranks, completed=at.step, total=at.total_steps, words=at.words
            )

    def _show(self, out: Sequence[str] = (), err: Sequence[str] = ()) -> None:
        if not self._stdout.isatty():
            self._stdout.writelines(line + "\n" for line in out)
            self._stdout.flush()
            out = []
        for line in [*out, *err]:
            # Of a progress bar drawn with carriage returns, only the last state is shown.
            self._console.print(Text.from_ansi(line.rstrip("\r").rpartition("\r")[2]), soft_wrap=True)


class Tail:
    """Reads new text of one file. The file need not exist yet."""

    def __init__(self, path: Path, *, from_end: bool = True) -> None:
        """Start at the end of the file (`from_end`), to skip an earlier run's output, or at its beginning."""
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """Return the text appended since the last call, or ""."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return ""
        self._offset += len(data)
        return self._decoder.decode(data)


class LineTail:
    """Reads new complete lines of one file."""

    def __init__(self, path: Path, *, from_end: bool = True) -> None:
        self._tail = Tail(path, from_end=from_end)
        self._rest = ""

    def read(self) -> list[str]:
        """Return the lines completed since the last call, without line ends."""
        *lines, self._rest = (self._rest + self._tail.read()).split("\n")
        return lines

    def flush(self) -> list[str]:
        """Return the new lines, with a last line that has no line end."""
        lines = self.read()
        rest, self._rest = self._rest, ""
        return [*lines, rest] if rest else lines


class RowTail:
    """Reads new rows of a JSON lines file; skips lines that are not JSON objects."""

    def __init__(self, path: Path, *, from_end: bool = True) -> None:
        self._lines = LineTail(path, from_end=from_end)
        self._filler = StepRowFiller()

    def read(self) -> list[dict[str, Any]]:
        rows = []
        for line in self._lines.read():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                rows.append(self._filler.fill(row))
        return rows
