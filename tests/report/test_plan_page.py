"""A plan's page and the history's stand alone: in the text of the file, and in a real browser, light and dark."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from test_report_html import CHROMIUM, FLAGS, stands_alone

from cost_model.examples_mesh import machines, meshed, transformer
from tutti.cli.prediction_view import page_of_plan
from tutti.config.plan import PipelinePlan, Plan
from tutti.config.prediction import Estimate, MeasuredPoint, ScalingCurve, ScalingPoint, Trial, Trials
from tutti.cost_model import predict
from tutti.cost_model.rank_tracks import timeline
from tutti.reporting.plan_page import (
    PageTable,
    PlanPage,
    TableRow,
    plan_html,
    scaling_plot,
    timeline_plot,
    track_memory_plot,
    trials_plot,
)

GPIPE = meshed(64, 4, {"stage": 4}, pipeline=PipelinePlan(schedule="gpipe"))


def curve() -> ScalingCurve:
    points = tuple(
        ScalingPoint(devices=n, used=n, plan="shard", throughput_per_s=100.0 * n**0.7, worth=0.6 if n > 1 else None,
                     step_time_s=Estimate(value=1.0, low=0.7, high=1.4))
        for n in (1, 2, 4, 8)
    )  # fmt: skip
    return ScalingCurve(
        unit="samples", points=(*points, ScalingPoint(devices=16, reason="no <plan> fits")), pays_until=4,
        least_worth=0.5, sentence="more devices stop paying at 4",
        measured=(MeasuredPoint(devices=1, throughput_per_s=90.0),),
    )  # fmt: skip


def trials() -> Trials:
    estimate = Estimate(value=0.5, low=0.4, high=0.7)
    ran = Trial(plan=GPIPE, words="replicate 2", predicted=estimate, predicted_throughput_per_s=1.0, measured_s=0.6,
                least_s=0.55, most_s=0.8, measured_throughput_per_s=0.9, steps=6)  # fmt: skip
    died = replace(ran, words="split 2", measured_s=None, steps=0, failure="rank 1 died of <hunger>")
    return Trials(trials=(ran, died), best=0, sentence="the choice stands", unit="samples")


def page_for(plan: Plan) -> PlanPage:
    model, cards = transformer(), machines(1, 8)
    found = timeline(model, cards, plan)
    page = page_of_plan("<transformer> & more", plan, predict(model, cards, plan), found)
    rows = (TableRow(cells=("2", "replicate 2"), kind="chosen"), TableRow(cells=("4", "too <large>"), kind="off"))
    table = PageTable(title="Others", under="They lost.", columns=("ranks", "plan"), rows=rows, right=frozenset({0}))
    return replace(
        page, remarks=("Because of <this>",), changes=("At 1 bit/s all changes",), tables=(table,), scaling=curve(),
        trials=trials(), next_command="tutti run",
    )  # fmt: skip


@pytest.mark.parametrize("plan", [GPIPE, meshed(256, 128, {"stage": 4, "split": 2}), meshed(64, 2, {"replicate": 8})])
def test_page_is_well_formed_and_refers_to_nothing_outside(plan: Plan) -> None:
    text = plan_html(page_for(plan))
    assert stands_alone(text).count["svg"] == 2 * 4  # for wide and narrow screens
    for raw in ("<transformer>", "<this>", "<hunger>", "<large>", "<plan>"):
        assert raw not in text


def test_every_number_says_where_it_comes_from() -> None:
    text = plan_html(page_for(GPIPE))
    head = text.split("</header>")[0].split("<dl")[1]
    assert head.count('class="key"') == head.count(">predicted</span>") - 1  # and one for what would change
    tried = text.split("<h2>Measured trials</h2>")[1].split("</section>")[0]
    assert ">predicted</span>" in tried
    assert ">measured</span>" in tried
    devices = text.split("<h2>More devices</h2>")[1].split("</section>")[0]
    assert ">predicted</span>" in devices
    assert ">assumed</span>" in devices


def test_predicted_is_hatched_or_dashed_and_measured_solid() -> None:
    plot = track_memory_plot(timeline(transformer(), machines(1, 8), GPIPE))
    assert "<pattern" in plot.svg
    drawn = scaling_plot(curve())
    assert drawn is not None
    assert "stroke-dasharray" in drawn.svg
    assert "pays until 4" in drawn.svg
    both = trials_plot(trials())
    assert both is not None
    assert "<pattern" in both.svg
    assert "replicate 2" in both.svg
    assert "split 2" not in both.svg  # it has nothing to draw


def test_the_figure_says_what_it_leaves_out_and_draws_bubbles() -> None:
    plot = timeline_plot(timeline(transformer(), machines(1, 8), meshed(256, 128, {"stage": 4})))
    assert "of 128 left out at the gap" in plot.note
    for words in ("bubble", "exposed communication", "(stage 3)", "time of a step"):
        assert words in plot.svg
    assert "left out" not in timeline_plot(timeline(transformer(), machines(1, 8), GPIPE)).note


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_real_browser_shows_the_page_light_and_dark(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    page.write_text(plan_html(page_for(GPIPE)), encoding="utf-8")
    shots = []
    for scheme in ("1", "0"):
        shot = tmp_path / f"{scheme}.png"
        flags = [*FLAGS, f"--user-data-dir={tmp_path / scheme}", f"--blink-settings=preferredColorScheme={scheme}"]
        command = [str(CHROMIUM), *flags, f"--screenshot={shot}", "--window-size=1280,2600", page.as_uri()]
        subprocess.run(command, capture_output=True, timeout=90)
        shots.append(shot.read_bytes())
        assert shots[-1][:8] == b"\x89PNG\r\n\x1a\n"
        assert len(shots[-1]) > 100_000  # an empty page is a few kB
    assert shots[0] != shots[1]
