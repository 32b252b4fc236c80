"""Bounds are admissible: no prediction is below them, for random plans of models of every kind."""

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples import cluster, cpu, mlp, plan
from planner.machines import cards, mixed, own_links
from tutti.config.cluster import ClusterSpec, ConvolutionRate, DeviceSpec, ImageRate, NodeSpec
from tutti.config.model import Loading, ModelSpec
from tutti.config.plan import LayoutRule, PipelinePlan, Plan
from tutti.config.prediction import Prediction
from tutti.config.vocabulary import AxisName, Precision
from tutti.cost_model import compute_cost, predict
from tutti.cost_model.best_case import BestCase, pipeline_speed_bound
from tutti.cost_model.best_case_memory import BestCaseMemory
from tutti.cost_model.compute_cost import op_table
from tutti.cost_model.microbatch_cost import at_least, taken_in_passes
from tutti.cost_model.pipeline_cost import most_held, times_held
from tutti.cost_model.plan_bounds import Bounds, shape_bounds, variant_bounds
from tutti.cost_model.plan_table import Array
from tutti.cost_model.rank_placement import place_ranks
from tutti.cost_model.worker_speed import worker_at
from tutti.errors import PlanError
from tutti.planner.candidates import limits_of
from tutti.planner.mesh_enumeration import CHUNKS, plan_of, shapes, variants
from tutti.planner.mixed_hardware import improved
from tutti.planner.plan_description import plan_words
from tutti.planner.plan_request import PlanRequest
from tutti.profile.architectures import architecture

ROUNDING = 1e-9
SAMPLES = 6000  # large enough that rates do not fall when work is divided


def loaded(**costs: Any) -> ModelSpec:
    return dataclasses.replace(mlp(512, 4), loading=Loading(**costs))


def wide(width: int, layers: int) -> ModelSpec:
    """Return an MLP whose layers the table axis may divide."""
    model = mlp(width, layers)
    named = [dataclasses.replace(module, linear_input_nbytes=4.0 * width) for module in model.modules]
    return dataclasses.replace(model, modules=tuple(named))


def convolving(slowest: float = 0.6, **changes: Any) -> DeviceSpec:
    """Return cores that convolve more slowly with few channels, and more quickly on images of 4 x 4 pixels."""
    sizes = ((1e4, slowest), (2e6, 1.05))
    return cpu(
        convolution_rates=tuple(ConvolutionRate(weight_nbytes=int(n), relative=part) for n, part in sizes),
        image_rates=tuple(ImageRate(pixels=n, relative=part) for n, part in ((256, 1.0), (16, 1.25), (4, 0.9))),
        **changes,
    )


def unlike_hosts() -> ClusterSpec:
    """Return hosts with two kinds of cores, each of which is faster than the other at something."""
    devices = {
        "some": convolving(name="some", efficiency={"conv": 0.5, "batch_norm": 0.004}),
        "others": convolving(0.9, name="others", efficiency={"conv": 0.4, "batch_norm": 0.008}),
    }
    nodes = tuple(NodeSpec(name=name, device=name, devices_per_node=4, memory_nbytes=2**36) for name in devices)
    return ClusterSpec(name="unlike", devices=devices, nodes=nodes, links=cluster(cpu()).links)


