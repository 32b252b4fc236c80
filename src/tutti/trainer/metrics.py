"""Output of a run for people and tools: JSON lines, TensorBoard event files and a progress display."""

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter
from tensorboardX.proto.summary_pb2 import Summary

from tutti.comm.world import World
from tutti.config.run_folder import RunFolder


def _json_value(value: Any) -> Any:
    """Replace values that JSON cannot hold: NaN and infinities become null, paths become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    return value


_TENSORBOARD_FIELDS = ("loss", "learning_rate", "grad_norm", "wall_s", "tokens_dropped", "balance_loss", "noise_scale")
"""Fields of a step's row that go to TensorBoard if they are numbers."""


class MetricsLog:
    """Appends rows to the run folder. Rank 0 writes the run's metrics; every rank writes its own step timings.

    Attributes:
        offset_s: seconds that were on the run's clock when it was resumed; 0 on other ranks than 0.
    """

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self.rank = rank
        self.offset_s = last_time_s(folder.metrics) if rank == 0 else 0.0
        folder.rank(rank).mkdir(parents=True, exist_ok=True)
        self._mine = _open_for_append(folder.rank(rank) / "metrics.jsonl")
        self._run: TextIO | None = None
        self._board: SummaryWriter | None = None
        if rank == 0:
            self._run = _open_for_append(folder.metrics)
            self._board = SummaryWriter(logdir=str(folder.tensorboard), flush_secs=10)

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
        self._to_board(kind, values)

    def timing(self, **values: Any) -> None:
        """Write one row of this rank's own file."""
        _write_json_line(self._mine, values)

    def close(self) -> None:
        """Flush and close the files."""
        self._mine.close()
        if self._run is not None:
            self._run.close()
        if self._board is not None:
            self._board.close()

    def _to_board(self, kind: str, values: dict[str, Any]) -> None:
        if self._board is None:
            return
        step = values.get("step", 0)
        if kind == "step":
            group, shown = (
                "train",
                {name: values.get(name) for name in _TENSORBOARD_FIELDS},
            )
        elif kind in ("evaluate", "log"):
            group, shown = values.get("name", "log"), values["values"]
        else:
            return
        scalars = [
            Summary.Value(tag=f"{group}/{name}", simple_value=value)
            for name, value in shown.items()
            if isinstance(value, int | float)
        ]
        self._board.file_writer.add_summary(Summary(value=scalars), step)  # one event for all fields, which is cheap


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

    The bar is shown only on a terminal, and not under `tutti run`.
    """

    def __init__(self, world: World, *, supervised: bool) -> None:
        self.speaks = world.is_main
        self._console = Console(stderr=True)
        self._watched = self.speaks and not supervised and self._console.is_terminal
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
            self._bar = Progress(*columns, console=self._console, transient=True)
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
