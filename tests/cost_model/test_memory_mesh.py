"""Memory over a mesh against closed formulas: Korthikanti et al. 2022 (activations), Rajbhandari et al. 2020 (ZeRO)."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples import cluster, cpu, linear
from cost_model.examples_mesh import machines, meshed, transformer
from tutti.config.model import ModelSpec
from tutti.config.plan import LayoutRule, PipelinePlan, ShardingPlan
from tutti.config.prediction import RankMemory
from tutti.cost_model import cost_constants, predict

S, H, A = 64, 32, 4
SH = S * H
TRANSIENT = 8.0 * SH  # the gradient of the widest output, b = 1


def memory(model: ModelSpec, batch: int = 1, microbatches: int = 1, mesh: Any = None, **fields: Any) -> RankMemory:
    return predict(model, machines(), meshed(batch, microbatches, mesh, **fields)).memory


@pytest.mark.parametrize("t", [1, 2, 4])
def test_activations_of_a_layer_under_split_are_korthikantis(t: int) -> None:
    fields: dict[str, Any] = {"mesh": {"split": t}}
    few, more = (memory(transformer(layers, s=S, h=H, a=A), **fields).activations for layers in (3, 4))
    assert more - few == pytest.approx(SH * (10 + 24 / t + 5 * A * S / (H * t)))
    few, more = (memory(transformer(layers, s=S, h=H, a=A, sequence=True), **fields).activations for layers in (3, 4))
    assert more - few == pytest.approx(SH / t * (34 + 5 * A * S / H))


def test_full_recompute_keeps_two_bytes_a_value_of_a_layer() -> None:
    rule = (LayoutRule(modules="blocks.*", recompute=True),)
    few, more = (memory(transformer(layers, s=S, h=H, a=A), layout=rule).activations for layers in (3, 4))
    assert more - few == 2 * SH


def test_selective_recompute_keeps_what_is_dear() -> None:
    kept = {}
    for form in (False, "selective", True):
        rule = (LayoutRule(modules="blocks.*", recompute=form),)
        kept[form] = memory(transformer(8, s=S, h=H, a=A), layout=rule).activations
    assert kept[True] < kept["selective"] < kept[False]


def test_chunks_hold_a_part_of_a_block() -> None:
    def held(chunks: int) -> float:
        rule = (LayoutRule(modules="blocks.*", chunks=chunks),)
        return memory(transformer(1, s=S, h=H, a=A), batch=4, layout=rule).activations

    whole = 4 * SH * (34 + 5 * A * S / H)
    outside = 4 * (2 * SH + TRANSIENT)
    assert held(2) == pytest.approx(outside + whole / 2)
    assert held(4) == pytest.approx(outside + whole / 4)


@pytest.mark.parametrize("d", [2, 4, 8])
def test_zero_divides_the_sixteen_bytes_of_a_parameter(d: int) -> None:
    model = transformer(64, s=S, h=H, a=A)
    parameters = model.parameters

    def states(level: Any) -> float:
        held = memory(model, d, mesh={"shard": d}, sharding=ShardingPlan(level=level))
        return (held.parameters + held.gradients + held.optimizer) / parameters

    assert states(1) == pytest.approx(2 + 2 + 12 / d)
    # whole from forward to backward, plus the rank's part
    assert states(2) == pytest.approx(2 + 2 / d + 2 / d + 12 / d)
    assert states(3) == pytest.approx((2 + 2 + 12) / d)
    assert (memory(model).parameters + memory(model).gradients + memory(model).optimizer) / parameters == 16


def test_gradients_are_whole_until_the_last_microbatch_sums_them() -> None:
    model = transformer(8, s=S, h=H, a=A)
    sharding = ShardingPlan(level=3)
    once = memory(model, 8, 1, {"shard": 4}, sharding=sharding)
    twice = memory(model, 8, 2, {"shard": 4}, sharding=sharding)
    assert twice.gradients - once.gradients == 2 * model.parameters


def test_blocks_pass_through_a_rank_of_zero_3() -> None:
    block = 2 * 12 * H * H
    few, more = (
        memory(transformer(layers, s=S, h=H, a=A), 4, mesh={"shard": 4}, sharding=ShardingPlan(level=3)).communication
        for layers in (4, 8)
    )
    assert few == more == pytest.approx(block * (3 + 1 + cost_constants.PENDING_SUMS * (1 + 1 / 4)))


def test_on_hosts_a_pending_reduction_of_zero_3_receives_a_part_from_every_rank() -> None:
    """It holds the unit that is sent, and as many bytes that arrive: a part of the same size from each rank."""
    model = dataclasses.replace(transformer(4, s=S, h=H, a=A), dtype="float32")
    block = 2 * 12 * H * H
    plan = meshed(4, 1, {"shard": 4}, sharding=ShardingPlan(level=3))
    assert predict(model, cluster(cpu(memory_nbytes=2**34)), plan).memory.communication == pytest.approx(
        block * (3 + 1 + cost_constants.PENDING_SUMS * 2)
    )


@pytest.mark.parametrize("width", [32, 1024])
def test_zero_1_gathers_updated_parameters_in_two_buckets(width: int) -> None:
    model = transformer(4, s=S, h=width, a=A)
    buckets = min(25 * 2**20, 2 * model.parameters)
    states, replicas = (
        memory(model, 4, mesh={axis: 4}, sharding=ShardingPlan(level=1)).communication
        for axis in ("shard", "replicate")
    )
    assert states - replicas == pytest.approx(2 * buckets)


def test_copies_in_lower_precision_are_of_a_block_under_zero_3() -> None:
    """Autocast copies the weights of products, at half their size: all of them, or those of the gathered block."""
    model = dataclasses.replace(transformer(8, s=S, h=H, a=A), dtype="float32")
    whole, block = 2 * model.parameters, 2 * 12 * H * H
    for level, copies in ((1, whole / 2), (3, block / 2)):
        held = memory(model, 4, mesh={"shard": 4}, sharding=ShardingPlan(level=level), precision="bfloat16")
        assert held.parameters == pytest.approx((whole / 4 if level == 3 else whole) + copies), level


def test_an_update_needs_temporary_tensors_of_a_ranks_part() -> None:
    """As in test_memory's update of a large parameter; each of two ranks updates half of every parameter."""
    layers = (linear("a", 1000, 500), linear("b", 500, 10))
    model = ModelSpec(name="m", modules=layers, optimizer="NAdam")
    parameters, largest = 4 * (1000 * 500 + 500 * 10), 4 * 1000 * 500
    plan = meshed(2, 1, {"shard": 2}, sharding=ShardingPlan(level=1))
    held = predict(model, cluster(cpu(memory_nbytes=2**34)), plan).memory
    assert held.optimizer == (2 * parameters + largest) / 2


