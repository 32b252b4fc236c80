"""Laws of every prediction over a mesh, and the bytes of every axis by hand."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cost_model.examples import cluster, cpu, gpu, link
from cost_model.examples_mesh import machines, meshed, part, transformer
from tutti.config.cluster import ClusterSpec, NodeSpec
from tutti.config.model import ModelSpec, ModuleSpec, OpCost
from tutti.config.plan import LayoutRule, PipelinePlan, Plan, ShardingPlan
from tutti.config.prediction import Prediction
from tutti.cost_model import cost_constants, predict
from tutti.cost_model.group_links import network
from tutti.cost_model.rank_placement import place_ranks
from tutti.errors import PlanError
from tutti.parallel.spatial.halo_geometry import Fetch, Window, halo_nbytes

S, H = 64, 32
MODEL = transformer(8, s=S, h=H)

plans = st.builds(
    lambda axes, degrees, microbatches, level, name, again: _plan(axes, degrees, microbatches, level, name, again),
    axes=st.permutations(["replicate", "shard", "split", "stage", "context"]),
    degrees=st.lists(st.sampled_from([1, 2, 4]), min_size=3, max_size=3),
    microbatches=st.sampled_from([1, 2, 4]),
    level=st.sampled_from([1, 2, 3]),
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    again=st.sampled_from([None, True, "selective"]),
)


def _plan(axes: Any, degrees: Any, microbatches: int, level: Any, name: Any, again: Any) -> Plan:
    pipeline = PipelinePlan(schedule=name, stages_per_rank=2 if name == "interleaved" else 1)
    layout = (LayoutRule(modules="blocks.*", recompute=again),)
    mesh = dict(zip(axes, degrees, strict=False))
    return meshed(64, microbatches, mesh, sharding=ShardingPlan(level=level), pipeline=pipeline, layout=layout)


def predicted(plan: Plan, machine: ClusterSpec | None = None) -> Prediction:
    try:
        return predict(MODEL, machine or machines(hosts=8, per_host=8), plan)
    except PlanError:  # axes that exclude each other (test_what_cannot_run_is_refused)
        assume(False)
        raise


@settings(deadline=None, max_examples=80)
@given(plan=plans)
def test_phases_add_up_and_one_device_is_silent(plan: Plan) -> None:
    done = predicted(plan)
    assert sum(done.phases.values()) == pytest.approx(done.step_time_s.value)
    assert all(seconds >= 0 for seconds in done.phases.values())
    assert done.memory_nbytes.value == done.memory.total
    if plan.world_size == 1:
        assert done.sent_nbytes_per_rank == done.phases["exposed_communication"] == 0
    else:
        assert done.sent_nbytes_per_rank > 0


@settings(deadline=None, max_examples=80)
@given(plan=plans, faster=st.floats(1, 20), network=st.floats(1, 20))
def test_better_machines_are_never_slower(plan: Plan, faster: float, network: float) -> None:
    before = predicted(plan).step_time_s.value
    assert predicted(plan, machines(8, 8, faster=faster)).step_time_s.value <= before * (1 + 1e-9)
    assert predicted(plan, machines(8, 8, network=network)).step_time_s.value <= before * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(plan=plans, order=st.permutations(["a", "b", "c", "d"]))
def test_equal_hosts_may_change_places(plan: Plan, order: list[str]) -> None:
    whole = machines(8, 8)
    parts = tuple(dataclasses.replace(whole.nodes[0], name=name, count=2) for name in order)
    listed = dataclasses.replace(whole, nodes=parts)
    together, apart = predicted(plan, whole), predicted(plan, listed)
    assert apart.step_time_s.value == pytest.approx(together.step_time_s.value)
    assert apart.memory == together.memory


@settings(deadline=None, max_examples=60)
@given(plan=plans)
def test_degrees_of_one_say_nothing(plan: Plan) -> None:
    bare: dict[Any, int] = {axis: degree for axis, degree in plan.mesh.items() if degree > 1} or {"replicate": 1}
    done, same = predicted(plan), predicted(dataclasses.replace(plan, mesh=bare))
    assert dataclasses.replace(done, plan_digest="") == dataclasses.replace(same, plan_digest="")


def sent(model: ModelSpec, microbatches: int = 1, batch: int = 8, mesh: Any = None, **fields: Any) -> float:
    machine = machines(hosts=8, per_host=8)
    return predict(model, machine, meshed(batch, microbatches, mesh, **fields)).sent_nbytes_per_rank


@pytest.mark.parametrize("t", [2, 4])
def test_split_sends_shoeybis_bytes(t: int) -> None:
    # 8 b s h (t - 1) / t values per layer and microbatch. Recompute adds a quarter: of the two reductions in forward,
    # the second is not repeated, because nothing comes after it
    values = 8 * 8 * S * H * (t - 1) / t
    assert sent(MODEL, mesh={"split": t}) == pytest.approx(8 * 2 * values)
    again = (LayoutRule(modules="blocks.*", recompute=True),)
    assert sent(MODEL, mesh={"split": t}, layout=again) == pytest.approx(8 * 2 * values * 1.25)


def test_split_reduces_outputs_of_products_at_half_their_size_under_autocast() -> None:
    """Gradients of inputs stay whole: 4 s h values of outputs halve, 4 s h of gradients do not."""
    model = dataclasses.replace(MODEL, dtype="float32")
    full = sent(MODEL, mesh={"split": 2})
    assert sent(model, mesh={"split": 2}, precision="bfloat16") == pytest.approx(0.75 * full)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("how", ["column", "row"])
def test_linear_layers_over_table_send_the_rows_of_all_ranks(how: Any, n: int) -> None:
    """By columns every rank gets all inputs and a part of the outputs returns; by rows it is the other way round.

    A rank sends (n - 1) / n of what it holds; gradients take the same routes back.
    """
    inputs, outputs, samples = 4 * 1000.0, 4 * 100.0, 8 // n
    layers = (
        part("first", flops=2e3, parameters=n, output_nbytes=inputs),
        part("wide", flops=2e5, parameters=100_000, output_nbytes=outputs, linear_input_nbytes=inputs),
    )
    model = ModelSpec(name="m", modules=layers, dtype="bfloat16")
    rule = (LayoutRule(modules="wide", placement=how),)
    exchanged = samples * (inputs * (n if how == "column" else 1) + outputs * (1 if how == "column" else n))
    gradients = 2 * (n - 1) / n * 2 * n  # of the first layer
    expected = 2 * exchanged * (n - 1) / n + gradients
    assert sent(model, mesh={"table": n}, layout=rule) == pytest.approx(expected)


def test_the_gradient_of_the_batch_is_not_summed_over_split() -> None:
    """A first layer's backward has as many FLOPs as its forward, because nothing needs the gradient of its input."""
    layer = part("layer", flops=1e3, parameters=100, input_nbytes=8.0, output_nbytes=8.0, split="column")
    first = dataclasses.replace(layer, ops=(dataclasses.replace(layer.ops[0], flops_backward=1e3),))
    frozen = dataclasses.replace(first, gradient_nbytes=0)  # as many FLOPs, but for the gradient of its input
    expected = {layer: 2 * (2 - 1) / 2 * 8 * 8.0, first: 0.0, frozen: 2 * (2 - 1) / 2 * 8 * 8.0}
    for module, nbytes in expected.items():
        assert sent(ModelSpec(name="m", modules=(module,), dtype="bfloat16"), mesh={"split": 2}) == nbytes


