"""Whole weights out of divided plans: what is saved, copied, averaged, generated or loaded is what one device has."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, LayoutRule, Plan, ShardingPlan

SPLIT = (LayoutRule(modules="body.3", placement="column"),)
PLANS = {
    "zero1": Plan(batch=BatchPlan(global_batch_size=8), mesh={"shard": 2}, sharding=ShardingPlan(level=1)),
    "zero2": Plan(batch=BatchPlan(global_batch_size=8), mesh={"shard": 3}, sharding=ShardingPlan(level=2)),
    "zero3": Plan(batch=BatchPlan(global_batch_size=8), mesh={"shard": 2}, sharding=ShardingPlan(level=3)),
    "split": Plan(batch=BatchPlan(global_batch_size=8), mesh={"split": 3}, layout=SPLIT),
    "stage": Plan(batch=BatchPlan(global_batch_size=8), mesh={"stage": 2}),
    "stage and split": Plan(batch=BatchPlan(global_batch_size=8), mesh={"stage": 2, "split": 2}, layout=SPLIT),
}
DIVIDED = [name for name in PLANS if name != "zero1"]


class Net(nn.Module):
    """Uneven sizes, batch statistics, a tied weight, a buffer that is not saved, and another method than forward."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh())
        self.head = nn.Linear(7, 5, bias=False)
        self.back = nn.Linear(7, 5, bias=False)
        self.back.weight = self.head.weight
        self.register_buffer("table", torch.arange(5.0, dtype=torch.float64) / 5, persistent=False)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.encode(x)
        return self.head(hidden) + self.back(hidden.tanh()) + self.table

    def save_pretrained(self, folder: Path, *, name: str) -> None:
        folder.mkdir()
        torch.save(self.state_dict(), folder / name)


def net() -> Net:
    torch.manual_seed(3)
    return Net().double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(24, 5, generator=generator, dtype=torch.float64), torch.arange(24) % 5)


def one_device() -> tuple[Net, AveragedModel, dict[str, torch.Tensor]]:
    """The plain loop: the model, its moving average, and the model's state after the first epoch."""
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    x, y = data().tensors
    first: dict[str, torch.Tensor] = {}
    for epoch in range(2):
        for start in range(0, 24, 8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[start : start + 8]), y[start : start + 8]).backward()
            optimizer.step()
            average.update_parameters(model)
        first = first or copy.deepcopy(model.state_dict()) if epoch == 0 else first
    return model, average, first


