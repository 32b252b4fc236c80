"""Sums in a code whose rounds are messages of pairs travel by themselves, in a thread of their own."""

import time
from typing import Any

import pytest
import torch

from harness import run_ranks
from tutti.comm.traffic import Traffic
from tutti.compression.reducer import CountedCollectives, Rounds
from tutti.config.compression import parse_compression
from tutti.local_sgd.delayed_reduction import (
    CompressedReplicaSum,
    ReductionInRounds,
    ReductionInThread,
    threaded_chunks,
)
from tutti.local_sgd.replica_group import FlatTensors, ReplicaGroup

N = 600_001
"""Values: parts of unequal length."""


@pytest.mark.parametrize(
    ("numel", "nbytes", "parts"),
    [
        *[(1, 4.0, 1), (1 << 19, 4.0, 1), ((1 << 19) + 1, 4.0, 2), (8_000_000, 0.5, 16), (1 << 40, 0.5, 64)],
        *[(8_000_000, 0.25, 8), (3 << 20, 1 / 3, 4), (8_000_000, 0.001, 8)],
    ],
)
def test_parts_grow_in_number_up_to_a_most_and_the_shorter_a_code_the_larger_they_are(
    numel: int, nbytes: float, parts: int
) -> None:
    assert threaded_chunks(numel, nbytes) == parts


def test_what_goes_wrong_is_raised_where_it_is_waited_for() -> None:
    def rounds() -> Rounds:
        yield []
        raise RuntimeError("the peer is gone")

    traffic = Traffic()
    travel = ReductionInThread(
        [(CountedCollectives(lone=True), rounds())], 1, traffic.channel("parameters", ("replicate",))
    )
    travel._thread.join()
    travel.advance(1)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        travel.finish()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("code", "by_itself"),
    [("float64", True), ("one-bit", True), ("top-k,density=0.1", True), ("terngrad", False), ("powersgd", False)],
)
def test_a_sum_is_there_though_nobody_goes_on(size: int, code: str, by_itself: bool) -> None:
    assert run_ranks(travelled, size, code) == [by_itself] * size


def travelled(code: str) -> bool:
    """Whether a sum of the ranks' vectors arrived before it was asked for; the sum is right, and so are its bytes."""
    import torch.distributed as dist

    from tutti.comm.world import join_world, leave_world

    join_world()
    size, rank, how = dist.get_world_size(), dist.get_rank(), parse_compression(code)
    traffic = Traffic()
    channel = traffic.channel("parameters", ("replicate",))
    replicas = ReplicaGroup(rank, size, tuple(range(size)), None, channel, channel)
    sums = CompressedReplicaSum(replicas, how, FlatTensors([("a", torch.zeros(N, dtype=torch.float64))]), 4)
    flat = torch.linspace(-1.0, 1.0, N, dtype=torch.float64) * (rank + 1)
    ones = torch.ones_like(flat)
    means = torch.full_like(flat, torch.nan)
    travel: Any = sums.start([flat + ones], [ones], [means], 4)
    arrived = isinstance(travel, ReductionInThread) and all_see(travel, time.monotonic() + 30.0)
    assert arrived or isinstance(travel, ReductionInRounds)
    travel.finish()
    assert (
        sum(total.nbytes for total in traffic.take()) == sum(one.collectives.sent_nbytes for one in sums.reducers) > 0
    )
    if code == "float64":
        whole = 1 + torch.linspace(-1.0, 1.0, N, dtype=torch.float64) * ((size + 1) / 2)
        torch.testing.assert_close(means, whole, rtol=1e-12, atol=1e-12)
    dist.all_reduce(first := means.clone(), dist.ReduceOp.MAX)
    assert torch.equal(first, means)
    leave_world()
    return arrived


def all_see(travel: ReductionInThread, until: float) -> bool:
    """Whether all ranks see by then that it has arrived, while others are summed in the same group."""
    import torch.distributed as dist

    there = torch.zeros(2)
    while not there[0]:
        time.sleep(0.01)
        there = torch.tensor([float(travel.is_completed()), float(time.monotonic() < until)])
        dist.all_reduce(there, dist.ReduceOp.MIN)
        if not there[1]:
            break
    return bool(there[0])
