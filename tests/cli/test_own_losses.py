"""Scripts that compute their own losses are described and planned by those of their first step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cli.commands import called
from cost_model.examples import cluster
from tutti.config import serialization
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, Plan
from tutti.planner import PlanRequest
from tutti.planner.candidates import limits_of

BEGIN = """
import torch, tutti
from torch import nn
from torch.nn import functional as F
class Nets(nn.Module):
    def __init__(self):
        super().__init__()
        self.made = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
        self.told = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
job = tutti.Job(global_batch_size=8)
nets = Nets()
data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.zeros(16))
optimizers = [torch.optim.Adam(part.parameters()) for part in (nets.told, nets.made)]
nets, optimizers, loader = job.prepare(nets, optimizers, data, LOSS)
def told(nets, batch):
    fakes = nets.made(torch.randn(len(batch[0]), 4)).detach()
    return F.softplus(nets.told(fakes)).mean() + F.softplus(-nets.told(batch[0])).mean()
def made(nets, batch):
    return F.softplus(-nets.told(nets.made(torch.randn(len(batch[0]), 4)))).mean()
scores = job.evaluate(data, {"own": lambda output, target: output})
job.print(scores["loss"] + scores["own"])
"""
LOOP = """
for epoch in job.epochs(3):
    for step, batch in enumerate(loader):
        assert step < len(loader)
"""
ADVERSARIAL = """
        a = job.forward_backward(told, batch)
        BETWEEN
        job.update(optimizers[0])
        b = job.forward_backward(made, batch)
        job.update(optimizers[1])
        assert torch.isfinite(torch.tensor(a + b))
        if step == 1:
            raise SystemExit("no second step")
"""
WITH_STEP = """
        job.step(batch)
        job.forward_backward(made, batch)
        job.update()
"""
MADE, TOLD = 2 * (4 * 8 + 8 * 8), 2 * (8 * 8 + 8)  # FLOPs of a forward of one sample


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelSpec]:
    """Describe a script and return its ModelSpec."""
    monkeypatch.chdir(tmp_path)

    def describe(
        step: str, loss: str = "lambda output, target: None", between: str = "pass", begin: str = BEGIN + LOOP
    ) -> ModelSpec:
        text = (begin + step).replace("LOSS", loss).replace("BETWEEN", between)
        Path("train.py").write_text(text, encoding="utf-8")
        assert called(monkeypatch, "describe", "train.py", "--output", "model.json") == 0
        return serialization.load(ModelSpec, Path("model.json"))

    return describe


def products(model: ModelSpec, part: str) -> tuple[float, float]:
    """FLOPs of matrix products of one sample in a part of the model: forward, backward."""
    ops = [op for m in model.modules if m.name.startswith(part) for op in m.ops if op.kind == "gemm"]
    return sum(op.flops_forward for op in ops), sum(op.flops_backward for op in ops)


def test_all_losses_of_the_first_step_count(described: Callable[..., ModelSpec]) -> None:
    model = described(ADVERSARIAL)
    assert (model.own_losses, model.untraced, model.notes) == (2, "", ())
    assert products(model, "made")[0] == 2 * MADE, "fakes for both losses"
    assert products(model, "told")[0] == 3 * TOLD, "fakes, data, and fakes again"
    # Backward: `made` once, without a gradient of the noise; the first layer of `told` twice without one of its input.
    assert products(model, "made")[1] == 2 * MADE - 2 * 4 * 8
    assert products(model, "told")[1] == 3 * 2 * TOLD - 2 * 2 * 8 * 8
    assert model.optimizer == "Adam, Adam"


def test_the_loss_of_prepare_counts_where_the_step_calls_it(described: Callable[..., ModelSpec]) -> None:
    begin = BEGIN.replace("job = tutti", "Nets.forward = lambda self, x: self.told(x)\njob = tutti") + LOOP
    loss = "lambda output, target: output.mean()"
    model = described(WITH_STEP, loss=loss, begin=begin)
    assert model.own_losses == 2
    assert products(model, "told")[0] == 2 * TOLD, "one by job.step, one by forward_backward"
    only_step = described("\n        job.step(batch)\n# job.forward_backward", loss=loss, begin=begin)
    assert (only_step.own_losses, products(only_step, "told")[0]) == (0, TOLD)


def test_a_loop_without_epochs_ends_with_its_first_step(described: Callable[..., ModelSpec]) -> None:
    again = "\nfor _ in range(9):\n    job.forward_backward(told, next(iter(loader)))\n    job.update()\n"
    assert described("        break\n" + again).own_losses == 0, "the first batch had no loss"
    assert described(again, begin=BEGIN).own_losses == 1
    endless = "\nbatch = next(iter(loader))\nwhile True:\n    job.forward_backward(told, batch)\n"
    assert described(endless, begin=BEGIN).own_losses == 100


def test_functions_see_their_variables_as_they_were(described: Callable[..., ModelSpec]) -> None:
    step = """
        for count in (8, 4):
            job.forward_backward(lambda nets, batch: nets.told(batch[0].repeat(count, 1)).mean(), batch)
        job.update()
