"""A plan made for another model says so before the first step, naming what is new, gone or other."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tutti
from tutti.commands.capture import capture_script
from tutti.commands.planning import model_spec_of
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan
from tutti.planner import stamp
from tutti.trainer.prepare import model_mismatch_warning


class Tied(nn.Module):
    """An embedding whose weights are the head's too, around layers."""

    def __init__(self, layers: int = 2, width: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(x)
        return scores


SCRIPT = """
import sys, torch, tutti
from test_made_for import Tied
job = tutti.Job(global_batch_size=4)
data = torch.utils.data.TensorDataset(torch.arange(8) % 8, torch.arange(8) % 8)
model = Tied(int(sys.argv[1]), int(sys.argv[2]))
job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, torch.nn.functional.cross_entropy)
"""


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Plan]:
    """A plan stamped as `tutti plan` does it, for two layers of width 4."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")

    def make() -> Plan:
        model = model_spec_of(capture_script(script, ("2", "4")))
        return replace(Plan(batch=BatchPlan(global_batch_size=4)), made_for=stamp(model))

    return make


def test_the_same_model_is_the_same_tied_weights_or_not(planned: Callable[[], Plan]) -> None:
    plan = planned()
    assert plan.made_for["layers.0-1"] == "Linear 20"
    assert model_mismatch_warning(plan, Tied(2, 4)) == ""
    assert model_mismatch_warning(replace(plan, made_for={}), nn.Linear(3, 3)) == ""


def test_what_changed_is_named(planned: Callable[[], Plan]) -> None:
    plan = planned()
    assert "made for another model: layers.2 is new; plan again" in model_mismatch_warning(plan, Tied(3, 4))
    assert "layers.1 is gone" in model_mismatch_warning(plan, Tied(1, 4))
    wider = model_mismatch_warning(plan, Tied(2, 5))
    assert "layers.0 (Linear 20 then, Linear 30 now)" in wider
    assert "are different" in wider


def test_a_run_by_it_warns_once_before_it_trains(
    planned: Callable[[], Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = serialization.save(planned(), tmp_path / "plan.json")
    monkeypatch.setenv("TUTTI_PLAN", str(path))
    monkeypatch.chdir(tmp_path)
    data = torch.utils.data.TensorDataset(torch.arange(8) % 8, torch.arange(8) % 8)
    model = Tied(3, 4)
    job = tutti.Job(global_batch_size=4, folder=tmp_path / "run")
    _, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.functional.cross_entropy)
    for batch in loader:
        job.step(batch)
    said = capsys.readouterr().err
    assert said.count("warning: this plan (replicate=1) was made for another model: layers.2 is new") == 1
