"""Output of a run for people and tools: JSON lines, loggers and a progress display."""

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tutti.comm.world import World
from tutti.config.run_folder import RunFolder
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


class MetricsLog:
    """Appends rows to the run folder. Rank 0 writes the run's metrics; every rank writes its own step timings.

    Attributes:
        offset_s: seconds that were on the run's clock when it was resumed; 0 on other ranks than 0.
        loggers: also get the numbers of the run's metrics, once they are started.
    """

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self.rank = rank
        self.offset_s = last_time_s(folder.metrics) if rank == 0 else 0.0
        folder.rank(rank).mkdir(parents=True, exist_ok=True)
        self._mine = _open_for_append(folder.rank(rank) / "metrics.jsonl")
        self._run: TextIO | None = None
        self.loggers: RunLoggers | None = None
        if rank == 0:
            self._run = _open_for_append(folder.metrics)

    def row(self, kind: str, time_s: float, **values: Any) -> None:
        """Write one row of the run's metrics. Ranks other than 0 ignore it.

        Args:
            kind: kind of the row, such as "step".
            time_s: seconds since this process' clock started.
            **values: fields of the row.
        """
        if self._run is None:
            return
        _write_json_line(self._run, {"kind": kind, **values, "time_s": round(self.offset_s + time_s, 6)})
        if self.loggers is not None:
            self.loggers.row(kind, values)

    def timing(self, **values: Any) -> None:
        """Write one row of this rank's own file."""
        _write_json_line(self._mine, values)

    def close(self, *, failed: bool = False) -> None:
        """Flush and close the files, and finish the loggers; they learn whether the run has `failed`."""
        self._mine.close()
        if self._run is not None:
            self._run.close()
        if self.loggers is not None:
            self.loggers.close(failed=failed)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON lines file; lines that a crash cut short are left out."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def last_time_s(path: Path) -> float:
    """Return the last reading of the run's clock in a metrics file; 0 for a new one."""
    return max((float(row.get("time_s") or 0.0) for row in read_rows(path)), default=0.0)


def _open_for_append(path: Path) -> TextIO:
    """Open a file for appending, and first end a line that a crash cut short."""
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    file = path.open("a", encoding="utf-8")
    if torn:
        file.write("\n")
    return file


def _write_json_line(file: TextIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(_json_value(row)) + "\n")
    file.flush()


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
        self._console = Console(stderr=True)
        self._watched = self.speaks and wanted and not supervised and self._console.is_terminal
        self._bar: Progress | None = None
        self._said: set[str] = set()

    def say(self, message: str) -> None:
        """Print a message the first time it comes; an empty one prints nothing."""
        if message and self.speaks and message not in self._said:
            self._said.add(message)
            self._console.print(f"tutti: {message}", markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, total: int | None, loss: float, throughput: float, unit: str) -> None:
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
