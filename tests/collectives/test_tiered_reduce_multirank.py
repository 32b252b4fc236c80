"""Sums that all wait for over several hosts (told apart by a name given here), against one rank's."""

from collections.abc import Callable
from typing import Any

import killed
import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from tutti.collectives import Desk, TieredReduce, make_reducer, rooms
from tutti.runtime.world import join

SIZES = (5, 0, 1000, 1, 70_001, 3)
HOSTS = [(2, 2), (3, 1), (1, 2, 2), pytest.param((3, 3), marks=pytest.mark.long)]


def on_hosts(hosts: tuple[int, ...]) -> tuple[int, Desk | TieredReduce | None]:
    """This rank's place and where it sums, where hosts have so many ranks."""
    world = join()
    own = [host for host, ranks in enumerate(hosts) for _ in range(ranks)][world.rank]
    rooms.host_identity = lambda: f"host {own}"
    return world.rank, make_reducer()


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank + 10 * size)
    return torch.randn(size, generator=draw, dtype=torch.float64).to(dtype)


def summed(hosts: tuple[int, ...]) -> list[tuple[torch.Tensor, ...]]:
    """Sums of several sizes and dtypes and their largest values, twice, so that rooms are used again."""
    rank, tiers = on_hosts(hosts)
    assert isinstance(tiers, TieredReduce)
    found = []
    for turn in range(2):
        for size in SIZES:
            for dtype in (torch.float64, torch.bfloat16):
                mine, other = (values(rank + turn, size, dtype) for _ in range(2))
                tiers.reduce(mine)
                tiers.reduce(other, dist.ReduceOp.MAX)
                found.append((mine, other))
    return found


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_sums_over_hosts(hosts: tuple[int, ...]) -> None:
    results = run_ranks(summed, sum(hosts), hosts)
    cases = [(turn, size, dtype) for turn in range(2) for size in SIZES for dtype in (torch.float64, torch.bfloat16)]
    for position, (turn, size, dtype) in enumerate(cases):
        everyone = torch.stack([values(rank + turn, size, dtype).double() for rank in range(sum(hosts))])
        exact = dtype is torch.float64
        for found in results:
            total, most = found[position]
            assert torch.equal(total, results[0][position][0])  # bit for bit
            tolerance = (
                1e-12 if exact else 2**-8 * (len(hosts) + 1) * float(everyone.abs().sum(0).max(0)[0] if size else 0)
            )
            torch.testing.assert_close(total.double(), everyone.sum(0), rtol=0, atol=tolerance)
            assert torch.equal(most.double(), everyone.max(0)[0])


def crossing(hosts: tuple[int, ...]) -> list[int]:
    """Values of what this rank sums between hosts."""
    _, tiers = on_hosts(hosts)
    assert isinstance(tiers, TieredReduce)
    sent: list[int] = []
    usual = dist.all_reduce

    def counted(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        sent.append(tensor.numel())
        return usual(tensor, *rest, **named)

    dist.all_reduce = counted
    for size in (10, 7, 1):
        tiers.reduce(torch.zeros(size))
    return sent


def test_ranks_of_a_host_divide_what_crosses() -> None:
    assert run_ranks(crossing, 4, (2, 2)) == [[5, 4, 1], [5, 3]] * 2
    assert run_ranks(crossing, 4, (3, 1)) == [[10, 7, 1], [], [], [10, 7, 1]]


def rooms_taken(hosts: tuple[int, ...]) -> int:
    """By many sums of one size, one after another."""
    _, tiers = on_hosts(hosts)
    assert isinstance(tiers, TieredReduce)
    for _ in range(100):
        tiers.reduce(torch.zeros(1000))
    return len(tiers._desk._staging._rooms)


def test_rooms_are_used_again() -> None:
    assert max(run_ranks(rooms_taken, 4, (2, 2))) < 10


def kinds(hosts: tuple[int, ...]) -> str:
    return type(on_hosts(hosts)[1]).__name__


@pytest.mark.parametrize(("hosts", "kind"), [((1, 1), "NoneType"), ((2,), "Desk"), ((2, 1), "TieredReduce")])
def test_tiers_are_where_hosts_have_several_ranks(hosts: tuple[int, ...], kind: str) -> None:
    assert run_ranks(kinds, sum(hosts), hosts) == [kind] * sum(hosts)


def begun() -> Callable[[], None]:
    """An exchange between two hosts of two."""
    _, tiers = on_hosts((2, 2))
    assert isinstance(tiers, TieredReduce)
    return lambda: tiers.reduce(torch.zeros(7))


@pytest.mark.parametrize("dies", killed.DIES)
def test_a_killed_rank_is_told_to_all(dies: int) -> None:
    """To its host in shared memory, to its partners by their connections, to others when those have gone."""
    killed.check(run_ranks(killed.told, 4, dies, begun, timeout_s=30), dies)
