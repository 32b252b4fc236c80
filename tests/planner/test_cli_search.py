"""`tutti plan` over all meshes: objectives, limits, what-if, differences of plans, named models, stamped plans."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from cost_model.examples import plan
from planner.machines import cards
from tutti.cli import plan as plan_command
from tutti.cli import predict as predict_command
from tutti.cli.plan_options import DURATION, SIZE
from tutti.cli.plan_view import Differences, Scenarios
from tutti.cli.prediction_view import SCENARIO_COLUMNS, scenario_rows
from tutti.commands.plan_trials import words_in_full
from tutti.commands.planned import Planned
from tutti.config import serialization
from tutti.config.plan import Plan
from tutti.cost_model.cost_notes import nbytes, seconds
from tutti.errors import PlanError
from tutti.planner import Choice, stamp
from tutti.planner.objectives import money
from tutti.profile.architectures import architecture

GPT = ("gpt", "--layers", "4", "--hidden", "512", "--heads", "8", "--seq-len", "512", "--vocab", "1000")

MARKED = """
import torch, tutti
job = tutti.Job(global_batch_size=8)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)], torch.nn.Linear(8, 2))
data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.arange(16) % 2)
tutti.split(model, degree=2)
job.prepare(model, torch.optim.Adam(model.parameters()), data, torch.nn.functional.cross_entropy)
"""


@pytest.fixture
def machines(tmp_path: Path) -> str:
    return str(serialization.save(cards(2, 4, power_w=300.0, price_per_device_hour=2.0), tmp_path / "cluster.json"))


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(plan_command.command, arguments, catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def ask(machines: str, *options: str) -> Result:
    return call("--cluster", machines, "--global-batch-size", "32", *options, *GPT)


def chosen(result: Result) -> Choice:
    return serialization.from_data(Choice, json.loads(result.stdout))


def test_a_named_model_is_planned_for_without_a_script(machines: str) -> None:
    choice = chosen(ask(machines, "--json"))
    assert choice.model == "gpt"
    assert choice.request.scope == "all"
    assert choice.coverage is not None
    assert chosen(ask(machines, "--json", "--data-parallel")).request.scope == "data"


def test_precision_is_chosen_where_nothing_fixes_it(machines: str, tmp_path: Path) -> None:
    """A named model has no script whose numbers could change. A script keeps its precision, and so does --precision."""
    free = chosen(ask(machines, "--json"))
    assert free.request.precision == "auto"
    assert free.best.precision == "bfloat16"
    assert "Matrix products are computed in bfloat16, which changes the numbers" in ask(machines).stdout
    assert chosen(ask(machines, "--json", "--precision", "full")).best.precision == "full"
    script = tmp_path / "train.py"
    script.write_text(MARKED.replace("tutti.split(model, degree=2)", ""))
    kept = chosen(call("--cluster", machines, "--json", str(script)))
    assert kept.request.precision == "script"
    assert kept.best.precision == "full"


def test_objective_and_length_of_training_are_taken_and_shown(machines: str) -> None:
    options = ("--objective", "cost", "--samples", "32000", "--top", "3")
    choice = chosen(ask(machines, "--json", *options))
    assert choice.totals is not None
    assert choice.totals.steps == 1000
    shown = ask(machines, *options).stdout
    for words in ("Plans by predicted cost", "The whole training: ", "device-hours", "a cost of", "kWh", "chosen"):
        assert words in shown
    with pytest.raises(PlanError, match="the size of the data set is unknown"):
        ask(machines, "--epochs", "2")
    with pytest.raises(PlanError, match="belong together"):
        ask(machines, "--critical-batch", "64")


def test_a_mesh_of_a_described_model_is_exactly_that(machines: str) -> None:
    choice = chosen(ask(machines, "--json", "--mesh", "replicate=2,split=2"))
    assert choice.best.mesh == {"replicate": 2, "split": 2}


def test_what_if_answers_beside_now(machines: str) -> None:
    what_if = ("--what-if", "link=1gbit", "--what-if", "devices=4")
    answer = serialization.from_data(Scenarios, json.loads(ask(machines, "--json", *what_if).stdout))
    assert [scenario.change for scenario in answer.scenarios] == ["1 Gbit/s on network links", "4 devices"]
    few, slow = answer.scenarios[1].choice, answer.scenarios[0].choice
    assert few is not None
    assert slow is not None
    assert few.best.world_size <= 4
    now = answer.now.prediction.step_time_s.value
    assert slow.prediction.step_time_s.value >= 0.98 * now
    shown = ask(machines, *what_if).stdout
    assert "What if" in shown
    assert "as fast" in shown


def test_what_if_says_what_else_changes_of_the_best_plan(machines: str) -> None:
    """With fewer devices the mesh, the memory of each and the price change. Each scenario has a row."""
    what_if = ("--what-if", "devices=1", "--what-if", "link=1gbit")
    answer = serialization.from_data(Scenarios, json.loads(ask(machines, "--json", *what_if).stdout))
    uncontended = answer.scenarios[0].choice
    assert uncontended is not None
    lines = scenario_rows(Planned(choice=answer.now, timeline=None, scenarios=answer.scenarios))  # type: ignore[arg-type]
    assert [len(cells) for cells in lines] == [len(SCENARIO_COLUMNS)] * 3
    now, (_, words, step, memory, cost, against), _ = lines
    assert now[5] == ""
    assert (words, step) == (
        words_in_full(uncontended.best, uncontended.request),
        seconds(uncontended.prediction.step_time_s.value),
    )
    assert memory == nbytes(uncontended.prediction.memory.total)
    assert uncontended.totals is not None
    assert uncontended.totals.cost is not None
    assert cost == f"{money(uncontended.totals.cost)} a step"
    ratios = {
        "memory": uncontended.prediction.memory.total / answer.now.prediction.memory.total,
        "cost": uncontended.totals.cost / answer.now.totals.cost,  # type: ignore[union-attr, operator]
    }
    for what, ratio in ratios.items():
        assert f"{ratio:.2f}x the {what}" in against
    assert f"Ranks: {answer.now.best.world_size} in now, 1 in then" in against
    assert "cost" in ask(machines, *what_if).stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--what-if", "links=1gbit"), "links"),
        (("--what-if", "devices=6"), "multiple of 4"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_the_search(
    machines: str, options: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searched(*_: object, **__: object) -> None:
        raise AssertionError("a search took place")

    monkeypatch.setattr("tutti.commands.planning.search", searched)
    with pytest.raises(PlanError, match=words):
        ask(machines, *options)


def test_a_change_that_leaves_no_plan_is_answered_too(machines: str) -> None:
    result = ask(machines, "--json", "--what-if", "memory=200mb")
    assert result.exit_code == 0
    (none,) = serialization.from_data(Scenarios, json.loads(result.stdout)).scenarios
    assert none.choice is None
    assert "does not fit" in none.reason
    assert "none" in ask(machines, "--what-if", "memory=200mb").stdout


def test_explain_shows_of_a_named_model_all_that_needs_no_script(machines: str) -> None:
    shown = ask(machines, "--explain").stdout
    for words in ("Plans by predicted step time", "One step, predicted", "Memory of a rank", "Speed against devices"):
        assert words in shown
    assert "Layout over" not in shown


def test_a_mesh_says_degrees_and_leaves_the_level_of_sharding_open(machines: str) -> None:
    choice = chosen(ask(machines, "--json", "--mesh", "stage=2,shard=2"))
    assert choice.best.mesh == {"stage": 2, "shard": 2}
    assert choice.best.sharding.level == 1  # stages allow no other level


def test_a_file_of_a_model_may_stand_where_a_script_does(machines: str, tmp_path: Path) -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 2, "seq_len": 64, "vocab": 100}
    file = serialization.save(architecture("gpt", sizes), tmp_path / "model.json")
    given = ("--cluster", machines, "--global-batch-size", "8", "--max-devices", "1", "--json")
    assert chosen(call(*given, str(file))).best == chosen(call(*given, "--model", str(file))).best


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_what_excludes_itself_is_refused_as_such(machines: str) -> None:
    with pytest.raises(PlanError, match=r"mesh.space = 2 with mesh.stage = 2|divid"):
        ask(machines, "--mesh", "stage=2,space=2")


def test_prices_and_powers_are_answered_for_a_step_too(machines: str) -> None:
    shown = ask(machines).stdout
    assert "A step: " in shown
    assert "a cost of" in shown
    assert "kWh at the devices' full power" in shown


def test_two_plan_files_are_told_apart(tmp_path: Path) -> None:
    first = serialization.save(plan(64), tmp_path / "first.json")
    other = dataclasses.replace(plan(64), mesh={"replicate": 2, "split": 2})
    second = serialization.save(other, tmp_path / "second.json")
    shown = call("--diff", str(first), str(second)).stdout
    assert "Ranks: 1 in first.json, 4 in second.json" in shown
    assert "Split: none in first.json, 2 in second.json" in shown
    data = serialization.from_data(Differences, json.loads(call("--json", "--diff", str(first), str(second)).stdout))
    assert data.second == other
    assert "first.json and first.json mean the same" in call("--diff", str(first), str(first)).stdout


def test_a_written_plan_says_which_model_it_is_for(machines: str, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    result = ask(machines, "--output", str(output))
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "seq_len": 512, "vocab": 1000}
    assert serialization.load(Plan, output).made_for == stamp(architecture("gpt", sizes))
    assert "plan written to" in result.stderr


def test_a_plan_for_another_model_is_noticed(machines: str, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    ask(machines, "--output", str(output), "--mesh", "replicate=2")
    deeper = architecture("gpt", {"layers": 5, "hidden": 512, "heads": 8, "seq_len": 512, "vocab": 1000})
    other = serialization.save(deeper, tmp_path / "model.json")
    result = CliRunner().invoke(predict_command.command, ["--cluster", machines, "--model", str(other), str(output)])
    assert "was made for another model: blocks.4 is new" in " ".join(result.stderr.split())


def test_annotations_of_a_script_are_respected(machines: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MARKED, encoding="utf-8")
    choice = chosen(call("--cluster", machines, "--json", str(script)))
    assert choice.request.demanded == {"split": 2}
    assert choice.best.world_size == 1 or choice.best.mesh["split"] == 2


@pytest.mark.parametrize(("text", "value"), [("60gb", 6e10), ("1.5 GiB", 1.5 * 2**30), ("100", 100.0)])
def test_sizes_are_read_with_units(text: str, value: float) -> None:
    assert SIZE.convert(text, None, None) == value


def test_durations_are_read_with_units() -> None:
    assert DURATION.convert("12h", None, None) == 43200
    assert DURATION.convert("3d", None, None) == 3 * 86400
    value_s: Any = None
    with pytest.raises(click.BadParameter, match="write it like 12h"):
        value_s = DURATION.convert("soon", None, None)
    assert value_s is None
