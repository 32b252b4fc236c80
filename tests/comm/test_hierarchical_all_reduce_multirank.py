"""Sums that all ranks of several hosts get whole, against one rank's."""

import pytest
import torch
import torch.distributed as dist
from noted import note
from several_hosts import tiered

from harness import run_ranks

SIZES = (5, 0, 1000, 1, 70_001, 3)
HOSTS = [(2, 2), (3, 1), (1, 2, 2), pytest.param((3, 3), marks=pytest.mark.long)]


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank + 10 * size)
    return torch.randn(size, generator=draw, dtype=torch.float64).to(dtype)


def summed(hosts: tuple[int, ...]) -> list[tuple[torch.Tensor, ...]]:
    """Sums of several sizes and dtypes and their largest values, twice, so that rooms are used again; with parts to
    everyone between them, as others ask for."""
    rank, communicator = tiered(hosts)
    found = []
    for turn in range(2):
        for size in SIZES:
            for dtype in (torch.float64, torch.bfloat16):
                mine, other = (values(rank + turn, size, dtype) for _ in range(2))
                everyone = torch.empty(sum(hosts), size, dtype=dtype)
                works = [communicator.start_reduce(mine), communicator.gather(everyone, other.clone())]
                communicator.reduce(other, dist.ReduceOp.MAX)
                for work in works:
                    work.wait()
                found.append((mine, other, everyone))
    return found


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_sums_over_hosts(hosts: tuple[int, ...]) -> None:
    results = run_ranks(summed, sum(hosts), hosts)
    cases = [(turn, size, dtype) for turn in range(2) for size in SIZES for dtype in (torch.float64, torch.bfloat16)]
    for position, (turn, size, dtype) in enumerate(cases):
        everyone = torch.stack([values(rank + turn, size, dtype).double() for rank in range(sum(hosts))])
        exact = dtype is torch.float64
        for found in results:
            total, most, gathered = found[position]
            assert torch.equal(total, results[0][position][0])  # bit for bit
            tolerance = (
                1e-12 if exact else 2**-8 * (len(hosts) + 1) * float(everyone.abs().sum(0).max(0)[0] if size else 0)
            )
            torch.testing.assert_close(total.double(), everyone.sum(0), rtol=0, atol=tolerance)
            assert torch.equal(most.double(), everyone.max(0)[0])
            assert torch.equal(gathered.double(), everyone)


def crossing(hosts: tuple[int, ...]) -> list[list[int]]:
    """Values of each message to another host, by the size of what is summed."""
    _, communicator = tiered(hosts)
    sent: list[int] = []
    note("send", lambda tensor: sent.append(tensor.numel()))
    found = []
    for size in (10, 8, 1):
        sent.clear()
        communicator.reduce(torch.zeros(size))
        found.append(list(sent))
    return found


def test_ranks_of_a_host_divide_what_crosses() -> None:
    """A host sends its sums of the other's rows, then its own rows' sums: of two hosts each as much as is summed, in
    parts of one size of which the last are filled up."""
    assert run_ranks(crossing, 4, (2, 2)) == [[[3, 3], [2, 2], [1, 1]]] * 4
    first, others, lone = [[3, 3], [2, 2], [1, 1]], [[3], [2], [1]], [[3] * 4, [2] * 4, [1] * 4]
    assert run_ranks(crossing, 4, (3, 1)) == [first, others, others, lone]


def rooms_taken(hosts: tuple[int, ...]) -> int:
    """By many sums of one size, one after another."""
    _, communicator = tiered(hosts)
    for _ in range(100):
        communicator.reduce(torch.zeros(1000))
    return len(communicator.communicator._staging._segments)


def test_rooms_are_used_again() -> None:
    assert max(run_ranks(rooms_taken, 4, (2, 2))) < 15