"""
    assert products(described(step), "told")[0] == (8 + 4) * TOLD


def test_what_functions_do_outside_of_modules_is_the_models(described: Callable[..., ModelSpec]) -> None:
    step = ADVERSARIAL.replace(
        "(made, batch)",
        "(lambda nets, batch: F.linear(batch[0] * nets.told[0].bias, nets.told[0].weight).mean(), batch)",
    )
    model = described(step)
    assert not model.untraced
    assert products(model, "told")[0] == 2 * TOLD
    (whole,) = (module for module in model.modules if not module.name)
    assert sum(op.flops_forward for op in whole.ops if op.kind == "gemm") == 2 * 8 * 8


def test_a_first_step_that_fails_is_named(described: Callable[..., ModelSpec]) -> None:
    model = described(ADVERSARIAL, between="nets.told[0].weight.grad.clamp_(-1, 1)")
    words = "the script's first step, in which nothing is computed, failed ("
    assert model.own_losses == 1
    assert any(note.startswith(words) for note in model.notes), model.notes
    assert products(model, "made")[0] == MADE


def test_a_loss_that_fails_is_named(described: Callable[..., ModelSpec]) -> None:
    step = ADVERSARIAL.replace("(made, batch)", "(lambda nets, batch: nets.told(batch[0][:, :3]), batch)")
    assert described(step).untraced.startswith("module told.0 (Linear) could not be traced on shapes alone")
    step = ADVERSARIAL.replace("(made, batch)", "(lambda nets, batch: 1.0, batch)")
    assert "the loss function <lambda> could not be traced" in described(step).untraced
    step = ADVERSARIAL.replace("(made, batch)", "(lambda _, batch: nets.told(batch[0]).mean(), batch)").replace(
        "(told, batch)", "(lambda _, batch: nets.told(batch[0]).mean(), batch)"
    )
    assert "do not use the model that they are given" in described(step).untraced


def test_no_stages_are_planned(described: Callable[..., ModelSpec]) -> None:
    model = described(ADVERSARIAL)
    request = PlanRequest(script=Plan(batch=BatchPlan(global_batch_size=8)), scope="all")
    assert limits_of(model, cluster(), request).stages == (1,)
    assert max(limits_of(replace(model, own_losses=0), cluster(), request).stages) > 1


def test_it_is_planned(
    described: Callable[..., ModelSpec], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    described(ADVERSARIAL)
    serialization.save(cluster(), Path("here.json"))
    capsys.readouterr()
    assert called(monkeypatch, "plan", "train.py", "--cluster", "here.json", "--output", "best.json") == 0
    assert serialization.load(Plan, Path("best.json")).batch.global_batch_size == 8