def test_offload_leaves_the_device_what_is_computed_with() -> None:
    model = transformer(8, s=S, h=H, a=A)
    here = memory(model, 4, mesh={"shard": 4}, sharding=ShardingPlan(level=3))
    away = memory(model, 4, mesh={"shard": 4}, sharding=ShardingPlan(level=3, offload="optimizer"))
    assert (away.optimizer, away.parameters, away.gradients) == (0, here.parameters, 0)
    assert away.activations == here.activations
    assert away.host == here.parameters + here.gradients + here.optimizer
    all_away = memory(model, 4, mesh={"shard": 4}, sharding=ShardingPlan(level=3, offload="parameters"))
    assert (all_away.optimizer, all_away.parameters, all_away.gradients) == (0, 0, 0)


@pytest.mark.parametrize(("name", "times", "messages"), [("1f1b", 4, 1), ("gpipe", 8, 2)])
def test_the_first_stage_holds_as_many_microbatches_as_the_schedule_says(name: Any, times: int, messages: int) -> None:
    """It also holds the gradient that has arrived for the next action; with GPipe, also that for the one after."""
    model = transformer(8, s=S, h=H, a=A)
    done = predict(model, machines(), meshed(8, 8, {"stage": 4}, pipeline=PipelinePlan(schedule=name)))
    two_layers = 2 * SH * (34 + 5 * A * S / H)
    assert done.memory.activations == pytest.approx(times * two_layers + TRANSIENT + messages * 2 * SH)
    assert any(f"where {times} microbatches are held at once" in note for note in done.notes)


def test_stages_hold_their_own_layers_and_tied_weights_twice() -> None:
    plain, tied = (transformer(8, s=S, h=H, a=A, ends=ends) for ends in (False, True))
    quarter = memory(plain, 8, 8, {"stage": 4})
    assert quarter.optimizer == 12 * plain.parameters / 4
    both = [memory(tied, 8, 8, {"stage": 2}, pipeline=PipelinePlan(cuts=(f"blocks.{at}",))).optimizer for at in (3, 5)]
    ends = 16 * H
    assert both == [12 * (5 * 12 * H * H + ends)] * 2  # the larger stage has an end in both cases


@settings(deadline=None, max_examples=60)
@given(
    axis=st.sampled_from(["replicate", "shard", "split", "stage", "context"]),
    degree=st.sampled_from([1, 2, 4]),
    microbatches=st.sampled_from([1, 2, 4]),
)
def test_no_axis_makes_a_rank_hold_more_state_or_activations(axis: Any, degree: int, microbatches: int) -> None:
    model = transformer(8, s=S, h=H, a=A)
    pipeline = PipelinePlan(schedule="1f1b")
    uncontended = memory(model, 16, microbatches)
    held = memory(model, 16, microbatches, {axis: degree}, pipeline=pipeline)
    assert held.parameters <= uncontended.parameters
    assert held.optimizer <= uncontended.optimizer
    messages = 2 * 2 * SH * 16 / microbatches if axis == "stage" else 0.0  # one in use, one that has arrived
    most = max(uncontended.activations, min(microbatches, degree) * uncontended.activations / degree + 1)
    assert held.activations <= most + messages
