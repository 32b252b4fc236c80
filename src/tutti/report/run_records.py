"""Read a run folder: its specs, the rows of its metrics, what its ranks left. Survives a killed run's torn lines."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Prediction
from tutti.config.run_folder import RunFolder, RunHeader
from tutti.config.verdict import Verdict
from tutti.errors import ReportError, SpecError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """One line of metrics. `time_s` runs on through resumes; `superseded`: a resume went back before this step."""

    kind: str
    time_s: float
    step: int
    generation: int
    data: dict[str, Any]
    superseded: bool = False

    def number(self, name: str) -> float | None:
        """A finite number of this row, else None."""
        return finite(self.data.get(name))

    def mapping(self, name: str) -> dict[str, float]:
        """The finite numbers of a nested object of this row."""
        found = self.data.get(name)
        pairs = ((key, finite(value)) for key, value in found.items()) if isinstance(found, dict) else ()
        return {key: value for key, value in pairs if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """All that a run folder holds. `notes`: in words, what in it could not be read."""

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
        """The rows of one kind that count for the result: of repeated steps, the last time they were done."""
        return tuple(row for row in self.rows if row.kind == kind and not row.superseded)

    def spent(self, kind: str) -> tuple[MetricsRow, ...]:
        """The rows of one kind that took time: repeated steps too."""
        return tuple(row for row in self.rows if row.kind == kind)


def finite(value: object) -> float | None:
    """`value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def read_records(path: Path) -> Records:
    """Read a run folder. Raises ReportError when it is none, or holds no step and no failure to report on."""
    folder = RunFolder(path)
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder; name a run folder (one with a run.json)")
    if not folder.header.is_file():
        raise ReportError(f"{path} has no run.json, so it is not a run folder; name a folder that `tutti run` made")
    try:
        header = serialization.load(RunHeader, folder.header)
    except SpecError as error:
        raise ReportError(f"this run cannot be reported on: {error}") from None
    notes: list[str] = []
    lines = read_lines(folder.metrics, notes)
    errors = tuple(_read_object(folder.rank(rank.rank) / "error.json", notes) for rank in header.ranks)
    found = tuple(error for error in errors if error is not None)
    if not lines and not found:
        raise ReportError(f"{path} holds no metrics; there is nothing to report until a run has started training")
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
        errors=found,
        notes=tuple(notes),
    )


def read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The JSON objects of a file of JSON lines; torn lines are left out and noted."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    rows: list[dict[str, Any]] = []
    torn = 0
    for line in text.splitlines():
        row, whole = _parse_line(line)
        torn += not whole
        if row is not None:
            rows.append(row)
    if torn:
        notes.append(f"{torn} torn line{'' if torn == 1 else 's'} in {path.name} left out (the run was killed there)")
    return rows


def _parse_line(line: str) -> tuple[dict[str, Any] | None, bool]:
    """The row of a line, and whether the line was whole."""
    if not line.strip():
        return None, True
    # A killed run leaves half a row without its line break, and the resumed run's first row is glued to it.
    for start in (0, line.rfind('{"kind"')):
        try:
            row = json.loads(line[max(0, start) :])
        except json.JSONDecodeError:
            continue
        return (row, start == 0) if isinstance(row, dict) else (None, False)
    return None, False


def stitch(lines: list[dict[str, Any]]) -> tuple[MetricsRow, ...]:
    """Rows in order on one clock.

    Every "start" row opens a generation. Where a generation's clock began again at 0 it is set to go on from the
    end of the one before; what earlier generations did after the step it resumed from is superseded.
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
    if not path.is_file():
        return None
    try:
        return serialization.load(cls, path)
    except SpecError as error:
        notes.append(f"{path.name} could not be read: {str(error).removeprefix(f'{path}: ')}")
        return None


def _read_object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} could not be read: {error}")
        return None
    return found if isinstance(found, dict) else None