CASES: dict[str, tuple[ModelSpec, ClusterSpec, int, Precision]] = {
    "mlp on one host's cores": (mlp(256, 6), cluster(cpu()), 32, "full"),
    "mlp on hosts": (mlp(512, 4), cluster(cpu(), count=3), 48, "full"),
    "gpt": (
        architecture("gpt", {"layers": 6, "hidden": 256, "heads": 8, "seq_len": 1024, "vocab": 1000}), cards(3), 48,
        "bfloat16",
    ),
    "llama, grouped queries": (
        architecture("llama", {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "vocab": 999, "seq_len": 512}),
        cards(2, 8), 64, "full",
    ),
    "moe": (
        architecture("moe", {"layers": 4, "hidden": 256, "heads": 8, "experts": 8, "top_k": 2, "vocab": 500,
                             "seq_len": 512}),
        cards(2), 32, "bfloat16",
    ),
    "dlrm": (architecture("dlrm", {"tables": 6, "rows": 10000, "width": 16, "bottom": "32,16"}), cards(2), 256, "full"),
    "resnet": (architecture("resnet", {"depth": 50}), cards(2), 64, "full"),
    "unet": (architecture("unet", {"dims": 3, "widths": "8,16,32", "image": "32"}), cards(1), 8, "full"),
    "wide layers that the script divides": (wide(512, 6), cluster(cpu(), count=6), 96, "full"),
    "resnet on cores whose convolutions were measured": (
        architecture("resnet", {"depth": 50}), cluster(convolving(), count=3), 48, "full",
    ),
    "unet on cores whose convolutions were measured": (
        architecture("unet", {"dims": 3, "widths": "8,16,32", "image": "32"}), cluster(convolving()), 8, "full",
    ),
    "resnet on cards whose rates were measured": (
        dataclasses.replace(architecture("resnet", {"depth": 50}), channels_last=True),
        cards(2, efficiency={"conv": 0.5}, launch_s=4e-5, convolution_rates=tuple(
            ConvolutionRate(weight_nbytes=nbytes, relative=part, dtype=dtype, channels_last=last)
            for dtype, last, nbytes, part in (
                ("float32", False, 10**5, 1.0), ("tf32", False, 10**5, 0.4), ("tf32", True, 10**5, 0.7),
                ("tf32", True, 10**7, 0.5),
            )
        )), 64, "tf32",
    ),
    "resnet on mixed cores": (architecture("resnet", {"depth": 50}), unlike_hosts(), 48, "full"),
    "mixed devices": (mlp(512, 4), mixed(), 60, "full"),
    "loading between steps": (loaded(core_s=1e-4, wait_s=1e-5), cards(2), 60, "full"),
    "loading ahead": (loaded(core_s=1e-4, workers=2), cards(2), 60, "full"),
    "loading on mixed devices": (loaded(core_s=1e-5), mixed(), 60, "full"),
    "streams on mixed devices": (loaded(core_s=1e-5, workers=1, stream=True), mixed(), 60, "full"),
    "gpt on mixed devices": (
        architecture("gpt", {"layers": 6, "hidden": 256, "heads": 8, "seq_len": 512, "vocab": 1000}), mixed(), 30,
        "full",
    ),
    "gpt on mixed devices with links of their own": (
        architecture("gpt", {"layers": 6, "hidden": 256, "heads": 8, "seq_len": 512, "vocab": 1000}),
        own_links(mixed()), 30, "full",
    ),
    "moe on equal devices with links of their own": (
        architecture("moe", {"layers": 4, "hidden": 256, "heads": 8, "experts": 8, "top_k": 2, "vocab": 500,
                             "seq_len": 512}),
        own_links(cards(3)), 48, "bfloat16",
    ),
}  # fmt: skip

ALONE = "wide layers over the only axis"

SAID: dict[str, tuple[dict[AxisName, int], tuple[LayoutRule, ...]]] = {
    "wide layers that the script divides": (
        {"shard": 4, "table": 3}, (LayoutRule(modules="layers.[1-4]", placement="split"),)
    ),
    ALONE: ({"table": 6}, (LayoutRule(modules="layers.*", placement="split"),)),
}  # fmt: skip
"""Meshes and layout rules that the user gives in some cases."""


