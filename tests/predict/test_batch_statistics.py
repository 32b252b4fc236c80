"""Exchanges of batch statistics, counted by hand."""

import pytest

from tutti.predict.batch_statistics import statistics_s
from tutti.predict.network import Link
from tutti.spec.model import ModelSpec, ModuleSpec
from tutti.spec.plan import BatchPlan, Plan

LINK = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
NORM = ModuleSpec(name="norm", kind="BatchNorm2d", parameters=64, buffer_nbytes=2 * 32 * 4 + 8, batch_statistics=True)
MODEL = ModelSpec(name="m", modules=(NORM, ModuleSpec(name="plain", kind="LayerNorm", parameters=64)))


def plan(degree: int, microbatches: int = 1) -> Plan:
    batch = BatchPlan(global_batch_size=16, num_microbatches=microbatches)
    return Plan(batch=batch, mesh={"replicate": degree})


def test_by_hand_for_32_channels_on_4_ranks() -> None:
    forward, backward = statistics_s(MODEL, plan(4), LINK)
    assert forward == pytest.approx(3 * 1e-4 + 3 / 4 * (4 * 65 * 4) / 1e9, rel=1e-12)
    assert backward == pytest.approx(6 * 1e-4 + 2 * 3 / 4 * (64 * 4) / 1e9, rel=1e-12)


def test_one_rank_exchanges_nothing_and_microbatches_each_do() -> None:
    assert statistics_s(MODEL, plan(1), LINK) == (0.0, 0.0)
    once, thrice = statistics_s(MODEL, plan(2), LINK), statistics_s(MODEL, plan(2, 3), LINK)
    assert thrice == pytest.approx([3 * value for value in once])
