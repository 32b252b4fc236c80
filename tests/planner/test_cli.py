"""`tutti plan` and `tutti predict` as commands: files in, one document or a table out; refusals with exit code 2."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cost_model.examples import cluster, gpu, link, mlp, plan
from tutti.cli import plan as plan_command
from tutti.cli import predict as predict_command
from tutti.config import serialization
from tutti.config.plan import Plan
from tutti.config.prediction import Prediction
from tutti.errors import PlanError, ScriptError, SpecError
from tutti.planner import Choice

SCRIPT = """
import sys

import torch
from torch import nn

import tutti

width = int(sys.argv[1]) if len(sys.argv) > 1 else 8
data = torch.utils.data.TensorDataset(torch.zeros(100, width), torch.zeros(100, dtype=torch.long))
model = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 4))
job = tutti.Job(global_batch_size=20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy)
print("not reached")
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Return paths of a cluster of four cards, a model and a plan."""
    cards = cluster(gpu(), (link("node", 1e-5, 1e11),), devices_per_node=4)
    specs = {"cluster": cards, "model": mlp(4096, 4), "plan": plan(4096, 2)}
    return {name: str(serialization.save(spec, tmp_path / f"{name}.json")) for name, spec in specs.items()}


def call(command: Any, *arguments: str) -> Result:
    result = CliRunner().invoke(command, arguments, catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def plan_model(files: dict[str, str], *arguments: str) -> Result:
    given = ("--cluster", files["cluster"], "--model", files["model"], "--global-batch-size", "4096")
    return call(plan_command.command, *given, *arguments)


def test_plan_of_a_described_model_is_one_document_that_reads_back(files: dict[str, str]) -> None:
    result = plan_model(files, "--json")
    choice = serialization.from_data(Choice, json.loads(result.stdout))
    assert choice.best.world_size == 4
    assert choice.model == "mlp"


def test_plan_is_written_and_explained(files: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "deep" / "chosen.json"
    result = plan_model(files, "--output", str(output), "--max-devices", "2", "--precision", "full")
    assert serialization.load(Plan, output).world_size == 2
    assert "Predicted step" in result.stdout
    assert "one rank computes all samples" in " ".join(result.stdout.split())
    assert "tutti run --plan" in result.stderr


def test_precision_and_degree_are_taken_from_the_command_line(files: dict[str, str]) -> None:
    choice = serialization.from_data(
        Choice, json.loads(plan_model(files, "--json", "--nproc", "3", "--precision", "auto").stdout)
    )
    assert choice.best.world_size == 3
    assert choice.best.precision in ("bfloat16", "tf32")


def test_plan_for_a_script_needs_no_hardware(files: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    # One device: the cost of loading samples is measured here, so a busy machine may change which number is best.
    given = ("--cluster", files["cluster"], "--max-devices", "1", "--json")
    result = call(plan_command.command, *given, str(script), "12")
    choice = serialization.from_data(Choice, json.loads(result.stdout))
    assert choice.model == "train"
    assert choice.best.world_size == 1
    assert choice.best.batch.global_batch_size == 20
    assert choice.prediction.memory.parameters == 4 * (12 * 16 + 16 + 16 * 4 + 4)


def test_predict_costs_a_plan(files: dict[str, str], tmp_path: Path) -> None:
    given = ("--cluster", files["cluster"], "--model", files["model"])
    output = tmp_path / "prediction.json"
    document = call(predict_command.command, *given, "--json", "--output", str(output), files["plan"])
    prediction = serialization.from_data(Prediction, json.loads(document.stdout))
    assert prediction.devices == 2
    assert serialization.load(Prediction, output) == prediction
    shown = call(predict_command.command, *given, files["plan"]).stdout
    for word in ("exposed communication", "activations", "samples/s on 2 ranks", "note: limited by"):
        assert word in shown


def test_refusals_say_what_to_do(files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="name one thing to plan for"):
        call(plan_command.command, "--cluster", files["cluster"])
    with pytest.raises(PlanError, match="add --global-batch-size"):
        call(plan_command.command, "--cluster", files["cluster"], "--model", files["model"])
    with pytest.raises(ScriptError, match="name one model"):
        call(predict_command.command, "--cluster", files["cluster"], files["plan"])
    with pytest.raises(SpecError, match=r"missing.json does not exist"):
        call(predict_command.command, "--cluster", files["cluster"], "--model", "missing.json", files["plan"])
    with pytest.raises(SpecError, match=r"the Plan cannot be written"):
        plan_model(files, "--output", f"{files['plan']}/inside")


def test_a_model_too_large_ends_with_exit_code_2_and_one_sentence(files: dict[str, str], tmp_path: Path) -> None:
    small = cluster(gpu(memory_nbytes=10**9), (), devices_per_node=1)
    serialization.save(small, tmp_path / "small.json")
    done = subprocess.run(
        [sys.executable, "-m", "tutti.cli.main", "plan", "--cluster", str(tmp_path / "small.json"),
         "--model", files["model"], "--global-batch-size", "64"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("tutti: model 'mlp' does not fit on cluster 'here'")
    assert done.stdout == ""
