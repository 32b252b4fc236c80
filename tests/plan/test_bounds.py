"""Bounds are admissible: no prediction is below them, for random plans of models of every kind."""

import dataclasses

import numpy as np
import pytest

from plan.machines import cards, mixed
from predict.examples import cluster, cpu, mlp, plan
from tutti.describe.architectures import architecture
from tutti.errors import PlanError
from tutti.plan.bounds import shape_bounds, variant_bounds
from tutti.plan.build import plan_of
from tutti.plan.choice import Request
from tutti.plan.enumerate import shapes, variants
from tutti.plan.limits import limits_of
from tutti.plan.room import Room
from tutti.plan.tables import Tables
from tutti.plan.words import plan_words
from tutti.predict import predict
from tutti.spec.cluster import ClusterSpec
from tutti.spec.model import ModelSpec
from tutti.spec.words import Precision

ROUNDING = 1e-9


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
    "mixed devices": (mlp(512, 4), mixed(), 60, "full"),
    "gpt on mixed devices": (
        architecture("gpt", {"layers": 6, "hidden": 256, "heads": 8, "seq_len": 512, "vocab": 1000}), mixed(), 30,
        "full",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_no_prediction_is_below_its_bounds(case: str) -> None:
    model, machines, batch, precision = CASES[case]
    script = dataclasses.replace(plan(batch), precision=precision)
    request = Request(script=script, scope="all", allow_microbatches=True)
    limits = limits_of(model, machines, request)
    found, tables = shapes(limits, request), Tables(model, machines, precision)
    coarse_s, coarse_nbytes = shape_bounds(tables, found, batch)
    generator = np.random.default_rng(len(case))
    ways = variants(limits, found, np.unique(generator.integers(0, len(found), 60)))
    bounds = variant_bounds(Room(tables, script), found, ways, batch)
    costed = 0
    for row in generator.permutation(len(ways))[:60].tolist():
        intended = plan_of(model, request, found, ways, row, precision)
        try:
            prediction = predict(model, machines, intended)
        except PlanError:
            continue
        costed += 1
        step_s, nbytes = prediction.step_time_s.value * (1 + ROUNDING), prediction.memory.total * (1 + ROUNDING)
        shape = int(ways.shape[row])
        assert bounds.step_s[row] <= step_s, plan_words(intended)
        assert coarse_s[shape] <= step_s, plan_words(intended)
        assert bounds.memory[row] <= nbytes, plan_words(intended)
        assert coarse_nbytes[shape] <= nbytes, plan_words(intended)
    assert costed >= 30


def test_estimates_are_near_enough_to_order_by() -> None:
    model, machines, batch, precision = CASES["llama, grouped queries"]
    script = dataclasses.replace(plan(batch), precision=precision)
    request = Request(script=script, scope="all")
    limits = limits_of(model, machines, request)
    found, tables = shapes(limits, request), Tables(model, machines, precision)
    ways = variants(limits, found, np.arange(len(found), dtype=np.intp)[::7])
    bounds = variant_bounds(Room(tables, script), found, ways, batch)
    ratios = []
    for row in range(0, len(ways), max(1, len(ways) // 60)):
        try:
            prediction = predict(model, machines, plan_of(model, request, found, ways, row, precision))
        except PlanError:
            continue
        ratios.append(bounds.likely_memory[row] / prediction.memory.total)
    assert 0.8 < float(np.median(ratios)) < 1.25


def test_every_row_is_a_plan_of_its_ranks_and_batch() -> None:
    model, machines, batch, precision = CASES["moe"]
    request = Request(script=plan(batch), scope="all")
    limits = limits_of(model, machines, request)
    found = shapes(limits, request)
    ways = variants(limits, found, np.arange(len(found), dtype=np.intp))
    assert int(found.world.max()) <= machines.device_count
    for row in range(0, len(ways), 41):
        intended = plan_of(model, request, found, ways, row, precision)
        shape = int(ways.shape[row])
        assert intended.world_size == found.world[shape]
        assert intended.data_parallel_degree * intended.batch.num_microbatches <= batch
        assert list(intended.mesh)[-1] == "split" or intended.mesh.get("split", 1) == 1
