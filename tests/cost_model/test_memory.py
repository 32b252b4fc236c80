"""Memory of a rank: what it consists of, and how it changes with batch, microbatches, precision and recompute."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples import cluster, cpu, gpu, linear, mlp, plan
from tutti.config.model import ModelSpec, ModuleSpec
from tutti.config.plan import LayoutRule, Plan, SyncPlan
from tutti.config.prediction import RankMemory
from tutti.cost_model import cost_constants, predict
from tutti.cost_model.memory_cost import activation_nbytes
from tutti.cost_model.work_division import recompute_regions


def memory(model: ModelSpec, intended: Plan) -> RankMemory:
    return predict(model, cluster(), intended).memory


def test_parts_by_hand() -> None:
    model = ModelSpec(name="m", modules=(linear("a", 100, 50, buffer_nbytes=7), linear("b", 50, 10)), optimizer="Adam")
    held = memory(model, plan(batch=96, ranks=2, microbatches=2, sync=SyncPlan(bucket_nbytes=2**20)))
    parameters = 4 * (100 * 50 + 50 * 10)
    assert held.parameters == held.gradients == parameters
    assert held.optimizer == 2 * parameters
    assert held.buffers == 7
    # 48 samples per microbatch, 24 on each rank: saved inputs, and the gradient of the largest output.
    assert held.activations == 24 * (4 * 100 + 4 * 50 + 4 * 50)
    assert held.communication == parameters  # one bucket holds all gradients
    assert held.reserve == cost_constants.RESERVE_NBYTES["cpu"]
    assert held.total == 5 * parameters + 7 + held.activations + held.reserve


def test_what_the_script_holds_is_on_every_rank_of_a_host_and_on_no_gpu() -> None:
    model = ModelSpec(name="m", modules=(linear("a", 100, 50),), optimizer="SGD", script_nbytes=5e8)
    without = replace(model, script_nbytes=0.0)
    on_host = [memory(spec, plan(batch=8, ranks=2)) for spec in (model, without)]
    assert (on_host[0].script, on_host[1].script) == (5e8, 0.0)
    assert on_host[0].total == on_host[1].total + 5e8
    on_gpu = [predict(spec, cluster(gpu()), plan(batch=8)).memory for spec in (model, without)]
    assert on_gpu[0] == on_gpu[1]
    notes = [predict(spec, cluster(), plan(batch=8)).notes for spec in (model, without)]
    assert ["the script's own libraries and data" in " ".join(of) for of in notes] == [True, False]


def test_the_update_of_a_large_parameter_may_be_the_peak() -> None:
    """Operators briefly allocate a parameter-sized tensor when activations are gone. Fused Adam and SGD do not."""
    layers = (linear("a", 100, 50), linear("b", 50, 10))
    model = ModelSpec(name="m", modules=layers, optimizer="NAdam")
    parameters, largest = 4 * (100 * 50 + 50 * 10), 4 * 100 * 50
    held = memory(model, plan(batch=1))
    assert (held.activations, held.communication) == (0, 0)
    assert held.optimizer == 2 * parameters + largest
    sgd = memory(ModelSpec(name="m", modules=model.modules, optimizer="SGD"), plan(batch=1))
    assert sgd.optimizer == 2 * parameters
    assert sgd.activations > 0
    fused = memory(ModelSpec(name="m", modules=layers, optimizer="Adam"), plan(batch=1))
    assert fused.optimizer == 2 * parameters


@settings(deadline=None)
@given(batch=st.integers(1, 200), more=st.integers(0, 200), ranks=st.integers(1, 4), slices=st.integers(1, 5))
def test_grows_with_the_share_and_falls_with_microbatches(batch: int, more: int, ranks: int, slices: int) -> None:
    model, slices = mlp(), min(slices, batch)
    held = memory(model, plan(batch, ranks, slices)).total
    assert memory(model, plan(batch + more, ranks, slices)).total >= held
    assert memory(model, plan(batch, ranks, 1)).total >= held


def test_one_rank_keeps_no_bucket_more() -> None:
    assert memory(mlp(), plan(64, 1)).communication == 0


def test_several_microbatches_add_their_gradients_up_in_the_buckets() -> None:
    model = ModelSpec(name="m", modules=tuple(linear(name, 100, 100) for name in "abcd"))
    sync = SyncPlan(bucket_nbytes=4 * 100 * 100)
    for slices in (1, 2, 5):
        held = memory(model, plan(60, 2, slices, sync=sync))
        assert (held.gradients, held.communication) == (4 * 4 * 100 * 100, 4 * 100 * 100)


def test_autocast_halves_what_products_keep_and_adds_their_copies() -> None:
    model = mlp(layers=2)
    devices = cluster(gpu())
    full = predict(model, devices, plan()).memory
    half = predict(model, devices, plan(precision="bfloat16")).memory
    outputs = 64 * 4 * 512
    assert half.activations - outputs == (full.activations - outputs) / 2
    assert half.parameters == 1.5 * full.parameters
    assert predict(model, devices, plan(precision="tf32")).memory == full


def blocks(count: int = 3) -> ModelSpec:
    modules: list[ModuleSpec] = [ModuleSpec(name="", kind="Model")]
    for index in range(count):
        modules.append(ModuleSpec(name=f"blocks.{index}", kind="Block", output_nbytes=40.0, activation_nbytes=8.0))
        modules.append(linear(f"blocks.{index}.up", 10, 40))
        modules.append(linear(f"blocks.{index}.down", 40, 10))
    return ModelSpec(name="blocks", modules=tuple(modules), optimizer="SGD")


def recomputing(*rules: tuple[str, bool]) -> Plan:
    return plan(layout=tuple(LayoutRule(modules=glob, recompute=again) for glob, again in rules))


def test_recomputed_blocks_keep_their_inputs_and_one_block_whole() -> None:
    model = blocks()
    inside = 8.0 + 40.0 + 160.0  # the block's own, and the inputs of its two products
    transient = 160.0
    plain = activation_nbytes(model, (), half=False)
    assert plain == 3 * inside + transient
    regions = recompute_regions(model, recomputing(("blocks.*", True)))
    assert [len(region.members) for region in regions] == [3, 3, 3]
    assert activation_nbytes(model, regions, half=False) == 3 * 40.0 + inside + transient


@pytest.mark.parametrize(
    ("rules", "roots"),
    [
        ((("*", True),), ["blocks.0", "blocks.1", "blocks.2"]),
        ((("blocks.1", True),), ["blocks.1"]),
        ((("*", True), ("blocks.0*", False)), ["blocks.1", "blocks.2"]),
        ((("*.up", True),), ["blocks.0.up", "blocks.1.up", "blocks.2.up"]),
        ((("*", False),), []),
        ((("*", True), ("*.down", False)), ["blocks.0", "blocks.1", "blocks.2"]),
    ],
)
def test_the_last_matching_rule_wins_and_the_outermost_module_counts(
    rules: tuple[tuple[str, bool], ...], roots: list[str]
) -> None:
    model = blocks()
    assert [model.modules[region.root].name for region in recompute_regions(model, recomputing(*rules))] == roots


def test_recompute_trades_time_for_memory() -> None:
    model = blocks()
    before, after = (predict(model, cluster(), recomputing(("blocks.*", again))) for again in (False, True))
    assert after.memory.total < before.memory.total
    assert after.phases["backward"] == pytest.approx(before.phases["backward"] + before.phases["forward"])
    assert after.phases["forward"] == before.phases["forward"]
    assert after.model_flops_per_s < before.model_flops_per_s  # recomputed work does not count as model FLOPs


def test_ranks_of_a_cpu_host_share_its_memory() -> None:
    small = cluster(cpu(), memory_nbytes=9 * 10**8)
    assert predict(mlp(), small, plan(ranks=2)).fits
    assert not predict(mlp(), small, plan(ranks=3)).fits
