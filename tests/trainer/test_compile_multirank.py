"""Job(compile=...): the values of the plain loop under replicas and sharding; other plans run uncompiled and say so."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, LayoutRule, Plan, ShardingPlan

EAGER_KERNELS = {"backend": "aot_eager"}
SPLIT = (LayoutRule(modules="2", placement="column"),)
PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"mesh": {"replicate": 2}},
    "zero1": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=1)},
    "zero2": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=2)},
    "zero3": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3)},
    "split": {"mesh": {"split": 2}, "layout": SPLIT},
    "stage": {"mesh": {"stage": 2}},
}
COMPILED = ("replicas", "zero1", "zero2", "zero3")


def net() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)]
    return nn.Sequential(*layers).double()


def data() -> TensorDataset:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def plain() -> dict[str, torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data().tensors
    for i in range(0, 30, 8):
        optimizer.zero_grad()
        mse_loss(model(x[i : i + 8]), y[i : i + 8]).backward()
        optimizer.step()
    return model.state_dict()


def trained(how: Any, name: str | None = None) -> dict[str, Any]:
    if name is not None:
        file = Path(f"plan-{name}-{os.environ['RANK']}.json").absolute()
        serialization.save(Plan(batch=BatchPlan(global_batch_size=8), **PLANS[name]), file)
        os.environ["TUTTI_PLAN"] = str(file)
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    job = tutti.Job(global_batch_size=8, compile=how, keep_checkpoints=0)
    said: list[str] = []
    job._context.screen.say = lambda sentence: said.append(sentence)  # type: ignore[method-assign]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = job.prepare(model, optimizer, data(), mse_loss, shuffle=False)
    for batch in loader:
        job.step(batch)
    values = job.evaluate(data())
    return {
        "state": job.state_dict(),
        "said": said,
        "graphs": counters["stats"]["unique_graphs"],
        "loss": values["loss"],
    }


def under(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {name: trained(EAGER_KERNELS, name) for name in names}


def close(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("names", [("zero3",), pytest.param(tuple(PLANS), marks=pytest.mark.long)])
def test_compiled_plans_compute_what_one_device_does(names: tuple[str, ...]) -> None:
    expected = plain()
    model = net().eval()
    model.load_state_dict(expected)
    loss = mse_loss(model(data().tensors[0]), data().tensors[1]).item()
    for results in run_ranks(under, 2, names, timeout_s=200):
        for name, result in results.items():
            close(result["state"], expected)
            assert result["loss"] == pytest.approx(loss, rel=1e-12)
            off = [said for said in result["said"] if said.startswith("torch.compile is off under mesh.")]
            assert bool(off) != (name in COMPILED), (name, result["said"])
            assert (result["graphs"] > 0) == (name in COMPILED), (name, result["graphs"])


@pytest.mark.long
def test_the_default_compiler_computes_what_one_device_does() -> None:
    for result in run_ranks(trained, 2, True, "zero3", timeout_s=300):
        close(result["state"], plain())
        assert result["graphs"] > 0


def refused() -> str:
    job = tutti.Job(global_batch_size=8, compile="fastest")
    model = net()
    with pytest.raises(tutti.TuttiError) as caught:
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), mse_loss)
    return str(caught.value)


def test_an_unknown_mode_is_named() -> None:
    assert run_ranks(refused, 1)[0].startswith("Job(compile='fastest'): torch.compile cannot be used (")
