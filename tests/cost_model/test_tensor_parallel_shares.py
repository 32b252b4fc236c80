"""Unequal parts along the split axis: each rank costs what its own part does, and the step waits for the slowest."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cost_model.examples import gpu, link
from cost_model.examples_mesh import machines, meshed, part, transformer
from tutti.config.cluster import ClusterSpec, NodeSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan, ShardingPlan
from tutti.cost_model import predict
from tutti.cost_model.rank_tracks import timeline
from tutti.cost_model.work_division import division, mean_division, parts
from tutti.errors import PlanError
from tutti.parallel.capabilities import with_capabilities
from tutti.parallel.tensor import describe_split
from tutti.profile.model_profile import describe_model

MODEL = transformer(8, s=512, h=256)


def unequal(*names: str, network: float = 1e12, **changes: Any) -> ClusterSpec:
    """Return hosts of one card each: slow ones, and fast ones of three times their rate, changed as `changes` says."""
    rates = {"slow": 5e12, "quick": 15e12}
    devices = {
        name: gpu(**{"name": name, "peak_flops_per_s": {"bfloat16": rate}, "kernel_overhead_s": 1e-9,
                     **changes.get(name, {})})
        for name, rate in rates.items()
    }  # fmt: skip
    nodes = tuple(NodeSpec(name=f"{name}{index}", device=name, memory_nbytes=2**36) for index, name in enumerate(names))
    links = (link("node", 1e-6, 1e12), link("network", 1e-6, network))
    return ClusterSpec(name="mixed", devices=devices, nodes=nodes, links=links)


def split(*shares: float, batch: int = 32, microbatches: int = 1, **fields: Any) -> Plan:
    fields.setdefault("mesh", {"split": len(shares)})
    return meshed(batch, microbatches, split_shares=shares, **fields)


MESHES: tuple[dict[Any, int], ...] = (
    {"split": 2},
    {"replicate": 2, "split": 2},
    {"stage": 2, "split": 2},
    {"shard": 2, "split": 2},
    {"context": 2, "split": 2},
)


@settings(deadline=None, max_examples=40)
@given(mesh=st.sampled_from(MESHES), share=st.floats(0.1, 10), microbatches=st.integers(1, 4))
def test_equal_shares_say_nothing(mesh: Any, share: float, microbatches: int) -> None:
    plan = split(share, share, mesh=mesh, microbatches=microbatches, sharding=ShardingPlan(level=1))
    for where in (machines(), unequal("slow", "quick", "slow", "quick")):
        with_shares, without = (
            predict(MODEL, where, intended) for intended in (plan, dataclasses.replace(plan, split_shares=()))
        )
        assert dataclasses.replace(with_shares, plan_digest="") == dataclasses.replace(without, plan_digest="")


@settings(deadline=None, max_examples=40)
@given(mesh=st.sampled_from(MESHES), first=st.sampled_from([1.0, 3.0]), microbatches=st.integers(1, 4))
def test_devices_may_change_places_with_their_shares(mesh: Any, first: float, microbatches: int) -> None:
    names, there = ("slow", "quick"), (first, 4 - first)
    times = 2 if len(mesh) > 1 else 1
    fields: dict[str, Any] = {"mesh": mesh, "microbatches": microbatches, "sharding": ShardingPlan(level=1)}
    prediction = predict(MODEL, unequal(*names * times), split(*there, **fields))
    other = predict(MODEL, unequal(*names[::-1] * times), split(*there[::-1], **fields))
    assert other.step_time_s.value == pytest.approx(prediction.step_time_s.value)
    assert other.memory == prediction.memory
    assert other.sent_nbytes_per_rank == pytest.approx(prediction.sent_nbytes_per_rank)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: " x ".join(mesh))
def test_parts_in_proportion_to_speed_are_quicker_than_even_ones(mesh: Any) -> None:
    where = unequal(*("slow", "quick") * (2 if len(mesh) > 1 else 1))
    by_speed, even, reverse = (
        predict(MODEL, where, split(*shares, mesh=mesh, microbatches=2, sharding=ShardingPlan(level=1)))
        for shares in ((1.0, 3.0), (1.0, 1.0), (3.0, 1.0))
    )
    assert by_speed.step_time_s.value < 0.75 * even.step_time_s.value
    assert even.step_time_s.value < 0.75 * reverse.step_time_s.value


def layer(**fields: Any) -> ModelSpec:
    """Return a single layer, divided by its outputs; its forward takes a tenth of a second on the slow card."""
    return ModelSpec(name="m", modules=(part("layer", flops=5e11, split="column", **fields),), dtype="bfloat16")


@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 3.0), (2.0, 1.0), (1.0, 9.0)])
def test_each_rank_computes_its_part(shares: tuple[float, float]) -> None:
    """The seconds of both passes on each card are computed by hand."""
    done = predict(layer(), unequal("slow", "quick"), split(*shares, batch=1))
    rank_s = [3 * 5e11 * share / sum(shares) / rate for share, rate in zip(shares, (5e12, 15e12), strict=True)]
    efficiency = predict(layer(), unequal("slow"), meshed(1)).phases["forward"] / 0.1
    assert done.phases["forward"] + done.phases["backward"] == pytest.approx(max(rank_s) * efficiency, rel=1e-3)


def test_heads_stay_whole_and_in_their_groups() -> None:
    """Of 12 heads in 4 groups, 2 to 1 gives 9 and 3. With too few groups for all ranks, groups are divided."""
    heads = layer(split_limit=12)
    assert [rank_part.weight[0] for rank_part in parts(heads, split(2.0, 1.0))] == [8 / 12, 4 / 12]
    grouped = layer(split_limit=12, split_groups=4)
    assert [rank_part.weight[0] for rank_part in parts(grouped, split(2.0, 1.0))] == [3 / 4, 1 / 4]
    assert division(grouped, split(2.0, 1.0)).weight[0] == 3 / 4
    assert [rank_part.weight[0] for rank_part in parts(grouped, split(11.0, 1.0))] == [11 / 12, 1 / 12]
    assert mean_division(grouped, split(11.0, 1.0)).weight[0] == 1 / 2
    with pytest.raises(PlanError, match=r"'layer' has 12 units, and .*gives rank 1 of the split axis none"):
        predict(heads, unequal("slow", "quick"), split(30.0, 1.0))


def test_three_heads_are_no_obstacle_to_unequal_parts() -> None:
    model = transformer(2, a=3)
    with pytest.raises(PlanError, match="3 attention heads"):
        predict(model, machines(), meshed(mesh={"split": 2}))
    assert predict(model, machines(), split(2.0, 1.0)).step_time_s.value > 0


class Grouped(nn.Module):
    """Attention with six heads and three key heads, as many models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 6, 4
        self.q_proj, self.o_proj = nn.Linear(24, 24), nn.Linear(24, 24)
        self.k_proj, self.v_proj = nn.Linear(24, 12), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("units", [48, 272])  # 272 units are divided in sixteens