def test_sums_of_a_split_between_hosts_of_several_cpu_ranks_are_made_in_two_tiers() -> None:
    """As in comm/hierarchical.py, there are two latencies of the network; a ring of all four ranks would have six."""
    layer = part("layer", flops=1e3, parameters=100, input_nbytes=8.0, output_nbytes=8.0, split="column")
    model, plan = ModelSpec(name="m", modules=(layer,)), meshed(8, mesh={"split": 4})
    hosts = cluster(count=2, links=(link("node", 1e-5, 1e9), link("network", 1e-3, 1e8)))
    group = network(hosts, place_ranks(hosts, 4), plan).group("split")
    losses = group.all_reduce(cost_constants.LOSS_NBYTES)
    exposed = predict(model, hosts, plan).phases["exposed_communication"]
    assert exposed - losses == pytest.approx(2 * 1e-5 + 64 / 1e9 + 2 * 1e-3 + 64 / 1e8)
    assert exposed < group.all_reduce(64) + losses


def test_gradients_of_norms_in_parts_of_the_sequence_are_summed_over_split() -> None:
    norm = part("norm", parameters=100, output_nbytes=8.0, sequence=True)
    wide = part("wide", flops=1e3, parameters=100, output_nbytes=8.0, split="column")
    model = ModelSpec(name="m", modules=(norm, wide), optimizer="Adam", dtype="bfloat16")
    assert sent(model, mesh={"split": 2}) == 2 * (2 - 1) / 2 * 200
    assert sent(model, mesh={"split": 2, "replicate": 2}) == 2 * 3 / 4 * 200 + 2 * 1 / 2 * 100


