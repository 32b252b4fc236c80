"""What the report says of communication and of experts, from rows whose numbers are known."""

from pathlib import Path
from typing import Any

import pytest
from run_folders import Story, rank_rows, rows, write_lines, write_run

from tutti.config import serialization
from tutti.config.run_folder import RunFolder
from tutti.config.run_report import RunReport
from tutti.reporting.build_report import build_report
from tutti.reporting.html_report import report_html
from tutti.reporting.terminal_report import as_text, report_table


def entry(carried: str, nbytes: int, in_progress_s: float | None, **exposed_s: float) -> dict[str, Any]:
    return {
        "axes": "replicate+space" if carried == "gradients" else "space",
        "carried": carried,
        "count": 4,
        "nbytes": nbytes,
        "in_progress_s": in_progress_s,
        "exposed_s": exposed_s,
    }


def with_communication(story: Story) -> list[dict[str, Any]]:
    """Halos are under way for 2 ms of a step, of which 0.5 ms are waited for; every 10th step is disturbed."""
    told = rows(story)
    for row in told:
        if row["kind"] == "step":
            slow = 50.0 if row["step"] % 10 == 0 else 1.0
            row["exchanged_nbytes"] = 7000
            row["communication"] = [
                entry("halos", 7000, 0.002 * slow, forward=0.0003 * slow, backward=0.0002 * slow),
                entry("gradients", 36_392, 0.001 * slow, exposed_communication=0.0004 * slow),
                entry("scalars", 32, None, exposed_communication=1e-5 * slow),
                {"axes": "space", "carried": "pigeons", "count": 1, "nbytes": 1, "in_progress_s": 1.0, "exposed_s": {}},
            ]
    return told


def with_experts(story: Story) -> list[dict[str, Any]]:
    told = rows(story)
    for row in told:
        if row["kind"] == "step":
            row["experts"] = {
                "blocks.0": {"assigned": 128, "dropped": 8, "balance_loss": 1.25},
                "blocks.1": {"assigned": 128, "dropped": 0, "balance_loss": 1.0},
            }
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    story = Story(epochs=2)
    return write_run(tmp_path_factory.mktemp("told") / "run", story, metrics=with_communication(story))


def test_lanes_are_medians_of_the_steady_steps_and_what_is_not_exposed_is_hidden(folder: Path) -> None:
    report = build_report(folder)
    halos, gradients, scalars = (
        next(one for one in report.communication if one.carried == kind) for kind in ("halos", "gradients", "scalars")
    )
    assert len(report.communication) == 3  # a word that is not known here is left out
    assert report.communication[0] is gradients  # the most bytes first
    assert (gradients.axes, halos.axes) == ("replicate+space", "space")
    assert halos.sent.value == 7000
    assert halos.exchanges.value == 4
    assert halos.in_progress.value == pytest.approx(0.002)
    assert halos.exposed.value == pytest.approx(0.0005)
    assert {phase: q.value for phase, q in halos.exposed_in.items()} == pytest.approx(
        {"forward": 0.0003, "backward": 0.0002}
    )
    assert halos.hidden.value == pytest.approx(0.75)
    assert gradients.hidden.value == pytest.approx(0.6)
    assert scalars.in_progress.value is None
    assert scalars.hidden.value is None
    assert scalars.exposed.value == pytest.approx(1e-5)
    assert serialization.from_data(RunReport, serialization.to_data(report)) == report


def test_a_lane_that_most_steps_do_not_use_is_nothing_in_a_typical_step(tmp_path: Path) -> None:
    story = Story(epochs=1)
    told = rows(story)
    for row in told:
        if row["kind"] == "step" and row["step"] == 7:
            row["communication"] = [entry("halos", 100, 0.1, forward=0.1)]
    (lane,) = build_report(write_run(tmp_path / "run", story, metrics=told)).communication
    assert (lane.sent.value, lane.in_progress.value, lane.exposed.value, lane.hidden.value) == (0, 0, 0, None)


def test_steps_that_a_gpu_did_not_time_are_left_out(tmp_path: Path) -> None:
    story = Story(epochs=1)
    told = with_communication(story)
    for row in told:
        if row["kind"] == "step" and row["step"] % 10:
            row["timed"] = False
    halos = next(one for one in build_report(write_run(tmp_path / "run", story, metrics=told)).communication)
    assert halos.in_progress.value == pytest.approx(0.05)  # only the slow ones were timed


def test_bytes_sent_are_gradients_and_activations_of_the_rank_that_sends_most(folder: Path, tmp_path: Path) -> None:
    report = build_report(folder)
    assert report.sent_per_step.value == 9098 * 4 + 7000
    check = next(one for one in report.checks if one.name == "bytes sent by a rank in a step")
    assert check.measured == report.sent_per_step
    assert check.error.value == pytest.approx((36_392 - 43_392) / 43_392)
    story = Story(epochs=2)
    path = write_run(tmp_path / "run", story, metrics=with_communication(story))
    told = [{**row, "sent_nbytes": 50_000} if row["kind"] == "step" else row for row in rank_rows(story, 1)]
    write_lines(RunFolder(path).rank(1) / "metrics.jsonl", told)
    assert build_report(path).sent_per_step.value == 50_000


def test_experts_are_counted_over_the_run_by_layer(tmp_path: Path) -> None:
    story = Story(epochs=1)
    report = build_report(write_run(tmp_path / "run", story, metrics=with_experts(story)))
    first, second = report.experts
    assert (first.name, second.name) == ("blocks.0", "blocks.1")
    assert (first.assigned.value, first.dropped.value) == (20 * 128, 20 * 8)
    assert first.share.value == pytest.approx(1 / 16)
    assert first.balance_loss.value == 1.25
    assert (second.dropped.value, second.share.value) == (0, 0)


def test_runs_without_either_say_nothing_of_them(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run"))
    assert report.communication == report.experts == ()
    text, page = as_text(report_table(report)), report_html(report)
    assert "communication per step" not in text
    assert "<h2>Communication</h2>" not in page
    assert "<h2>Experts</h2>" not in page


def test_the_terminal_and_the_page_show_them(folder: Path, tmp_path: Path) -> None:
    report = build_report(folder)
    text, page = as_text(report_table(report)), report_html(report)
    line = next(line for line in text.splitlines() if "halos of neighbours" in line)
    assert line.split() == ["space", "halos", "of", "neighbours", "4", "7", "kB", "2", "ms", "500", "µs", "75", "%"]
    assert "replicate and space" in text
    section = page.split("<h2>Communication</h2>")[1].split("</section>")[0]
    assert "Exposed and hidden communication" in section
    assert "2.00 ms, 75 % hidden" in section or "2 ms, 75 % hidden" in section
    assert section.count("<tr>") == 4  # the heading and three lanes
    assert "in forward" in section
    assert "after backward" in section
    story = Story(epochs=1)
    experts = build_report(write_run(tmp_path / "run", story, metrics=with_experts(story)))
    assert "6.25 %" in as_text(report_table(experts))
    assert "6.25 %" in report_html(experts).split("<h2>Experts</h2>")[1].split("</section>")[0]
