"""What the plan benchmark has measured so far, in a folder, so that an interrupted run can be continued."""

import dataclasses
import json
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.config import serialization
from tutti.config.cluster import ClusterSpec

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """A folder with the sizes, a file for each probed cluster, and a file for each visit of a case, with a line for
    each plan and rank.
    """

    folder: Path

    def cluster(self, words: str) -> ClusterSpec | None:
        """Return the cluster probed for the case `words`, or None."""
        path = self._path(words, "json")
        return serialization.load(ClusterSpec, path) if path.exists() else None

    def keep_cluster(self, words: str, cluster: ClusterSpec) -> None:
        serialization.save(cluster, self._path(words, "json"))

    def rows_file(self, words: str) -> Path:
        return self._path(words, "jsonl")

    def _path(self, words: str, ending: str) -> Path:
        return self.folder / f"{words.replace(', ', '-').replace(' ', '-')}.{ending}"


def outcomes(rows_file: Path, ranks: int) -> dict[str, Row]:
    """Return, by name, the outcome of each plan that every rank, or a rank that failed, has reported."""
    rows_by_plan: dict[str, dict[int, Row]] = {}
    for line in rows_file.read_text(encoding="utf-8").splitlines() if rows_file.exists() else []:
        row = json.loads(line)
        rows_by_plan.setdefault(row.pop("name"), {})[row.pop("rank")] = row
    return {
        name: merged(rows)
        for name, rows in rows_by_plan.items()
        if len(rows) == ranks or any(map(_lost, rows.values()))
    }


def _lost(row: Row) -> bool:
    return "failed" in row


def merged(rows: dict[int, Row]) -> Row:
    """Merge the rows of a plan's ranks into one outcome.

    If it failed, that is the cause. Otherwise it has rank 0's times and speeds, every rank's phases, CPU time and
    bytes, and the largest peak of memory.
    """
    lost = {rank: row for rank, row in rows.items() if _lost(row)}
    if lost:
        rank = min(lost, key=lambda rank: (lost[rank]["peer"], rank))  # a rank that only lost its peer is not the cause
        return {"failed": f"rank {rank}: {lost[rank]['failed']}"}
    refused = next((row["refused"] for row in rows.values() if "refused" in row), None)
    if refused is not None:
        return {"refused": refused}
    first = rows[0]
    return {
        **{name: first[name] for name in ("prepare_s", "warmup_s", "step_s", "stolen", "set_aside")},
        **{name: [rows[rank][name] for rank in sorted(rows)] for name in ("phases", "cpu_s", "sent_nbytes")},
        "peak_nbytes": max(row["peak_nbytes"] for row in rows.values()),
        "pace": first.get("pace", []),
    }


def over_visits(visits: list[Row]) -> Row:
    """Merge the outcomes of a plan's visits into one.

    If a visit has no measurement, its outcome is returned. Otherwise the result has all steps' times, visit by
    visit, phases and CPU time of the median visit, and the largest memory, stolen time and number of discarded
    steps.
    """
    if not all("step_s" in row for row in visits):
        return next(row for row in visits if "step_s" not in row)
    middle = sorted(visits, key=lambda row: statistics.median(row["step_s"]))[len(visits) // 2]
    return {
        **middle,
        "visits_s": [row["step_s"] for row in visits],
        **{name: max(row[name] for row in visits) for name in ("stolen", "set_aside", "peak_nbytes")},
    }


def opened(folder: Path, sizes: Any, *, resume: bool) -> Journal:
    """Open the journal in `folder`: with `resume` the existing one, else a new one; an existing one is moved beside
    it.

    Raises:
        SystemExit: there is nothing to resume, or it was measured with other sizes.
    """
    wanted = json.loads(json.dumps(dataclasses.asdict(sizes)))
    file = folder / "sizes.json"
    if resume:
        if not file.exists():
            raise SystemExit(f"{folder} has no run to continue; run without --resume")
        other = json.loads(file.read_text(encoding="utf-8"))
        if other != wanted:
            raise SystemExit(
                f"{folder} was measured with other sizes: {other}; set the same ones, or run without --resume"
            )
        return Journal(folder=folder)
    before = folder.with_name(folder.name + "-before")
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    folder.mkdir(parents=True)
    file.write_text(json.dumps(wanted), encoding="utf-8")
    return Journal(folder=folder)
