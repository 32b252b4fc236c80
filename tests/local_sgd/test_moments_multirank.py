"""Second moments that are corrected are those of exact training, where gradients of parts of a batch are noisier."""

import math

import pytest
import torch
from torch import nn

from harness import run_ranks
from tutti.comm.world import join_world
from tutti.local_sgd.replica_group import ReplicaGroup
from tutti.local_sgd.second_moments import MAX_SAMPLED_PER_TENSOR, SecondMomentCorrection, check_correctable
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.planner.relaxed_strategies import CORRECTABLE

SIGNALS = (1.0, 0.3, 0.0)
"""Of one tensor each: what all replicas' gradients have in common, beside noise of 1."""

STEPS = 60


def moments_of(size: int) -> list[tuple[float, float, float]]:
    """Of each tensor: r, and the mean second moment of this replica and of exact training."""
    torch.set_default_dtype(torch.float64)
    world = join_world()
    layout = Layout.of(nn.Linear(1, 1), Mesh({"replicate": size}, world.rank), ())
    replicas = ReplicaGroup.of(
        layout.mesh, layout.channel("parameters", "replicate"), layout.channel("scalars", "replicate")
    )
    mine, exact = ([nn.Parameter(torch.zeros(40, 50)) for _ in SIGNALS] for _ in range(2))
    own, whole = torch.optim.Adam(mine, betas=(0.9, 0.98)), torch.optim.Adam(exact, betas=(0.9, 0.98))
    moments = SecondMomentCorrection(replicas, (own,), mine)
    noise = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        moments.start()
        for p, q, signal in zip(mine, exact, SIGNALS, strict=True):
            every = torch.randn(size, 40, 50, generator=noise) + signal
            p.grad, q.grad = every[world.rank].clone(), every.mean(0)
        own.step()
        whole.step()
        moments.updated()
    ratios = moments.ratios
    moments.cancel()
    both = zip(mine, exact, strict=True)
    values = [(own.state[p]["exp_avg_sq"].mean(), whole.state[q]["exp_avg_sq"].mean()) for p, q in both]
    return [(ratio, float(a), float(b)) for ratio, (a, b) in zip(ratios, values, strict=True)]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_moments_are_those_of_the_mean_gradient(size: int) -> None:
    """Within what a few thousand values tell, where they would be up to `size` times as large."""
    for one in run_ranks(moments_of, size, size):
        for (ratio, mine, exact), signal in zip(one, SIGNALS, strict=True):
            assert ratio == pytest.approx((signal**2 + 1 / size) / (signal**2 + 1), rel=0.08)
            assert mine == pytest.approx(exact, rel=0.15)


def test_large_tensors_are_looked_at_in_turns() -> None:
    """Few values a step, and each of them once in as many steps as its stride."""
    p = nn.Parameter(torch.zeros(7, 211, dtype=torch.float64))
    optimizer = torch.optim.AdamW([p])
    moments = SecondMomentCorrection(ReplicaGroup(), (optimizer,), [p])
    gradient = torch.arange(1.0, 1 + p.numel(), dtype=torch.float64).view_as(p)
    stride = math.ceil(p.numel() / MAX_SAMPLED_PER_TENSOR)
    seen: list[float] = []
    for _ in range(stride):
        moments.start()
        p.grad = gradient.clone()
        optimizer.step()
        moments.updated()
        values = moments.sums[1][:-1]
        assert len(values) == p.numel() // stride
        assert float(moments.sums[1][-1]) == float(values.square().sum())
        seen += values.tolist()
    assert sorted(seen) == gradient.flatten()[: len(seen)].tolist()


def test_an_update_that_was_left_out_corrects_nothing() -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW([p])
    moments = SecondMomentCorrection(ReplicaGroup(), (optimizer,), [p])
    p.grad = torch.ones(5)
    moments.updated()  # no step was made
    assert not optimizer.state
    assert not moments.sums[1].any()


def test_the_planner_offers_it_for_optimizers_that_can() -> None:
    p = nn.Parameter(torch.ones(5))
    for name in CORRECTABLE:
        check_correctable(getattr(torch.optim, name)([p]))
