"""A model whose passes cannot be followed costs something unknown, not nothing: no command predicts its step."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cli.commands import called
from cost_model.examples import cluster, mlp
from tutti.commands.run_prediction import PredictionRequest, _work_out
from tutti.config import serialization
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, Plan
from tutti.config.run_folder import RunFolder
from tutti.errors import PlanError

SCRIPT = """
import torch, tutti
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        return FORWARD
def error_of(LOSS_ARGUMENTS):
    return LOSS
job = tutti.Job(global_batch_size=8)
model = Net()
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, error_of)
"""
PARTS = {"FORWARD": "self.layer(x)", "LOSS_ARGUMENTS": "output, target", "LOSS": "output.sum()"}

ALONE = {"LOSS_ARGUMENTS": "output", "LOSS": "output.sum()"}
NO_TENSOR = {"LOSS": "1.0"}
WRONG_SHAPE = {"FORWARD": "self.layer(x[:, :3])"}
UNTRACED = [
    (ALONE, "the loss function error_of could not be traced on shapes alone: error_of() takes 1 positional argument"),
    (NO_TENSOR, "the loss function error_of could not be traced on shapes alone: it returned a float; return a tensor"),
    (WRONG_SHAPE, "module layer (Linear) could not be traced on shapes alone: a and b must have same reduction dim"),
]

Files = Callable[[dict[str, str]], Path]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.chdir(tmp_path)
    serialization.save(cluster(), Path("here.json"))
    serialization.save(Plan(batch=BatchPlan(global_batch_size=8), mesh={"replicate": 2}), Path("two.json"))

    def write(parts: dict[str, str]) -> Path:
        text = SCRIPT
        for name, value in (PARTS | parts).items():
            text = text.replace(name, value)
        Path("train.py").write_text(text, encoding="utf-8")
        return Path("train.py")

    return write


@pytest.mark.parametrize(("parts", "reason"), UNTRACED)
@pytest.mark.parametrize("command", ["plan", "predict"])
def test_what_cannot_be_traced_is_refused_with_its_reason(
    script: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str,
    parts: dict[str, str], reason: str,
) -> None:  # fmt: skip
    path = script(parts)
    before = ("--output", "best.json") if command == "plan" else ("two.json",)
    assert called(monkeypatch, command, "--cluster", "here.json", *before, str(path)) == 2
    out, err = capsys.readouterr()
    assert f"tutti: train: {reason}" in err
    assert "no plan can be predicted: correct that, or train without a prediction" in err
    assert out == ""
    assert not Path("best.json").exists()


def test_its_description_is_shown_and_no_plan_is_made_of_that(
    script: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(ALONE)
    assert called(monkeypatch, "describe", "--output", "model.json", str(path)) == 0
    assert "only parameters are counted" in capsys.readouterr().out
    assert serialization.load(ModelSpec, Path("model.json")).untraced.startswith("the loss function error_of")
    given = ("--cluster", "here.json", "--global-batch-size", "8", "model.json")
    assert called(monkeypatch, "plan", *given) == 2
    assert called(monkeypatch, "predict", "--cluster", "here.json", "--model", "model.json", "two.json") == 2


def test_the_layout_of_a_plan_is_explained_without_costs(
    script: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(script(ALONE))
    assert called(monkeypatch, "plan", "--mesh", "replicate=2", path) == 0
    assert "Layout over replicate 2" in capsys.readouterr().out
    assert called(monkeypatch, "plan", "--mesh", "replicate=2", "--cluster", "here.json", path) == 2


def test_a_run_goes_on_without_a_prediction(script: Files, tmp_path: Path) -> None:
    wanted = PredictionRequest(script=script(ALONE), arguments=(), folder=tmp_path / "run", cluster=None)
    said: list[str] = []
    _work_out(replace(wanted, plans=True), cluster(), said.append)
    folder = RunFolder(tmp_path / "run")
    assert serialization.load(Plan, folder.plan).world_size == 1
    assert not folder.prediction.exists()
    assert said[0].startswith("the loss function error_of could not be traced")
    assert "trains on 1 rank (--nproc N to choose)" in said[0]
    _work_out(replace(wanted, plans=True, ranks=2), cluster(), said.append)
    assert serialization.load(Plan, folder.plan).world_size == 2
    with pytest.raises(PlanError, match="no plan can be predicted"):
        _work_out(replace(wanted, ranks=2), cluster(), said.append)
    assert not folder.prediction.exists()


def test_a_description_of_before_is_read() -> None:
    data = json.loads(serialization.dumps(mlp()))
    del data["untraced"]
    assert serialization.from_data(ModelSpec, data) == mlp()
