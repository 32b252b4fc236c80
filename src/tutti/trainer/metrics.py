"""Metrics: JSON lines, one flushed row at a time, and TensorBoard event files beside them."""

import json
import math
from pathlib import Path
from typing import Any, TextIO

from tensorboardX import SummaryWriter
from tensorboardX.proto.summary_pb2 import Summary

from tutti.config.run import RunFolder


def _plain(value: Any) -> Any:
    """NaN and infinities become null: JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    return value


_SHOWN = ("loss", "learning_rate", "grad_norm", "wall_s", "tokens_dropped", "balance_loss", "noise_scale")
"""What of a step's row goes to TensorBoard, where it is a number."""


class MetricsLog:
    """Appends rows to the run folder. Rank 0 writes the run's metrics; every rank its own step timings.

    `offset_s`: seconds already on the run's clock when it was resumed.
    """

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self.rank = rank
        self.offset_s = last_time_s(folder.metrics) if rank == 0 else 0.0
        folder.rank(rank).mkdir(parents=True, exist_ok=True)
        self._mine = _appending(folder.rank(rank) / "metrics.jsonl")
        self._run: TextIO | None = None
        self._board: SummaryWriter | None = None
        if rank == 0:
            self._run = _appending(folder.metrics)
            self._board = SummaryWriter(logdir=str(folder.tensorboard), flush_secs=10)

    def row(self, kind: str, time_s: float, **values: Any) -> None:
        """Write one row of the run's metrics (rank 0 only; others ignore it)."""
        if self._run is None:
            return
        _write(self._run, {"kind": kind, **values, "time_s": round(self.offset_s + time_s, 6)})
        self._to_board(kind, values)

    def timing(self, **values: Any) -> None:
        """Write one row of this rank's own file."""
        _write(self._mine, values)

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
                {name: values.get(name) for name in _SHOWN},
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
        self._board.file_writer.add_summary(Summary(value=scalars), step)  # one event for all: a step must stay cheap


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON lines file; a last line that a crash cut short is left out."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def last_time_s(path: Path) -> float:
    """The run clock's last reading in a metrics file; 0 for a new one."""
    return max((float(row.get("time_s") or 0.0) for row in read_rows(path)), default=0.0)


def _appending(path: Path) -> TextIO:
    """Open for appending; a last line that a crash cut short is ended first."""
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    file = path.open("a", encoding="utf-8")
    if torn:
        file.write("\n")
    return file


def _write(file: TextIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(_plain(row)) + "\n")
    file.flush()