@pytest.mark.parametrize("d", [2, 4])
def test_sharding_sends_the_papers_bytes(d: int) -> None:
    whole = 2 * MODEL.parameters
    part_ = (d - 1) / d * whole
    assert sent(MODEL, mesh={"shard": d}, sharding=ShardingPlan(level=1)) == pytest.approx(3 * part_)
    assert sent(MODEL, mesh={"shard": d}, sharding=ShardingPlan(level=2)) == pytest.approx(2 * part_)
    assert sent(MODEL, mesh={"shard": d}, sharding=ShardingPlan(level=3)) == pytest.approx(3 * part_)
    assert sent(MODEL, 4, mesh={"shard": d}, sharding=ShardingPlan(level=3)) == pytest.approx((2 * 4 + 1) * part_)
    hybrid = sent(MODEL, mesh={"replicate": 2, "shard": d}, sharding=ShardingPlan(level=3))
    assert hybrid == pytest.approx(3 * part_ + 2 * 1 / 2 * whole / d)


def test_stages_send_what_lies_between_them() -> None:
    activation_nbytes = 8 * 2.0 * S * H
    # inner stages send activations to one side, gradients to the other
    assert sent(MODEL, 4, mesh={"stage": 4}) == pytest.approx(2 * activation_nbytes)
    assert sent(MODEL, 4, mesh={"stage": 2}) == pytest.approx(activation_nbytes)
    ends = transformer(8, s=S, h=H, ends=True)  # with an embedding on the first stage that the last stage shares
    assert sent(ends, 4, mesh={"stage": 2}) == pytest.approx(activation_nbytes + 2 * 16 * H)
    # parts of sequences: half the messages, keys around a ring for 4 layers, gradients of half the layers
    rest = 4 * 8 * 4.0 * S * H / 2 * (1 + 1 + 2) + 2 * 1 / 2 * 2 * MODEL.parameters / 2
    assert sent(MODEL, 4, mesh={"stage": 2, "context": 2}) == pytest.approx(activation_nbytes / 2 + rest)


@pytest.mark.parametrize("c", [2, 4])
def test_context_sends_keys_or_heads(c: int) -> None:
    gradients = 2 * (c - 1) / c * 2 * MODEL.parameters
    keys = 8 * 8 * 4.0 * S * H / c  # 8 layers and 8 samples
    assert sent(MODEL, mesh={"context": c}) == pytest.approx(gradients + (3 * c - 2) * keys)
    heads = 2 * keys  # queries, keys, values and results
    both = sent(MODEL, mesh={"context": c}, context="all-to-all")
    assert both == pytest.approx(gradients + 2 * heads * (c - 1) / c)


def mixture() -> ModelSpec:
    experts = part("experts", flops=1e4, parameters=1000, output_nbytes=64.0, expert=True, routed_nbytes=128.0)
    gate = part("gate", flops=1e2, parameters=10, output_nbytes=8.0)
    return ModelSpec(name="mixture", modules=(gate, experts), optimizer="Adam", dtype="bfloat16")


