"""The timeline of the last steps: its numbers are those of the ranks' flight records, and the page shows them."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from run_folders import Story, write_run
from test_report_html import stands_alone

from tutti.event_record import FILE_NAME, EventKind, EventRecord, RankEvent, RecordState, read_record
from tutti.reporting.formatting import duration
from tutti.reporting.rank_timeline import MOST_ROWS, MOST_SPANS, RankTimeline, read_timeline, timeline_of
from tutti.reporting.report_files import write_report
from tutti.reporting.timeline_figure import timeline_plot

SCRIPT = """
import time
import torch
from torch import nn
import tutti

job = tutti.Job(global_batch_size=8, seed=0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
model, optimizer, loader = job.prepare(model, optimizer, data, nn.functional.mse_loss)
for _ in job.epochs(3):
    for batch in loader:
        if job.rank == 1:
            time.sleep(0.02)
        job.step(batch)
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two ranks, of which rank 1 sleeps before each step."""
    path = tmp_path_factory.mktemp("timeline")
    (path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "tutti.cli.main", "run", "--no-predict", "--nproc", "2", "--folder", "run"]
    done = subprocess.run([*command, "train.py"], cwd=path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return path / "run"


@pytest.fixture
def folder(real: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(real, tmp_path / "run"))


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the time in which at least one interval lasts, by counting those that are open."""
    edges = sorted([(begun, 1) for begun, _ in intervals] + [(ended, -1) for _, ended in intervals])
    total, deep = 0.0, 0
    for (time_s, change), (next_s, _) in pairwise(edges):
        deep += change
        total += (next_s - time_s) * (deep > 0)
    return total


def test_waits_of_a_real_run_are_those_of_its_events(real: Path) -> None:
    timeline = read_timeline(real, [0, 1])
    records = [read_record(real / f"ranks/{rank}" / FILE_NAME) for rank in (0, 1)]
    steps = [[event for event in record.events if event.name == "job.step"] for record in records]
    shown = len(timeline.steps)
    assert [number for number, _ in timeline.steps] == list(range(19 - shown, 19))
    batches = [
        [event for event in record.events if event.kind == "loader" and event.begun_s < of_rank[-shown].begun_s][-1]
        for record, of_rank in zip(records, steps, strict=True)
    ]
    # monotonic times, which both ranks share
    left = min(batch.begun_s - record.clock_offset_s for batch, record in zip(batches, records, strict=True))
    right = max((of[-1].ended_s or 0) - record.clock_offset_s for of, record in zip(steps, records, strict=True))
    assert timeline.seconds == pytest.approx(right - left, abs=5e-6)
    for row, record in zip(timeline.rows, records, strict=True):
        waits = [
            (max(event.begun_s - record.clock_offset_s, left), min(event.ended_s - record.clock_offset_s, right))
            for event in record.events
            if event.ended_s and (event.kind == "wait" or (event.kind == "collective" and event.blocking))
        ]
        expected = covered([(begun, ended) for begun, ended in waits if ended > begun])
        assert expected > 0
        assert row.waited_s == pytest.approx(expected, abs=2e-5)
        drawn = sum(span.total_s for span in row.spans if span.activity in ("waiting", "exchanging"))
        assert drawn == pytest.approx(expected, abs=2e-5)
    waited = sum(row.waited_s for row in timeline.rows)
    assert f"2 ranks waited {duration(waited)} for communication" in timeline.sentence
    most = max((0, 1), key=lambda rank: timeline.rows[1 - rank].waited_for.get(rank, 0.0))
    assert f"longest for rank {most} to begin a collective" in timeline.sentence
    assert "share its monotonic clock" in timeline.clock


def test_the_page_of_a_real_run_shows_them(folder: Path) -> None:
    write_report(folder)
    page, timeline = (folder / "report/report.html").read_text(), read_timeline(folder, [0, 1])
    stands_alone(page)
    section = page.split("The last steps, rank by rank")[1].split("</section>")[0]
    assert timeline.sentence in section
    for row in timeline.rows:
        assert f">waits {duration(row.waited_s)}</text>" in section
    assert all(f">step {number}</text>" in section for number, _ in timeline.steps)
    for words in ("shared-memory exchange", "of float32", "ranks 0 and 1", "gradients over replicate", "time (ms)"):
        assert words in section
    titles = re.findall(r"<title>([^<]*)</title>", section)
    assert len(titles) == sum(len(row.spans) for row in timeline.rows)
    for rank in (0, 1):
        (folder / f"ranks/{rank}" / FILE_NAME).unlink()
    write_report(folder)
    without = (folder / "report/report.html").read_text()
    assert "rank by rank" not in without
    assert 5_000 < len(page) - len(without) < 100_000


def test_damaged_records_are_named(folder: Path) -> None:
    record = folder / "ranks/1" / FILE_NAME
    record.write_bytes(record.read_bytes()[:-1])
    timeline = read_timeline(folder, [0, 1])
    assert [row.rank for row in timeline.rows] == [0]
    assert "rank 1" in timeline.note
    assert "it is cut short" in timeline.note
    (folder / "ranks/0" / FILE_NAME).write_bytes(b"nothing")
    write_report(folder)
    section = (
        (folder / "report/report.html").read_text().split("The last steps, rank by rank")[1].split("</section>")[0]
    )
    assert "<svg" not in section
    assert "The same holds for 1 more rank" in section


def test_a_run_without_records_shows_nothing(tmp_path: Path) -> None:
    write_report(write_run(tmp_path / "run", Story()))
    assert "rank by rank" not in (tmp_path / "run/report/report.html").read_text()
    assert read_timeline(tmp_path / "run", [0, 1]) == RankTimeline()


class Recorded:
    """The record of a rank, written by hand in milliseconds."""

    def __init__(self, rank: int, ranks: int, host: str = "a", offset_s: float = 1e6, late_s: float = 0.0) -> None:
        self.events: list[RankEvent] = []
        self._late_s, self._offset_s = late_s, offset_s
        self.state = RecordState(
            rank=rank, world_size=ranks, host=host, pid=100 + rank, started_ticks=0, newest=0, steps=9, slowest_s=1,
            latest_s=0.02, step=40, step_ended_s=None, waits_since_s=None, waits_for="", ended=True,
        )  # fmt: skip

    def add(self, kind: EventKind, name: str, begun_ms: float, ended_ms: float | None, call: int = 0) -> "Recorded":
        begun_s, ended_s = (None if ms is None else 1e6 + ms / 1e3 + self._late_s for ms in (begun_ms, ended_ms))
        assert begun_s is not None
        ranks = ",".join(map(str, range(self.state.world_size)))
        self.events.append(
            RankEvent(
                number=len(self.events) + 1, kind=kind, name=name, begun_s=begun_s, ended_s=ended_s,
                group=f"{ranks}#0" if call else "", sequence=call,
                blocking=kind in ("wait", "loader") or name == "barrier",
            )
        )  # fmt: skip
        return self

    def record(self) -> EventRecord:
        return EventRecord(state=self.state, events=tuple(self.events), clock_offset_s=self._offset_s)


def step(recorded: Recorded, at: float, begun: float, ended: float, call: int) -> Recorded:
    """Add a step from `at` to `ended`, in which the rank begins an all-reduce and waits for it."""
    recorded.add("loader", "next batch", at, at + 1).add("operation", "job.step", at + 1, ended)
    recorded.add("collective", "all_reduce", begun, ended - 1, call)
    return recorded.add("wait", "gradients over replicate", begun, ended - 1)


def test_who_waits_for_whom() -> None:
    ranks = [Recorded(rank, 3) for rank in range(3)]
    for number in range(8):
        for rank, begun in enumerate((5, 12, 8)):
            step(ranks[rank], 20 * number, 20 * number + begun, 20 * number + 18, number + 1)
    timeline = timeline_of({rank: recorded.record() for rank, recorded in enumerate(ranks)})
    assert [(number, round(1e3 * begun, 3)) for number, begun in timeline.steps] == [
        (35 + n, 20.0 * n) for n in range(6)
    ]
    assert timeline.seconds == pytest.approx(0.118)
    assert [row.waited_s for row in timeline.rows] == pytest.approx([6 * 0.012, 6 * 0.005, 6 * 0.009])
    assert [dict(row.waited_for).get(1, 0.0) for row in timeline.rows] == pytest.approx([6 * 0.007, 0, 6 * 0.004])
    assert "for rank 1 to begin a collective: 66.0 ms together, mostly in all-reduce." in timeline.sentence
    first = [span for span in timeline.rows[0].spans if span.activity in ("waiting", "exchanging")][:2]
    assert [(span.activity, round(1e3 * span.begun_s, 3), round(1e3 * span.ended_s, 3)) for span in first] == [
        ("waiting", 5, 12), ("exchanging", 12, 17),
    ]  # fmt: skip


def test_a_rank_that_never_came_is_waited_for_until_the_end() -> None:
    ranks = [step(Recorded(rank, 2), 0, 5, 10, 1) for rank in range(2)]
    for recorded in ranks:
        recorded.add("loader", "next batch", 20, 21).add("operation", "job.step", 21, None)
    ranks[0].add("collective", "barrier", 30, None, 2)
    ranks[1].add("operation", "another", 900, 1000)
    timeline = timeline_of({rank: recorded.record() for rank, recorded in enumerate(ranks)})
    assert timeline.rows[0].waited_for == pytest.approx({1: 0.970})
    assert "for rank 1 to begin a collective: 970 ms, mostly in barrier" in timeline.sentence
    assert [number for number, _ in timeline.steps] == [40, 41]


def test_what_a_ring_has_lost_is_unknown_and_overlapping_waits_count_once() -> None:
    ranks = [Recorded(rank, 2) for rank in range(2)]
    for number in range(3):
        for rank, begun in enumerate((5, 12)):
            step(ranks[rank], 20 * number, 20 * number + begun, 20 * number + 18, number + 1)
    ranks[0].add("wait", "scalars", 56.5, 57.5)  # the step's own wait ends at 57
    ranks[1].events[:] = ranks[1].events[-2:]
    timeline = timeline_of({rank: recorded.record() for rank, recorded in enumerate(ranks)})
    assert timeline.rows[0].waited_for == pytest.approx({1: 0.007})
    assert timeline.rows[0].waited_s == pytest.approx(3 * 0.012 + 0.0005)
    assert timeline.rows[0].unknown_s == pytest.approx(2 * 0.012 + 0.0005)


@pytest.mark.parametrize("tight", [True, False])
def test_hosts_are_compared_only_if_collectives_tell_their_clocks(tight: bool) -> None:
    ranks = [Recorded(0, 2), Recorded(1, 2, host="b", offset_s=5e5, late_s=0.3)]
    for number in range(3):
        for rank, begun in enumerate((5, 12)):
            step(ranks[rank], 20 * number, 20 * number + begun, 20 * number + 18, 2 * number + 1)
            if tight:  # a collective that rank 1 enters last, and one that rank 0 does
                ranks[rank].add(
                    "collective", "barrier", 20 * number + 18 + 0.1 * rank, 20 * number + 18.2, 2 * number + 2
                )
    ranks[0].add("collective", "barrier", 59.1, 59.2, 99)
    ranks[1].add("collective", "barrier", 59.0, 59.2, 99)
    records = {rank: recorded.record() for rank, recorded in enumerate(ranks)}
    if not tight:
        records[1] = replace(records[1], events=tuple(e for e in records[1].events if e.sequence != 99))
    timeline = timeline_of(records)
    if tight:
        assert "-300 ms to its Unix time, known to ±0.1" in timeline.clock
        assert timeline.rows[0].waited_for[1] == pytest.approx(3 * 0.007, abs=1e-3)
    else:
        assert "cannot be compared" in timeline.clock
        assert timeline.rows[0].waited_for == {}
        assert "it is not known who came last" in timeline.sentence


def test_of_many_ranks_the_slowest_are_shown_and_little_of_the_page_is_taken() -> None:
    ranks = [Recorded(rank, 40) for rank in range(40)]
    for number in range(8):
        for rank, recorded in enumerate(ranks):
            step(
                recorded, 20 * number, 20 * number + (16 if rank == 33 else 5 + rank / 20), 20 * number + 18, number + 1
            )
            for part in range(200):  # more than can be drawn
                recorded.add("loader", "next batch", 20 * number + 1 + part / 50, 20 * number + 1.01 + part / 50)
    timeline = timeline_of({rank: recorded.record() for rank, recorded in enumerate(ranks)})
    assert len(timeline.rows) == MOST_ROWS
    assert 33 in [row.rank for row in timeline.rows]
    assert "Of 40 ranks, the 16 are shown that waited least" in timeline.note
    assert "for rank 33 to begin" in timeline.sentence
    assert sum(len(row.spans) for row in timeline.rows) <= MOST_SPANS
    plot = timeline_plot(timeline)
    assert plot is not None
    assert len(plot.svg) + len(plot.narrow) < 100_000
