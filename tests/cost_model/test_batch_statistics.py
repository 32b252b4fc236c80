"""The communication of batch statistics, counted by hand."""

from dataclasses import replace
from typing import Any

import pytest

from cost_model.examples import cluster, cpu, link, plan
from tutti.config.cluster import VectorRate
from tutti.config.consistency_modes import Relaxed
from tutti.config.model import ModelSpec, ModuleSpec, OpCost, OpKind
from tutti.config.plan import Plan, SyncPlan
from tutti.cost_model import cost_constants, predict
from tutti.cost_model.group_links import RankGroup, Span
from tutti.cost_model.microbatch_cost import statistics_s
from tutti.cost_model.rank_placement import Link

LINK = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
NORM = ModuleSpec(name="norm", kind="BatchNorm2d", parameters=64, buffer_nbytes=2 * 32 * 4 + 8, batch_statistics=True)
MODEL = ModelSpec(name="m", modules=(NORM, ModuleSpec(name="plain", kind="LayerNorm", parameters=64)))


def group(ranks: int) -> RankGroup:
    return RankGroup(span=Span(ranks=ranks, hosts=1, per_host=ranks, sharing_groups=1, leaving=0), node=LINK)


def test_by_hand_for_32_channels_on_4_ranks() -> None:
    forward, backward = statistics_s(MODEL, group(4))
    assert forward.tolist() == pytest.approx([3 * 1e-4 + 3 / 4 * (4 * 65 * 4) / 1e9, 0.0], rel=1e-12)
    assert backward.tolist() == pytest.approx([6 * 1e-4 + 2 * 3 / 4 * (64 * 4) / 1e9, 0.0], rel=1e-12)


def test_over_ranks_of_a_cpu_a_batch_norm_takes_the_passes_of_its_own() -> None:
    """Over several ranks, a batch norm takes `SHARED_NORM` times as long as a norm of rows.

    Other operators, a single rank and diverged replicas keep their own rates. Links take no time here, and a core has
    10 GFLOP/s.
    """
    rates = (
        VectorRate(kind="batch_norm", forward=0.001, backward=0.002),
        VectorRate(kind="norm", forward=0.01, backward=0.02),
    )

    def takes(kind: OpKind, intended: Plan, **device: Any) -> tuple[float, float]:
        op = OpCost(kind=kind, flops_forward=1e7, flops_backward=1e7, nbytes_forward=1.0, nbytes_backward=1.0)
        model = ModelSpec(name="m", modules=(replace(NORM, ops=(op,)),))
        links = (link("node", 1e-12, 1e18),)
        phases = predict(model, cluster(cpu(vector_rates=rates, **device), links), intended).phases
        return phases["forward"], phases["backward"]

    apart = plan(64, 2, sync=SyncPlan(mode="local", relaxed=Relaxed(period=4)))
    for intended, samples in ((plan(64, 1), 64), (apart, 32)):
        assert takes("batch_norm", intended)[1] == pytest.approx(takes("norm", intended)[1] * 10)
        assert takes("batch_norm", intended)[0] > samples * 1e7 / 32e9 / 0.001 * 0.99
    rows, batch = (takes(kind, plan(64, 2)) for kind in ("norm", "batch_norm"))
    assert batch == pytest.approx([cost_constants.SHARED_NORM * row for row in rows])
    assert takes("pool", plan(64, 2)) == pytest.approx(takes("pool", apart))


def test_one_rank_exchanges_nothing() -> None:
    assert [part.any() for part in statistics_s(MODEL, group(1))] == [False, False]
