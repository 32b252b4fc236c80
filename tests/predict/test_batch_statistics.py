"""Exchanges of batch statistics, counted by hand."""

import pytest

from tutti.predict.batch_statistics import statistics_s
from tutti.predict.groups import Group, Span
from tutti.predict.network import Link
from tutti.spec.model import ModelSpec, ModuleSpec

LINK = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
NORM = ModuleSpec(name="norm", kind="BatchNorm2d", parameters=64, buffer_nbytes=2 * 32 * 4 + 8, batch_statistics=True)
MODEL = ModelSpec(name="m", modules=(NORM, ModuleSpec(name="plain", kind="LayerNorm", parameters=64)))


def group(ranks: int) -> Group:
    return Group(span=Span(ranks=ranks, hosts=1, per_host=ranks, meeting=1, leaving=0), node=LINK)


def test_by_hand_for_32_channels_on_4_ranks() -> None:
    forward, backward = statistics_s(MODEL, group(4))
    assert forward.tolist() == pytest.approx([3 * 1e-4 + 3 / 4 * (4 * 65 * 4) / 1e9, 0.0], rel=1e-12)
    assert backward.tolist() == pytest.approx([6 * 1e-4 + 2 * 3 / 4 * (64 * 4) / 1e9, 0.0], rel=1e-12)


def test_one_rank_exchanges_nothing() -> None:
    assert [part.any() for part in statistics_s(MODEL, group(1))] == [False, False]