def under(plan: Plan, folder: str) -> Any:
    """A Job under a plan; returns (job, model, optimizer, loader)."""
    import os

    file = Path(folder) / f"plan-{os.environ['RANK']}.json"
    serialization.save(plan, file)
    os.environ["TUTTI_PLAN"] = str(file)
    job = tutti.Job(global_batch_size=8, keep_checkpoints=0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loss = nn.functional.cross_entropy
    return job, *job.prepare(model, optimizer, data(), loss, shuffle=False)


def close(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(state) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=name)


def saved(plan: Plan, folder: str) -> dict[str, Any]:
    """Train two epochs and take the weights out in every way."""
    job, model, _, loader = under(plan, folder)
    with job.whole_model() as whole:
        average = AveragedModel(whole, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    first: dict[str, torch.Tensor] = {}
    for epoch in job.epochs(2):
        for batch in loader:
            job.step(batch)
            with job.whole_model() as whole:
                average.update_parameters(whole)
        first = job.state_dict() if epoch == 0 else first
    result: dict[str, Any] = {"state": job.state_dict(), "first": first, "average": average.module.state_dict()}
    result["main_only"] = list(job.state_dict(main_only=True))
    job.save_pretrained(Path(folder) / "pretrained", name="model.pt")
    x = data().tensors[0]
    model.eval()
    with job.whole_model() as whole:
        result["copy"] = copy.deepcopy(whole).state_dict()
        result["pickled"] = pickle.loads(pickle.dumps(whole)).state_dict()
        result["count"] = sum(p.numel() for p in whole.parameters())
        result["tied"] = whole.head.weight is whole.back.weight
        if job.is_main:  # on one rank only
            result["encoded"], result["output"] = whole.encode(x).detach(), whole(x).detach()
    with job.whole_model() as whole:
        whole.load_state_dict(first)
    result["written"] = job.state_dict()
    result["evaluated"] = job.evaluate(data())["loss"]
    model.load_state_dict(result["state"])  # a whole state into the parts
    result["loaded"] = job.state_dict()
    model.train()
    for batch in loader:  # training goes on after all of this
        job.step(batch)
    result["trained"] = job.state_dict()
    return result


@pytest.mark.parametrize("name", PLANS)
def test_whole_weights_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    model, average, first = one_device()
    x, y = data().tensors
    expected = copy.deepcopy(model.state_dict())
    results = run_ranks(saved, PLANS[name].world_size, PLANS[name], str(tmp_path))
    for rank, result in enumerate(results):
        for key in ("state", "copy", "pickled", "loaded"):
            close(result[key], expected)
        close(result["first"], first)
        close(result["written"], first)
        close(result["average"], average.module.state_dict())
        assert result["main_only"] == (list(expected) if rank == 0 else [])
        assert (result["count"], result["tied"]) == (sum(p.numel() for p in model.parameters()), True)
    close(torch.load(tmp_path / "pretrained" / "model.pt"), expected)
    model.eval()
    torch.testing.assert_close(results[0]["encoded"], model.encode(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(results[0]["output"], model(x), rtol=1e-12, atol=1e-12)
    best = net().eval()
    best.load_state_dict(first)
    loss = nn.functional.cross_entropy(best(x), y).item()
    assert [result["evaluated"] for result in results] == pytest.approx([loss] * len(results), rel=1e-12)
    for result in results[1:]:
        close(result["trained"], results[0]["trained"])


READS: dict[str, Callable[[Any, nn.Module, torch.optim.Optimizer], Any]] = {
    "Net.state_dict()": lambda job, model, optimizer: model.state_dict(),
    "Linear.state_dict()": lambda job, model, optimizer: model.body[3].state_dict(),
    "copy.deepcopy of Net": lambda job, model, optimizer: copy.deepcopy(model),
    "copy.deepcopy of Sequential": lambda job, model, optimizer: copy.deepcopy(model.body),
    "copy.deepcopy of Net ": lambda job, model, optimizer: AveragedModel(model),
    "pickle (torch.save) of Net": lambda job, model, optimizer: torch.save(model, io.BytesIO()),
    "pickle (torch.save) of Net ": lambda job, model, optimizer: pickle.dumps(model),
    "SGD.state_dict()": lambda job, model, optimizer: optimizer.state_dict(),
    "SGD.load_state_dict()": lambda job, model, optimizer: optimizer.load_state_dict({"state": {}, "param_groups": []}),
    "assign=True": lambda job, model, optimizer: model.load_state_dict(net().state_dict(), assign=True),
}


def refused(plan: Plan, folder: str) -> dict[str, str]:
    job, model, optimizer, loader = under(plan, folder)
    job.step(next(iter(loader)))
    messages = {}
    for name, read in READS.items():
        try:
            read(job, model, optimizer)
        except tutti.TuttiError as error:
            messages[name] = str(error)
    for name, inside in {"job.step": lambda: job.step(None), "job.save": job.save}.items():
        try:
            with job.whole_model():
                inside()
        except tutti.TuttiError as error:
            messages[name] = str(error)
    for name, change in {
        "shape or dtype": lambda whole: whole.half(),
        "on rank 0 and not on rank 1": lambda whole: job.is_main and nn.init.zeros_(whole.body[3].weight),
    }.items():
        before = job.state_dict()
        try:
            with job.whole_model() as whole:
                change(whole)
        except tutti.TuttiError as error:
            messages[name] = str(error)
        close(job.state_dict(), before)
    job.save()  # a checkpoint still reads the parts
    return messages


@pytest.mark.parametrize("name", DIVIDED)
def test_a_part_is_never_given_as_the_whole(name: str, tmp_path: Path) -> None:
    for messages in run_ranks(refused, PLANS[name].world_size, PLANS[name], str(tmp_path)):
        if name.startswith("stage"):
            messages.pop("Linear.state_dict()", None)  # this layer may be whole on its stage's rank
        for key in READS:
            if not (name.startswith("stage") and key in ("Linear.state_dict()", "copy.deepcopy of Sequential")):
                assert key.strip() in messages[key], (key, messages)
        assert "job.state_dict()" in messages["Net.state_dict()"]
        for key in ("job.step", "job.save"):
            assert messages[key] == f"{key} was called inside `with job.whole_model():`; leave it first"
        for key in ("shape or dtype", "on rank 0 and not on rank 1"):
            assert key in messages[key]
