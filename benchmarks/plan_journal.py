"""What the plan benchmark has measured so far, in a folder: a run that was interrupted goes on from there."""

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
    """A folder with the sizes, a file for each cluster that was probed, and one of rows for each visit of a case: a
    line for each plan and rank."""

    folder: Path

    def cluster(self, words: str) -> ClusterSpec | None:
        """The cluster as it was probed for the links and ranks that `words` say, if it was."""
        path = self._path(words, "json")
        return serialization.load(ClusterSpec, path) if path.exists() else None

    def keep_cluster(self, words: str, cluster: ClusterSpec) -> None:
        serialization.save(cluster, self._path(words, "json"))

    def rows_file(self, words: str) -> Path:
        return self._path(words, "jsonl")

    def _path(self, words: str, ending: str) -> Path:
        return self.folder / f"{words.replace(', ', '-').replace(' ', '-')}.{ending}"


def outcomes(rows_file: Path, ranks: int) -> dict[str, Row]:
    """Name -> what became of a plan, for those of which every rank, or a failed one, has said it."""
    found: dict[str, dict[int, Row]] = {}
    for line in rows_file.read_text(encoding="utf-8").splitlines() if rows_file.exists() else []:
        row = json.loads(line)
        found.setdefault(row.pop("name"), {})[row.pop("rank")] = row
    return {name: merged(rows) for name, rows in found.items() if len(rows) == ranks or any(map(_lost, rows.values()))}


def _lost(row: Row) -> bool:
    return "failed" in row


def merged(rows: dict[int, Row]) -> Row:
    """One outcome of a plan from those of its ranks: the cause of a failure; else rank 0's times and paces, every
    rank's phases, processor time and bytes, and the fullest rank's memory."""
    lost = {rank: row for rank, row in rows.items() if _lost(row)}
    if lost:
        rank = min(lost, key=lambda rank: (lost[rank]["peer"], rank))  # a rank that lost another only says so
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
    """One outcome of a plan from those of its visits: the first that is no measurement; else all steps' times, visit by
    visit, phases and processor time of the middle visit, and the most memory, stolen time and steps set aside."""
    if not all("step_s" in row for row in visits):
        return next(row for row in visits if "step_s" not in row)
    middle = sorted(visits, key=lambda row: statistics.median(row["step_s"]))[len(visits) // 2]
    return {
        **middle,
        "visits_s": [row["step_s"] for row in visits],
        **{name: max(row[name] for row in visits) for name in ("stolen", "set_aside", "peak_nbytes")},
    }


def opened(folder: Path, sizes: Any, *, resume: bool) -> Journal:
    """The journal in `folder`: what is there if `resume`, else a new one, what was there moved beside it.

    Raises SystemExit where what is to be gone on with was measured with other sizes, or is not there.
    """
    own = json.loads(json.dumps(dataclasses.asdict(sizes)))
    file = folder / "sizes.json"
    if resume:
        if not file.exists():
            raise SystemExit(f"there is no run to go on with in {folder}; run without --resume")
        other = json.loads(file.read_text(encoding="utf-8"))
        if other != own:
            raise SystemExit(f"{folder} was measured with {other}; set the same sizes, or run without --resume")
        return Journal(folder=folder)
    before = folder.with_name(folder.name + "-before")
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    folder.mkdir(parents=True)
    file.write_text(json.dumps(own), encoding="utf-8")
    return Journal(folder=folder)