def test_parts_are_those_that_ranks_will_hold(units: int) -> None:
    """The bytes of parameters equal the runtime's, by module and rank. Biases of row layers stay whole."""
    with torch.device("meta"):
        mlp = nn.Sequential(nn.Linear(24, units), nn.GELU(), nn.Linear(units, 24))
        model, x = nn.Sequential(Grouped(), mlp), torch.empty(4, 5, 24)
        spec = describe_model(model, (x,), {}, x, nn.functional.mse_loss, samples=4)
    spec = with_capabilities(spec, model, (x,))
    shares = (3.0, 1.0)
    held = {layer.name: layer.nbytes_per_rank for layer in describe_split(model, (), 2, weights=shares)}
    divisions = parts(spec, split(*shares))
    columns = [
        (index, layer_spec)
        for index, layer_spec in enumerate(spec.modules)
        if layer_spec.split == "column" and layer_spec.parameters
    ]
    assert {layer_spec.name for _, layer_spec in columns} == {"0.q_proj", "0.k_proj", "0.v_proj", "1.0"}
    for index, module in columns:
        assert [division.weight[index] * module.parameter_nbytes for division in divisions] == list(held[module.name])
    assert held["0.k_proj"] == (2 * held["0.k_proj"][1], held["0.k_proj"][1])


def test_each_rank_keeps_its_part() -> None:
    """The rank with the least memory left is reported: the one that holds most, or one with little memory."""
    model = layer(parameters=1_000_000)
    alike = unequal("quick", "quick")
    even, much = (predict(model, alike, split(*shares)).memory for shares in ((1.0, 1.0), (4.0, 1.0)))
    assert even.optimizer == 12e6 / 2
    assert (much.optimizer, much.parameters) == (12e6 * 4 / 5, 2e6 * 4 / 5)
    small = unequal("slow", "quick", slow={"memory_nbytes": 2**30})
    assert predict(model, small, split(1.0, 4.0)).memory.optimizer == 12e6 / 5


def test_each_rank_updates_its_part() -> None:
    """The slow card's memory is a tenth as fast: its quarter of the state takes longer than the rest on the other."""
    slow = {"memory_bandwidth_bytes_per_s": 1e11}
    model = dataclasses.replace(layer(parameters=10**8), optimizer="Adam")
    quarter, half, whole = (
        predict(model, unequal("slow", "quick", slow=slow), split(*shares, batch=2)).phases["optimizer"]
        for shares in ((1.0, 3.0), (1.0, 1.0), (3.0, 1.0))
    )
    assert quarter == pytest.approx(half / 2, rel=1e-3)
    assert whole == pytest.approx(half * 3 / 2, rel=1e-3)


def test_gathers_of_unequal_units_travel_as_long_as_the_largest() -> None:
    model = ModelSpec(
        name="m", dtype="bfloat16",
        modules=(part("rnn", flops=1e6, output_nbytes=100.0, split="rnn", split_limit=4),),
    )  # fmt: skip
    even, three = (predict(model, machines(), split(*shares, batch=1)) for shares in ((1.0, 1.0), (3.0, 1.0)))
    assert even.sent_nbytes_per_rank == (100.0 + 100.0) / 2
    assert three.sent_nbytes_per_rank == (2 * 75.0 + 2 * 100.0) / 2


def test_a_step_in_unequal_parts_is_spread_out() -> None:
    where = unequal(*("slow", "quick") * 2)
    for mesh in ({"split": 2}, {"stage": 2, "split": 2}, {"replicate": 2, "split": 2}):
        plan = split(1.0, 2.0, mesh=mesh, microbatches=2)
        spread = timeline(MODEL, where, plan)
        lasts = predict(MODEL, where, plan).step_time_s.value
        for track in spread.tracks:
            assert sum(bar.end_s - bar.start_s for bar in track.bars) == pytest.approx(lasts)