def rows_of(
    case: str, meshes: int, *, offload: bool = False
) -> tuple[Bounds, tuple[Array, Array], list[tuple[int, int, Plan, Prediction]]]:
    """Return the bounds of the variants of some meshes of a case, the bounds of all meshes, and predictions.

    A prediction is made for 60 of the variants, as (row, mesh, plan, prediction).
    """
    model, machines, batch, precision = CASES.get(case) or (wide(8192, 6), cluster(cpu(), count=6), 96, "full")
    mesh, layout = SAID.get(case, (None, ()))
    script = dataclasses.replace(plan(batch), precision=precision, layout=layout)
    request = PlanRequest(script=script, scope="all", allow_microbatches=True, mesh=mesh)
    limits = limits_of(model, machines, request)
    table, best_case = shapes(limits, request), BestCase(model, machines, precision, layout)
    generator = np.random.default_rng(len(case))
    picked = np.unique(generator.integers(0, len(table), meshes))
    variant_rows = variants(limits, table, picked, offload=offload)
    bounds = variant_bounds(BestCaseMemory(best_case, script), table, variant_rows, batch)
    rows = []
    for row in generator.permutation(len(variant_rows))[:60].tolist():
        intended = plan_of(model, request, table, variant_rows, row, precision)
        with contextlib.suppress(PlanError):
            rows.append((row, int(variant_rows.shape[row]), intended, predict(model, machines, intended)))
    return bounds, shape_bounds(best_case, table, batch, offload=offload), rows


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_no_prediction_is_below_its_bounds(case: str, offload: bool) -> None:
    bounds, (coarse_s, coarse_nbytes), rows = rows_of(case, 60, offload=offload)
    machines = CASES[case][1]
    most = max(host_group.memory_nbytes for host_group in place_ranks(machines, machines.device_count))
    assert len(rows) >= 30
    for row, mesh, intended, prediction in rows:
        step_s, nbytes = prediction.step_time_s.value * (1 + ROUNDING), prediction.memory.total * (1 + ROUNDING)
        assert bounds.step_s[row] <= step_s, plan_words(intended)
        assert coarse_s[mesh] <= step_s, plan_words(intended)
        assert coarse_nbytes[mesh] <= nbytes, plan_words(intended)
        assert bounds.emptiest_nbytes[row] <= nbytes, plan_words(intended)
        if len(machines.nodes) == 1:  # on several kinds of nodes, the prediction may not report the fullest rank
            assert bounds.fullest_nbytes[row] <= nbytes, plan_words(intended)
        if prediction.fits:
            assert bounds.fullest_nbytes[row] <= most * (1 + ROUNDING), plan_words(intended)


def test_gradients_of_layers_divided_over_all_ranks_are_summed_by_none() -> None:
    bounds, _, rows = rows_of(ALONE, 60)
    assert rows
    for row, _, intended, prediction in rows:
        assert bounds.step_s[row] <= prediction.step_time_s.value * (1 + ROUNDING), plan_words(intended)


def _pairs() -> ClusterSpec:
    """Return hosts with as many fast devices as slow ones on each kind of host."""
    whole = mixed()
    return dataclasses.replace(
        whole, nodes=tuple(dataclasses.replace(node, devices_per_node=4) for node in whole.nodes)
    )


@pytest.mark.parametrize(("machines", "more"), [(cluster(cpu()), 5e8), (cards(), 0.0)], ids=["hosts", "cards"])
def test_what_the_script_holds_is_in_the_bounds_of_ranks_on_hosts(machines: ClusterSpec, more: float) -> None:
    least = []
    for nbytes in (0.0, 5e8):
        model, script = dataclasses.replace(mlp(512, 4), script_nbytes=nbytes), plan(40)
        request = PlanRequest(script=script, scope="all")
        limits = limits_of(model, machines, request)
        meshes = shapes(limits, request)
        variant_rows = variants(limits, meshes, np.arange(len(meshes)))
        least.append(
            variant_bounds(
                BestCaseMemory(BestCase(model, machines, "full"), script), meshes, variant_rows, 40
            ).emptiest_nbytes
        )
    np.testing.assert_allclose(least[1] - least[0], more, rtol=1e-9)


@pytest.mark.parametrize("machines", [mixed(), _pairs()], ids=["unequal hosts", "equal hosts"])
def test_shares_and_cuts_by_speed_are_not_below_their_bounds(machines: ClusterSpec) -> None:
    model = architecture("gpt", {"layers": 12, "hidden": 512, "heads": 8, "seq_len": 1024, "vocab": 1000})
    script = plan(40)
    request = PlanRequest(script=script, scope="all")
    limits = limits_of(model, machines, request)
    table, best_case = shapes(limits, request), BestCase(model, machines, "full")
    best_memory = BestCaseMemory(best_case, script)
    meshes = np.flatnonzero(table.world == machines.device_count)
    picked = np.random.default_rng(3).permutation(meshes)[:60]
    variant_rows = variants(limits, table, picked)
    bounds, (coarse_s, _) = variant_bounds(best_memory, table, variant_rows, 40), shape_bounds(best_case, table, 40)
    checked = 0
    for row in np.random.default_rng(4).permutation(len(variant_rows))[:60].tolist():
        intended = plan_of(model, request, table, variant_rows, row, "full")
        with contextlib.suppress(PlanError):
            for better in improved(best_memory, machines, intended, predict(model, machines, intended), 40):
                step_s = predict(model, machines, better).step_time_s.value * (1 + ROUNDING)
                assert bounds.step_s[row] <= step_s, plan_words(better)
                assert coarse_s[int(variant_rows.shape[row])] <= step_s, plan_words(better)
                checked += 1
    assert checked >= 20


