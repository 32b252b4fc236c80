"""Details of pages: marks of time axes, one step time, units alike in a table, and figures for narrow screens."""

import re
from pathlib import Path

import pytest
from run_folders import Story, rows, write_run

from tutti.config.run_report import Quantity
from tutti.reporting.build_report import build_report
from tutti.reporting.formatting import alike
from tutti.reporting.html_report import report_html
from tutti.reporting.report_figures import tick_text, time_ticks


@pytest.mark.parametrize(
    ("longest_s", "marks"),
    [
        (0.35, "0, 50 ms, 100 ms, 150 ms, 200 ms, 250 ms, 300 ms, 350 ms"),
        (12.0, "0, 2 s, 4 s, 6 s, 8 s, 10 s, 12 s"),
        (100.0, "0, 15 s, 30 s, 45 s, 60 s, 75 s, 90 s"),
        (229.0, "0, 30 s, 1 min, 1:30 min, 2 min, 2:30 min, 3 min, 3:30 min"),
        (1000.0, "0, 5 min, 10 min, 15 min"),
        (1500.0, "0, 5 min, 10 min, 15 min, 20 min, 25 min"),
        (5400.0, "0, 15 min, 30 min, 45 min, 1 h, 1 h 15, 1 h 30"),
        (9 * 3600.0, "0, 2 h, 4 h, 6 h, 8 h"),
        (7 * 86400.0, "0, 1 d, 2 d, 3 d, 4 d, 5 d, 6 d, 7 d"),
    ],
)
def test_time_is_marked_as_people_say_it(longest_s: float, marks: str) -> None:
    shown = [tick_text(tick, longest_s) for tick in time_ticks(longest_s)]
    assert ", ".join(shown) == marks


def test_a_page_has_one_step_time(tmp_path: Path) -> None:
    """Phases that vary against each other: their medians would not add up to the median step."""
    story = Story()
    lines = rows(story)
    for index, row in enumerate(row for row in lines if row["kind"] == "step"):
        phases = dict.fromkeys(row["phases"], 0.001)
        slow = ("data", "forward", "backward")[index % 3]
        phases[slow] = 0.1
        row.update(phases=phases, wall_s=sum(phases.values()))
    report = build_report(write_run(tmp_path / "run", story, metrics=lines))
    step_s = report.time.per_step.value
    assert step_s == pytest.approx(0.1 + 0.001 * (len(report.time.step_phases) - 1), rel=0.05)
    assert sum(q.value or 0 for q in report.time.step_phases.values()) == pytest.approx(step_s)
    drawn = [label for label in re.findall(r">([\d.]+ m?s)<", report_html(report)) if label.endswith("ms")]
    assert "105 ms" in drawn
    assert not {"6.00 ms", "5.00 ms"} & set(drawn), "sums of medians"


def test_units_are_alike_in_a_column() -> None:
    times = [Quantity(value=value, unit="s", evidence="measured") for value in (1.25, 0.004, 1e-5, 0.0)]
    assert [alike(times)(time) for time in times] == ["1.25 s", "0.00400 s", "< 0.001 s", "0 s"]
    sizes = [Quantity(value=value, unit="B", evidence="measured") for value in (3.2e9, 4.5e8)]
    assert [alike(sizes)(size) for size in sizes] == ["3.20 GB", "0.450 GB"]
    mixed = [Quantity(value=2.0, unit=unit, evidence="measured") for unit in ("s", "B")]
    assert [alike(mixed)(one) for one in mixed] == ["2 s", "2 B"]
    assert alike(times)(Quantity(unit="s")) == "not recorded"


def test_figures_have_a_form_for_narrow_screens(tmp_path: Path) -> None:
    text = report_html(build_report(write_run(tmp_path / "run")))
    wide = re.findall(r'</figcaption>\s*<svg viewBox="0 0 ([\d.]+)', text)
    narrow = re.findall(r'<div class="narrow"><svg viewBox="0 0 ([\d.]+)', text)
    assert len(wide) == len(narrow) > 4
    assert all(float(width) <= 340 for width in narrow), "text keeps its size on 390 pixels"
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert "figure .narrow { display: none; }" in text