def test_experts_take_four_all_to_alls_and_own_their_gradients() -> None:
    done = predict(mixture(), machines(), meshed(8, mesh={"expert": 4}))
    tokens = 4 * 2 * 128.0 * 3 / 4  # two samples on each rank
    assert done.sent_nbytes_per_rank == tokens + 2 * 3 / 4 * 20
    assert done.memory.optimizer == 12 * (1000 / 4 + 10)
    both = predict(mixture(), machines(), meshed(8, mesh={"replicate": 2, "expert": 4}))
    assert both.sent_nbytes_per_rank == tokens / 2 + 2 * 7 / 8 * 20 + 2 * 1 / 2 * 500


def test_tables_send_vectors_there_and_gradients_back() -> None:
    tables = [part(f"tables.{i}", parameters=1000, output_nbytes=32.0, table=True) for i in range(3)]
    top = part("top", flops=1e3, parameters=10, output_nbytes=4.0)
    model = ModelSpec(name="clicks", modules=(*tables, top), optimizer="SGD", dtype="bfloat16")
    done = predict(model, machines(), meshed(8, mesh={"table": 4}))
    assert done.sent_nbytes_per_rank == 2 * 2 * 3 * 32.0 * 3 / 4 + 2 * 3 / 4 * 20
    assert done.memory.parameters == 2 * (3000 / 4 + 10)


def volumes() -> ModelSpec:
    fields: dict[str, Any] = {"spatial": True, "output_nbytes": 4096.0, "kept": 4096.0}
    return ModelSpec(
        name="volumes",
        modules=(
            part("a", flops=1e6, parameters=100, halo_nbytes_by_dim=(100.0, 200.0), **fields),
            part("head", flops=1e3, parameters=10, output_nbytes=4.0),
        ),
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("grid", "halo"),
    [
        ((), 50.0),
        ((4,), 100.0),
        ((2, 2), (50.0 + 100.0 * (1 + 2 * 100 / 4096)) / 2),
        ((1, 4), 200.0),
        ((1, 2, 2), 50.0),
    ],
)
def test_space_sends_halos_both_ways(grid: tuple[int, ...], halo: float) -> None:
    n = 4 if grid else 2
    done = predict(volumes(), machines(), meshed(8, mesh={"space": n}, space_grid=grid))
    assert done.sent_nbytes_per_rank == 2 * 8 * halo + 2 * (n - 1) / n * 220
    assert done.memory.activations == 8 * (4096 / n + 4096 / n)