@settings(deadline=None)
@given(
    speeds=st.lists(st.floats(0.1, 1), min_size=1, max_size=6),
    data=st.data(),
    microbatches=st.integers(1, 12),
)
def test_no_cut_is_quicker_than_the_pace_of_its_places(
    speeds: list[float], data: st.DataObject, microbatches: int
) -> None:
    work = data.draw(st.lists(st.floats(0.01, 10), min_size=len(speeds), max_size=len(speeds)))
    seconds = np.array(work) / np.array(speeds)
    lasts = float(np.max(microbatches * seconds + np.cumsum(seconds) - seconds))
    assert microbatches * sum(work) / len(work) <= lasts * pipeline_speed_bound(
        [[speed] for speed in speeds], microbatches
    ) * (1 + 1e-9)


@pytest.mark.parametrize("case", [case for case in CASES if "mixed" not in case])
def test_bounds_of_memory_are_the_predictions_own_arithmetic(case: str) -> None:
    """Bounds equal the predicted bytes without stages where all microbatches are alike, and are lower elsewhere."""
    bounds, _, rows = rows_of(case, 60)
    equal = 0
    for row, _, intended, prediction in rows:
        ratio = bounds.fullest_nbytes[row] / prediction.memory.total
        pieces = intended.batch.num_microbatches * intended.data_parallel_degree
        alike = intended.degree("stage") == 1 and intended.batch.global_batch_size % pieces == 0
        assert ratio > (0.999 if alike else 0.7), intended
        equal += alike
    assert equal >= 5


