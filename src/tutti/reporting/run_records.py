"""Read a run folder: its specs, metrics, and the files of its ranks. Tolerates lines torn by a killed run."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Prediction
from tutti.config.run_folder import RunFolder, RunHeader
from tutti.config.step_rows import StepRowFiller
from tutti.config.verdict import Verdict
from tutti.errors import ReportError, SpecError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """One row of metrics.

    Attributes:
        time_s: seconds on the run's clock, which continues over resumes.
        superseded: a later generation resumed from before this step.
    """

    kind: str
    time_s: float
    step: int
    generation: int
    data: dict[str, Any]
    superseded: bool = False

    def number(self, name: str) -> float | None:
        """Return a finite number of this row; None for anything else."""
        return finite(self.data.get(name))

    def mapping(self, name: str) -> dict[str, float]:
        """Return the finite numbers of a nested object of this row."""
        nested = self.data.get(name)
        pairs = ((key, finite(value)) for key, value in nested.items()) if isinstance(nested, dict) else ()
        return {key: value for key, value in pairs if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The contents of a run folder.

    Attributes:
        notes: sentences about what could not be read.
    """

    header: RunHeader
    rows: tuple[MetricsRow, ...]
    rank_rows: dict[int, tuple[MetricsRow, ...]]
    plan: Plan | None
    cluster: ClusterSpec | None
    model: ModelSpec | None
    prediction: Prediction | None
    verdict: Verdict | None
    errors: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    def kept(self, kind: str) -> tuple[MetricsRow, ...]:
        """Return the rows of one kind that count for the result; of a repeated step, only the last."""
        return tuple(row for row in self.rows if row.kind == kind and not row.superseded)

    def spent(self, kind: str) -> tuple[MetricsRow, ...]:
        """Return all rows of one kind, because repeated steps took time too."""
        return tuple(row for row in self.rows if row.kind == kind)


def finite(value: object) -> float | None:
    """Return `value` if it is a finite number that a float can hold, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= sys.float_info.max else None


def read_records(path: Path) -> Records:
    """Read a run folder.

    Raises:
        ReportError: `path` is not a run folder, or it holds neither metrics nor a failure.
    """
    folder = RunFolder(path)
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder; name a run folder (one that has a run.json)")
    if not folder.header.is_file():
        raise ReportError(f"{path} has no run.json, so it is not a run folder; name a folder that `tutti run` made")
    try:
        header = serialization.load(RunHeader, folder.header)
    except SpecError as error:
        raise ReportError(f"this run cannot be reported on: {error}") from None
    notes: list[str] = []
    lines = read_lines(folder.metrics, notes)
    errors = tuple(_read_object(folder.rank(rank.rank) / "error.json", notes) for rank in header.ranks)
    failures = tuple(error for error in errors if error is not None)
    notes += _unwritten_notes(lines)
    if not lines and not failures:
        raise ReportError(f"{path} has no metrics; a run can be reported on once it has started training")
    return Records(
        header=header,
        rows=stitch(lines),
        rank_rows={
            rank.rank: stitch(read_lines(folder.rank(rank.rank) / "metrics.jsonl", notes)) for rank in header.ranks
        },
        plan=_read_spec(Plan, folder.plan, notes),
        cluster=_read_spec(ClusterSpec, folder.cluster, notes),
        model=_read_spec(ModelSpec, folder.model, notes),
        prediction=_read_spec(Prediction, folder.prediction, notes),
        verdict=_read_spec(Verdict, folder.verdict, notes),
        errors=failures,
        notes=tuple(notes),
    )


def read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file; torn lines are left out and counted in a note."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    rows: list[dict[str, Any]] = []
    torn, filler = 0, StepRowFiller()
    for line in text.split("\n"):
        row, whole = _parse_line(line)
        torn += not whole
        if row is not None:
            rows.append(filler.fill(row))
    if torn:
        notes.append(f"{torn} torn line{'' if torn == 1 else 's'} in {path.name} left out (the run was killed there)")
    return rows


def _unwritten_notes(lines: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each time in which the disk did not take the metrics."""
    return [
        f"metrics could not be written for {finite(line.get('seconds')) or 0:.3g} s ({line.get('cause')}); "
        f"{int(finite(line.get('lost')) or 0)} rows are lost, {int(finite(line.get('late')) or 0)} were written later"
        for line in lines
        if line.get("kind") == "unwritten"
    ]


def _parse_line(line: str) -> tuple[dict[str, Any] | None, bool]:
    """Return the row of a line, and whether the line was whole."""
    if not line.strip():
        return None, True
    # A killed run leaves half a row without a line break, and the resumed run appends its first row to the same line.
    for start in (0, line.rfind('{"kind"')):
        try:
            row = json.loads(line[max(0, start) :])
        except (ValueError, RecursionError):
            continue
        return (row, start == 0) if isinstance(row, dict) else (None, False)
    return None, False


def stitch(lines: list[dict[str, Any]]) -> tuple[MetricsRow, ...]:
    """Put the rows of all generations on one clock.

    Every "start" row begins a generation. A generation whose clock restarted at 0 continues from the end of the one
    before. What earlier generations did after the step from which it resumed is superseded.
    """
    rows: list[MetricsRow] = []
    generation, offset, latest, fresh = 0, 0.0, 0.0, True
    for line in lines:
        kind = str(line.get("kind", ""))
        time_s = finite(line.get("time_s"))
        if kind == "start":
            resumed_at = int(finite(line.get("resumed_at_step")) or 0)
            rows = [replace(row, superseded=row.superseded or row.step > resumed_at) for row in rows]
            generation += bool(rows)
            fresh = True
        elif time_s is not None:
            offset = (latest if time_s < latest else 0.0) if fresh else offset
            latest, fresh = max(latest, offset + time_s), False
        step = int(finite(line.get("step")) or 0)
        rows.append(MetricsRow(kind=kind, time_s=latest, step=step, generation=generation, data=line))
    return tuple(rows)


def _read_spec(cls: type[T], path: Path, notes: list[str]) -> T | None:
    """Read a spec; None if it is missing or unreadable, which adds a note."""
    if not path.is_file():
        return None
    try:
        return serialization.load(cls, path)
    except SpecError as error:
        notes.append(f"{path.name} could not be read: {str(error).removeprefix(f'{path}: ')}")
        return None


def _read_object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """Read a JSON object; None if it is missing, unreadable (which adds a note) or something else."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} could not be read: {error}")
        return None
    return value if isinstance(value, dict) else None
