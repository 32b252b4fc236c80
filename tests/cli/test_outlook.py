"""What plan and predict show beside the table: the step in letters, memory, the page, the trials' verdict."""

import itertools
import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from cost_model.examples import cluster, cpu, link
from cost_model.examples_mesh import machines, meshed, transformer
from report.run_folders import write_run
from tutti.cli import plan as plan_command
from tutti.cli import predict as predict_command
from tutti.cli.plan_view import drawn, held, show_timeline
from tutti.cli.prediction_view import show_trials, trust_here
from tutti.commands.plan_trials import check_here, fastest, said, with_node_order
from tutti.commands.planned import with_measured
from tutti.config import serialization
from tutti.config.plan import PipelinePlan, Plan
from tutti.config.prediction import Estimate, ScalingCurve, Trial, Trials
from tutti.cost_model.rank_tracks import timeline
from tutti.errors import LaunchError, PlanError, ScriptError
from tutti.planner import Choice
from tutti.reporting.prediction_history import build_history, run_folders
from tutti.trainer.metrics import read_rows

GPIPE = meshed(64, 4, {"stage": 4}, pipeline=PipelinePlan(schedule="gpipe"))


def call(command: Any, *arguments: str) -> Result:
    result = CliRunner().invoke(command, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    specs = {"cluster": machines(1, 4), "model": transformer(), "plan": GPIPE}
    return {name: str(serialization.save(spec, tmp_path / f"{name}.json")) for name, spec in specs.items()}


def test_a_step_in_letters_is_as_wide_as_asked_and_in_order() -> None:
    found = timeline(transformer(), machines(1, 4), GPIPE)
    step = found.step_time_s.value
    texts = [drawn(track, found.left_out, step, 80).plain for track in found.tracks]
    assert {len(text) for text in texts} == {80}
    assert texts[0].startswith("f")
    assert texts[3].startswith(".")  # the last stage waits for the first microbatch
    assert texts[3].index("b") < texts[0].index("b")  # and begins backward first
    assert texts[0].count("f") == pytest.approx(80 * found.tracks[0].seconds["forward"] / step, abs=5)


def test_a_long_step_shows_where_it_is_cut() -> None:
    found = timeline(transformer(), machines(1, 4), meshed(256, 128, {"stage": 4}))
    assert found.left_out is not None
    text = drawn(found.tracks[0], found.left_out, found.step_time_s.value, 80).plain
    assert len(text) == 80
    assert text.count("//") == 1
    shown = sum(bar.lasts_s for bar in found.tracks[0].bars)
    for letter, doing in (("f", "forward"), ("b", "backward"), (".", "bubble")):  # however narrow the bars are
        lasts = sum(bar.lasts_s for bar in found.tracks[0].bars if bar.doing == doing)
        assert text.count(letter) == pytest.approx(78 * lasts / shown, abs=2)


def test_memory_in_letters_says_what_holds_it_and_what_is_too_much() -> None:
    track = timeline(transformer(), machines(1, 4), meshed(64, 1)).tracks[0]
    text = held(track, 100).plain
    assert len(text) == 100
    assert text.count(".") == pytest.approx(100 * (1 - track.memory.total / track.memory_limit_nbytes), abs=1)
    over = serialization.from_data(
        type(track), {**serialization.to_data(track), "memory_limit_nbytes": track.memory.total / 2}
    )
    assert held(over, 100).plain.index("|") == 50
    out = Console(record=True, width=120)
    found = timeline(transformer(), machines(1, 4), meshed(64, 1))
    show_timeline(
        out,
        serialization.from_data(type(found), {**serialization.to_data(found), "tracks": [serialization.to_data(over)]}),
    )
    assert ": too much" in out.export_text()


@pytest.mark.parametrize("width", [90, 120, 160])
@pytest.mark.parametrize("plan", [GPIPE, meshed(64, 2, {"stage": 2, "split": 2})])
def test_the_legend_has_the_letters_that_are_drawn(plan: Plan, width: int) -> None:
    out = Console(record=True, width=width)
    show_timeline(out, timeline(transformer(), machines(1, 4), plan))
    lines = out.export_text().splitlines()
    legend = next(line for line in lines if " forward " in line)
    rows = [line for line in lines[: lines.index(legend)] if line.startswith("rank")]
    shown = {letter for line in rows for letter in re.split(r"  +", line)[1]}
    assert {"f", "b", "o"} < shown
    rest = itertools.takewhile(lambda line: not line.startswith("Memory"), lines[lines.index(legend) :])
    entries = [part for line in rest for part in re.split(r"   +", line.strip()) if re.match(r"\S ", part)]
    assert {part.split()[0] for part in entries} == shown


def test_a_pipelines_bubbles_are_named_where_they_are_counted(files: dict[str, str]) -> None:
    given = ("--cluster", files["cluster"], "--model", files["model"])
    assert "exposed communication or bubble" in call(predict_command.command, *given, files["plan"]).stdout
    one = str(serialization.save(meshed(64, 1), Path(files["plan"]).with_name("one.json")))
    shown = call(predict_command.command, *given, one).stdout
    assert "bubble" not in shown
    assert "Predicted step: " in shown.splitlines()[0]  # whole, whatever the width of the table below
    assert re.search(r"^Predicted memory of a rank: \S+ [GM]iB$", shown, re.MULTILINE)


def test_predict_draws_the_step_and_writes_a_page(files: dict[str, str], tmp_path: Path) -> None:
    page = tmp_path / "pages" / "one.html"
    given = ("--cluster", files["cluster"], "--model", files["model"], "--html", str(page), files["plan"])
    shown = call(predict_command.command, *given)
    assert "One step, predicted:" in shown.stdout
    assert "rank 3 (stage 3)" in shown.stdout
    assert "bubble" in shown.stdout
    assert "page written to" in shown.stderr
    text = page.read_text(encoding="utf-8")
    assert "transformer on here" in text
    assert "Stage (pipeline parallel) 4 with gpipe, 4 microbatches" in text


def test_plan_writes_a_page_and_a_curve_into_its_document(files: dict[str, str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    given = ("--cluster", files["cluster"], "--model", files["model"], "--global-batch-size", "64", "--scaling")
    result = call(plan_command.command, *given, "--what-if", "node-link=1gbit", "--html", str(page), "--json")
    data = json.loads(result.stdout)
    assert serialization.from_data(Choice, data["choice"]).best.world_size >= 1
    assert [point.devices for point in serialization.from_data(ScalingCurve, data["scaling"]).points] == [1, 2, 4]
    assert data["timeline"]["tracks"]
    assert [scenario["change"] for scenario in data["scenarios"]] == ["1 Gbit/s on node links"]
    text = page.read_text(encoding="utf-8")
    for words in ("Speed against devices", "The alternatives", "Memory of a rank", "Nothing was run", "What if"):
        assert words in text
    shown = call(plan_command.command, *given).stdout
    for words in ("One step, predicted", "Memory of a rank, predicted", "Speed against devices, predicted"):
        assert words in shown


def trial(words: str, predicted: float, steps: tuple[float, float, float] | None = None, **fields: Any) -> Trial:
    """A trial with the least, median and most of its steps."""
    least, middle, most = steps or (None, None, None)
    estimate = Estimate(value=predicted, low=predicted / 1.5, high=predicted * 1.5)
    return Trial(
        plan=meshed(64, 1, {"replicate": 2}), words=words, predicted=estimate,
        predicted_throughput_per_s=64 / predicted,
        measured_s=middle, least_s=least, most_s=most, measured_throughput_per_s=64 / middle if middle else None,
        steps=5 if middle else 0, **fields,
    )  # fmt: skip


def test_the_choice_changes_only_where_another_is_clearly_quicker() -> None:
    first, close = trial("a", 1.0, (0.95, 1.2, 1.5)), trial("b", 1.1, (0.9, 1.0, 1.1))
    quick, dead = trial("c", 1.2, (0.7, 0.8, 0.9)), trial("d", 1.3, failure="rank 1 ended")
    assert fastest([first, close]) == 0  # 1.0 is within the steps of the first
    assert "stands: a measured 1.2 s; b measured 1 s, which the spread" in said([first, close], 0)
    assert fastest([first, close, quick, dead]) == 2
    assert said([first, quick], 1) == (
        "2 plans ran, and the choice changes to c: it measured 800 ms; the predicted best, a, measured 1.2 s."
    )
    assert fastest([dead, first]) == 1
    assert "the predicted best, d, did not run" in said([dead, first], 1)
    assert fastest([dead]) is None
    assert said([dead, dead], None) == ("none of the plans that were tried ran, so nothing was measured: rank 1 ended")
    assert "none was faster" in said([quick, first], 0)


def test_trials_are_ranked_by_what_was_measured_and_noise_is_told() -> None:
    found = (
        trial("slow", 1.0, (1.9, 2.0, 2.1)),
        trial("quick", 1.1, (1.0, 1.05, 1.1)),
        trial("no", 2.0, failure="died"),
    )
    trials = Trials(trials=found, best=1, sentence="so it is", unit="samples", load=3.0, cores=2)
    out = Console(record=True, width=160)
    show_trials(out, trials)
    text = out.export_text()
    assert text.index("quick") < text.index("slow") < text.index("died")
    assert "other programs ran at the same time (load 3.0 on 2 cores)" in text
    assert trials.changed
    assert found[0].within is False
    assert found[1].within is True
    assert found[0].error == pytest.approx(-0.5)
    curve = ScalingCurve(unit="samples", points=(), pays_until=0, least_worth=0.5, sentence="x")
    assert [(p.devices, p.throughput_per_s) for p in with_measured(curve, trials).measured] == [(2, 64 / 1.05)]


def test_plans_that_cannot_run_here_are_refused(files: dict[str, str], tmp_path: Path) -> None:
    given = ("--cluster", files["cluster"], "--model", files["model"], "--global-batch-size", "64", "--try", "2")
    with pytest.raises(ScriptError, match="a described model cannot run; name a script"):
        call(plan_command.command, *given)

    class Asked:
        target = (str(tmp_path / "train.py"),)
        model = None

    with pytest.raises(PlanError, match="has 4 hosts; leave --cluster out"):
        check_here(machines(4, 1), Asked())  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"accelerators, but here has \d+"):
        check_here(machines(1, 1000), Asked())  # type: ignore[arg-type]


def test_nodes_are_seated_in_the_order_of_the_choice() -> None:
    from planner.machines import mixed

    both = mixed()
    assert with_node_order(both, ()) == both
    assert [node.name for node in with_node_order(both, ("b", "a")).nodes] == ["b", "a"]


def test_past_runs_for_the_same_cluster_tell_how_far_to_trust(tmp_path: Path) -> None:
    assert trust_here("here", tmp_path / "none") == ""
    write_run(tmp_path / "runs" / "one")  # predicted 9.5 ms, measured 10.5 ms
    assert "1 run on here: steps took longer than predicted (median error −9.5 %)" in trust_here(
        "here", tmp_path / "runs"
    )
    assert trust_here("elsewhere", tmp_path / "runs") == ""


SCRIPT = """
import torch, tutti
job = tutti.Job(global_batch_size=8, seed=0)
data = torch.utils.data.TensorDataset(torch.randn(400, 16), torch.randint(0, 4, (400,)))
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
model, optimizer, loader = job.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), data, torch.nn.functional.cross_entropy)
for epoch in job.epochs(2):
    for batch in loader:
        job.step(batch)
"""


@pytest.mark.long
def test_plans_are_really_run_for_as_many_steps_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT, encoding="utf-8")
    host = cluster(cpu(cores=2), (link("node", 5e-5, 2e9),), devices_per_node=2)
    serialization.save(host, Path("here.json"))
    given = ("--cluster", "here.json", "--nproc", "2", "--data-parallel", "--try", "2", "--try-steps", "5")
    command = [sys.executable, "-m", "tutti.cli.main", "plan", *given, "--output", "best.json", "--json", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = serialization.from_data(Trials, json.loads(done.stdout)["trials"])
    assert [one.steps for one in found.trials] == [3, 3]  # of 5, without the first 2
    assert all(one.measured_s is not None and one.least_s is not None for one in found.trials)
    assert all(one.plan.world_size == 2 for one in found.trials)
    chosen = serialization.load(Plan, Path("best.json"))
    assert found.best is not None
    assert serialization.digest(replace(chosen, made_for={})) == serialization.digest(
        replace(found.trials[found.best].plan, made_for={})
    )
    assert build_history(run_folders([Path("runs")])).trust[0].runs == 2


def test_a_brief_run_ends_after_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_OBSERVER", "tutti.trainer.observer:stop_after_steps")
    monkeypatch.setenv("TUTTI_RUN_FOLDER", str(tmp_path / "run"))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    with pytest.raises(LaunchError, match="TUTTI_STEPS is not set"):
        runpy.run_path(str(script))
    monkeypatch.setenv("TUTTI_STEPS", "4")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script))
    assert ended.value.code == 0
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert sum(row["kind"] == "step" for row in rows) == 4


def test_plans_are_the_same_data_after_a_trial() -> None:
    found = Trials(trials=(trial("a", 1.0, (0.9, 1.0, 1.1)),), best=0, sentence="s", unit="samples")
    assert serialization.loads(Trials, serialization.dumps(found)) == found
    assert isinstance(found.trials[0].plan, Plan)
