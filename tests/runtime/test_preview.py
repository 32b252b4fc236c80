"""A layout is known without ranks: bytes of every rank, what is summed, what is refused."""

import pytest
import torch
from torch import nn

from tutti.errors import PlanError
from tutti.runtime.preview import MOST_RANKS, explain_layout
from tutti.spec.plan import BatchPlan, Plan


def model() -> nn.Module:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6, bias=False), nn.Linear(6, 8))
    net[3].weight = net[0].weight
    net[3].bias.requires_grad_(False)
    return net


def plan(**mesh: int) -> Plan:
    return Plan(batch=BatchPlan(global_batch_size=64), mesh=mesh)  # type: ignore[arg-type]


def test_replicas_hold_everything_and_sum_it() -> None:
    explained = explain_layout(model(), plan(replicate=3), optimizer_tensors=1.0)
    assert explained.ranks == (0, 1, 2)
    whole, trainable = 4 * (48 + 8 + 48 + 8), 4 * (48 + 8 + 48)
    assert explained.parameter_nbytes == whole
    assert explained.parameter_nbytes_per_rank == (whole,) * 3
    assert explained.state_nbytes_per_rank == (whole + 2 * trainable,) * 3
    rows = {module.name: module for module in explained.modules}
    assert rows["0"].collectives == ("gradients summed over replicate",)
    assert rows["3"].placement == "whole"
    assert rows["3"].nbytes == 4 * 8  # its weight is the first layer's and counted there


def test_one_device_exchanges_nothing() -> None:
    explained = explain_layout(model(), plan(replicate=1))
    assert all(not module.collectives for module in explained.modules)


def test_of_many_ranks_some_are_looked_at() -> None:
    explained = explain_layout(model(), plan(replicate=1024))
    assert len(explained.ranks) == MOST_RANKS
    assert explained.ranks[:2] == (0, 64)


def test_the_model_itself_is_left_alone() -> None:
    net = model()
    names = [name for name, _ in net.named_parameters()]
    explain_layout(net, plan(replicate=2))
    assert [name for name, _ in net.named_parameters()] == names
    assert "forward" not in vars(net[0])


def test_inside_a_world_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(PlanError, match="has joined a world"):
        explain_layout(model(), plan(replicate=2))