@pytest.mark.parametrize(("grid", "extents"), [((2, 2), (16, 12)), ((3, 3), (18, 15)), ((2, 3, 2), (8, 9, 10))])
def test_halos_with_their_corners_are_the_runtimes(grid: tuple[int, ...], extents: tuple[int, ...]) -> None:
    """For a convolution of 3 points per dim, a rank sends the same as in the runtime to all neighbours that it has."""
    point = 8
    whole = point * math.prod(extents)
    halos = tuple(2.0 * whole / extent for extent in extents)
    conv = part("a", flops=1e6, kept=float(whole), spatial=True, output_nbytes=float(whole), halo_nbytes_by_dim=halos)
    model = ModelSpec(name="conv", modules=(conv,), dtype="bfloat16")
    window = Window(kernel=3, before=1, after=1)
    fetches = [
        Fetch(dim=dim, extent=extent, parts=parts, window=window)
        for dim, (extent, parts) in enumerate(zip(extents, grid, strict=True))
    ]
    inner = tuple(parts // 2 for parts in grid)
    local = [extent // parts for extent, parts in zip(extents, grid, strict=True)]
    sent, _ = halo_nbytes(fetches, inner, local, point)
    done = predict(model, machines(4, 8), meshed(1, mesh={"space": math.prod(grid)}, space_grid=grid))
    assert done.sent_nbytes_per_rank == pytest.approx(2 * sent)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (meshed(8, 2, {"stage": 2, "shard": 2}), "use sharding.level = 1"),
        (meshed(8, 2, {"context": 2, "space": 2}), "use one of the two"),
        (meshed(8, 2, {"stage": 2, "space": 2}), "use one of the two"),
        (meshed(8, 1, {"shard": 2}, sharding=ShardingPlan(level=1, offload="parameters")), "level 1 keeps them whole"),
        (meshed(8, 1, {"split": 3}), "4 attention heads, which mesh.split = 3 does not divide"),
        (meshed(8, 1, {"split": 8}), "at most 4|does not divide"),
        (meshed(8, 1, {"expert": 2}), "no experts"),
        (meshed(8, 1, {"table": 2}), "no embedding tables"),
        (meshed(8, 1, {"space": 2}), "no convolution"),
    ],
)
def test_what_cannot_run_is_refused(plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        predict(MODEL, machines(), plan)


def test_a_model_file_that_says_nothing_of_splitting_is_told() -> None:
    with pytest.raises(PlanError, match="describe the model again"):
        predict(mixture(), machines(), meshed(8, mesh={"split": 2}))


def test_modules_that_a_rule_keeps_whole_are_whole() -> None:
    rule = (LayoutRule(modules="blocks.0*", placement="replicate"),)
    all_, seven = (predict(MODEL, machines(), meshed(8, mesh={"split": 2}, layout=layout)) for layout in ((), rule))
    assert seven.memory.parameters == pytest.approx(all_.memory.parameters * 9 / 8)
    assert seven.sent_nbytes_per_rank < all_.sent_nbytes_per_rank


def test_the_notes_say_where_groups_lie() -> None:
    done = predict(MODEL, machines(), meshed(32, mesh={"replicate": 4, "split": 4}))
    assert any("split 4 within a host" in note and "replicate 4 over 2 hosts" in note for note in done.notes)


def test_shares_and_stages_of_mixed_devices() -> None:
    slow, quick = (gpu(name=name, peak_flops_per_s={"bfloat16": rate}) for name, rate in (("s", 5e12), ("q", 20e12)))
    mixed = ClusterSpec(
        name="mixed",
        devices={"slow": slow, "quick": quick},
        nodes=tuple(
            NodeSpec(name=name, device=name, memory_nbytes=2**36, devices_per_node=2) for name in ("slow", "quick")
        ),
        links=(link("node", 1e-6, 1e12), link("network", 1e-6, 1e12)),
    )
    big = transformer(8, s=512, h=256)
    even, fair = (
        predict(big, mixed, meshed(20, mesh={"replicate": 4}, shares=shares)) for shares in ((), (1.0, 1.0, 4.0, 4.0))
    )
    assert fair.step_time_s.value < 0.6 * even.step_time_s.value
    middle, early = (
        predict(big, mixed, meshed(32, 16, {"stage": 2, "replicate": 2}, pipeline=PipelinePlan(cuts=(f"blocks.{at}",))))
        for at in (4, 2)
    )
    assert early.step_time_s.value < 0.7 * middle.step_time_s.value  # the slow devices come first and get fewer blocks


def test_on_a_cpu_what_travels_takes_cores_from_what_computes() -> None:
    op = OpCost(kind="attention", flops_forward=1e9, flops_backward=2e9, nbytes_forward=0.0, nbytes_backward=0.0)
    attention = ModuleSpec(
        name="a", kind="A", parameters=1, gradient_nbytes=4, ops=(op,), key_value_nbytes=1e6, output_nbytes=1e6
    )
    model = ModelSpec(name="m", modules=(attention,))
    cards = cluster(gpu(), (link("node", 0.0, 1e12),), devices_per_node=2)
    cores = cluster(cpu(), (link("node", 0.0, 1e12),))
    hidden, paid = (
        predict(model, where, meshed(8, mesh={"context": 2})).phases["exposed_communication"]
        for where in (cards, cores)
    )
    assert hidden < 1e-9 < paid
