"""Predictions of sufficient factors and of 0/1 Adam: bytes by the formula, and where factors are chosen."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from cost_model.examples import cluster, cpu, link, mlp, plan
from tutti.config.compression import all_reduce_sent_nbytes, factors_sent_nbytes, parse_compression
from tutti.config.plan import BatchPlan, Plan, SyncPlan
from tutti.cost_model import predict
from tutti.cost_model.gradient_sync_cost import by_factors
from tutti.cost_model.module_costs import model_table
from tutti.profile.model_profile import describe_model

FACTORS = SyncPlan(compress=parse_compression("factors"))


def of_batch(size: int, sync: SyncPlan, ranks: int = 4) -> Plan:
    return replace(plan(ranks=ranks, sync=sync), batch=BatchPlan(global_batch_size=size))


def test_bytes_are_those_of_the_formula_on_either_side_of_where_factors_pay() -> None:
    """For a layer of 512 x 512, 2 * 512 * 512 / 1024 = 512 rows have as many bytes as its gradient."""
    few, many = (predict(mlp(512, 3), cluster(), of_batch(size, FACTORS)) for size in (508, 512))
    exact = predict(mlp(512, 3), cluster(), of_batch(512, SyncPlan()))
    assert few.sent_nbytes_per_rank == pytest.approx(3 * factors_sent_nbytes(127, 512, 512, 4))
    assert few.sent_nbytes_per_rank < many.sent_nbytes_per_rank == exact.sent_nbytes_per_rank
    assert many.step_time_s == exact.step_time_s


def test_they_pay_on_a_slow_network_and_not_on_a_fast_one() -> None:
    for bandwidth, pays in ((1e7, True), (1e12, False)):
        hosts = cluster(devices_per_node=1, count=2, links=(link("node"), link("network", 1e-6, bandwidth)))
        exact, short = (
            predict(mlp(), hosts, of_batch(64, sync, 2)).step_time_s.value for sync in (SyncPlan(), FACTORS)
        )
        assert (short < exact) == pays


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.up, self.down = nn.Linear(24, 96), nn.Linear(96, 24, bias=False)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(self.words(x)))).mean(1))


def test_shapes_are_known_of_a_described_model() -> None:
    """They are known with a bias and without, but not for a weight that an embedding shares."""
    spec = describe_model(
        Words(), (torch.zeros(4, 5, dtype=torch.int64),), {}, None, lambda out, _: out.sum(), samples=4
    )
    columns = model_table(spec)
    layers = by_factors(columns, of_batch(4, FACTORS), 4, ("replicate",), range(len(columns)))
    shapes = {columns.names[layer.module]: (layer.rows, layer.out_features, layer.in_features) for layer in layers}
    assert shapes == {"up": (20.0, 96.0, 24.0), "down": (20.0, 24.0, 96.0)}


def test_zero_one_adam_sends_its_ways_every_so_many_updates() -> None:
    how = parse_compression("zero-one-adam,freeze_step=100,longest=8")
    model, numel = mlp(512, 3), 3 * 512 * 512
    done = predict(model, cluster(), plan(ranks=4, sync=SyncPlan(compress=how)))
    assert done.sent_nbytes_per_rank == pytest.approx(all_reduce_sent_nbytes(how, [(numel,)], 4, 4) / 8)
    often = replace(how, longest=1)
    assert (
        done.step_time_s.value
        < predict(model, cluster(), plan(ranks=4, sync=SyncPlan(compress=often))).step_time_s.value
    )
    exact = predict(model, cluster(cpu()), plan(ranks=4)).memory
    # base values, changes and two residuals of the one-bit codec; there are no gradient buckets
    assert done.memory.communication <= exact.communication + 4 * 4 * numel