@pytest.mark.parametrize("case", ["llama, grouped queries", "moe", "unet", "gpt on mixed devices"])
def test_bounds_of_time_are_near(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound far below the prediction is of no use. For half of the plans it is at most a fifth below.

    Interleaved schedules with one stage per rank are left out: with them more plans have stages, and on mixed devices
    fewer than half of the bounds are that near.
    """
    monkeypatch.setattr("tutti.planner.mesh_enumeration.CHUNKS", CHUNKS[1:])
    bounds, _, rows = rows_of(case, 60)
    ratios = [bounds.step_s[row] / prediction.step_time_s.value for row, _, _, prediction in rows]
    assert np.median(ratios) > 0.8


@pytest.mark.parametrize(
    ("case", "unstaged", "staged"),
    [
        ("llama, grouped queries", 0.9, 0.9),
        ("moe", 0.8, 0.9),
        ("unet", 0.9, None),
        ("gpt on mixed devices", 0.9, 0.6),  # bounds allow cuts anywhere, plans only between blocks
    ],
)
def test_bounds_of_time_are_near_with_stages_and_without(case: str, unstaged: float, staged: float | None) -> None:
    """A bound far below the prediction is of no use. Half of the bounds are this near, with and without stages."""
    bounds, _, rows = rows_of(case, 60)
    for stages, near in ((False, unstaged), (True, staged)):
        ratios = [
            bounds.step_s[row] / prediction.step_time_s.value
            for row, _, intended, prediction in rows
            if (intended.degree("stage") > 1) == stages
        ]
        assert bool(ratios) == (near is not None)
        assert near is None or np.median(ratios) > near


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    ranks=st.integers(2, 6),
    count=st.integers(1, 20),
    data=st.data(),
)
def test_what_places_hold_is_never_more_than_the_schedule_says(
    name: Any, ranks: int, count: int, data: st.DataObject
) -> None:
    chunks = data.draw(st.integers(1, 3)) if name == "interleaved" else 1
    nbytes = np.array(data.draw(st.lists(st.floats(0, 9), min_size=ranks * chunks, max_size=ranks * chunks)))
    often = times_held(name, chunks, ranks, count)
    pipeline = PipelinePlan(schedule=name, stages_per_rank=chunks)
    intended = plan(count, 1, count, pipeline=pipeline)
    intended = dataclasses.replace(intended, mesh={"stage": ranks})
    for rank in range(ranks):
        most, _ = most_held(intended, np.repeat(nbytes[:, None], count, axis=1), rank)
        assert float((often * nbytes.reshape(chunks, ranks))[:, rank].sum()) <= most * (1 + ROUNDING)
    if chunks == 1:
        ones = np.ones((ranks, count))
        assert often[0].tolist() == [most_held(intended, ones, rank)[0] for rank in range(ranks)]


def test_every_row_is_a_plan_of_its_ranks_and_batch() -> None:
    model, machines, batch, precision = CASES["moe"]
    request = PlanRequest(script=plan(batch), scope="all")
    limits = limits_of(model, machines, request)
    meshes = shapes(limits, request)
    variant_rows = variants(limits, meshes, np.arange(len(meshes), dtype=np.intp))
    assert int(meshes.world.max()) <= machines.device_count
    for row in range(0, len(variant_rows), 41):
        intended = plan_of(model, request, meshes, variant_rows, row, precision)
        shape = int(variant_rows.shape[row])
        assert intended.world_size == meshes.world[shape]
        assert intended.data_parallel_degree * intended.batch.num_microbatches <= batch
        assert list(intended.mesh)[-1] == "split" or intended.mesh.get("split", 1) == 1


def test_no_core_is_quicker_at_any_module_than_the_best_worker() -> None:
    model, machines = architecture("resnet", {"depth": 18}), unlike_hosts()
    best_case, ops, count = BestCase(model, machines, "full"), op_table(model), len(model.modules)
    best = best_case.worker(best_case.ground(8).best)
    for strategy in (compute_cost.forward, compute_cost.backward):
        least = strategy(ops, best, 4, count).seconds
        for host_group in place_ranks(machines, 8):
            seconds = strategy(ops, worker_at(host_group, model.dtype, "full"), 4, count).seconds
            assert np.all(least <= seconds * (1 + ROUNDING))


@pytest.mark.parametrize("parts", [2, 4, 8, 64])
@pytest.mark.parametrize("along", ["split", "space"])
def test_parts_of_a_model_take_no_less_than_their_part_of_its_bound(parts: int, along: str) -> None:
    """Here images of 4 x 4 have a higher rate than those of 16 x 16, and parts of weights a lower one than all."""
    rates = {"image_rates": ()} if along == "split" else {"convolution_rates": ()}
    model, device = architecture("resnet", {"depth": 18}), dataclasses.replace(convolving(1.2), **rates)
    best_case, ops, count = BestCase(model, cluster(device), "full"), op_table(model), len(model.modules)
    best = best_case.ground(1).best
    part = np.full(count, 1 / parts)
    divided_ops = ops.divided(part, part if along == "split" else np.ones(count))
    for least, strategy in zip(
        best_case.seconds(SAMPLES, best), (compute_cost.forward, compute_cost.backward), strict=True
    ):
        took = at_least(strategy, divided_ops, best_case.worker(best), SAMPLES, count, weights=False).seconds.sum()
        assert least <= parts * took * (1 + ROUNDING)


def test_a_models_bound_is_that_of_the_quicker_batch_statistics() -> None:
    model, seconds = architecture("resnet", {"depth": 18}), []
    best_case, ops, count = BestCase(model, cluster(cpu()), "full"), op_table(model), len(model.modules)
    best = best_case.ground(1).best
    for strategy, least in zip((compute_cost.forward, compute_cost.backward), best_case.seconds(6, best), strict=True):
        for statistics in (ops, taken_in_passes(ops)):
            seconds.append(strategy(statistics, best_case.worker(best), 6, count, weights=False).seconds.sum())
            assert least <= seconds[-1] * (1 + ROUNDING)
    assert len({*seconds}) == 4
