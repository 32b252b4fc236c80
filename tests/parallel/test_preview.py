"""A layout is known without ranks: bytes of every rank, what is summed, what is refused."""

import pytest
import torch
from torch import nn

from tutti.config.plan import BatchPlan, Plan
from tutti.errors import PlanError
from tutti.parallel.preview import MOST_RANKS, explain_layout


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
    assert rows["0"].collectives == ("gradients reduced over replicate",)
    assert rows["3"].placement == "whole"
    assert rows["3"].nbytes == 4 * 8  # its weight is the first layer's and counted there


def test_one_device_exchanges_nothing() -> None:
    explained = explain_layout(model(), plan(replicate=1))
    assert all(not module.collectives for module in explained.modules)


def stack() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(4)))


def arguments() -> tuple[tuple[torch.Tensor], dict[str, object]]:
    return (torch.zeros(2, 8),), {}


def test_parameters_are_divided_among_ranks() -> None:
    net, whole = stack(), 4 * 4 * (8 * 32 + 32 + 32 * 8 + 8)
    shard = explain_layout(net, plan(shard=4))
    assert shard.parameter_nbytes_per_rank == (whole // 4,) * 4
    assert "gathered over shard (forward, backward)" in shard.modules[0].collectives[0]
    split = {module.name: module for module in explain_layout(net, plan(split=2)).modules}
    assert split["0.0"].nbytes_per_rank == (4 * (8 * 16 + 16),) * 2
    assert split["0.0"].collectives == ("backward: all-reduce over split of 8 values per row",)
    assert split["0.2"].collectives == ("forward: all-reduce over split of 8 values per row",)


def test_stages_hold_their_own_modules() -> None:
    explained = explain_layout(stack(), plan(stage=2, replicate=2), sample=arguments)
    rows = {module.name: module for module in explained.modules}
    assert rows["0.0"].placement == "whole, on ranks 0-1"
    assert rows["3.0"].placement == "whole, on ranks 2-3"
    assert rows["3.0"].collectives == ("gradients reduced over replicate",)
    assert len(set(explained.parameter_nbytes_per_rank)) == 1
    with pytest.raises(PlanError, match="give a sample"):
        explain_layout(stack(), plan(stage=2))


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


def test_of_a_large_world_ranks_are_examples_and_said_to_be() -> None:
    found = explain_layout(stack(), plan(stage=2, replicate=32), sample=arguments)
    assert len(found.ranks) < 64
    placements = {module.placement for module in found.modules if "on ranks" in module.placement}
    assert placements
    assert all(placement.endswith(" of those previewed") for placement in placements)
