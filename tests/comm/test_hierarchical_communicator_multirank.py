"""Parts to everyone and sums of rows over several hosts, against one rank's."""

import time
from collections.abc import Callable
from functools import partial

import killed
import pytest
import torch
from noted import note
from several_hosts import on_hosts, tiered

from harness import run_ranks

SIZES = (5, 0, 1000, 1, 70_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
HOSTS = [(2, 2), (3, 1), (1, 2, 2)]


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank + 10 * size)
    return torch.randint(-8, 8, (size,), generator=draw).to(dtype)


def exchanged(hosts: tuple[int, ...]) -> bool:
    """Several exchanges under way at once, ended in another order on every other rank: of what is lent, kept, or
    neither."""
    rank, communicator = tiered(hosts)
    ranks, right = sum(hosts), True
    kept = {size: communicator.keep(torch.zeros(size)) for size in SIZES}
    for turn in range(30):
        size, dtype = SIZES[turn % len(SIZES)], DTYPES[turn % len(DTYPES)]
        everyone = [values(other + turn, size, dtype) for other in range(ranks)]
        mine = [everyone[rank].clone(), communicator.borrow(size, dtype).copy_(everyone[rank])]
        if dtype is torch.float32:
            communicator.synchronize()  # the others have read it as it was
            mine.append(kept[size].copy_(everyone[rank]))
        buffer = communicator.borrow(ranks * size, dtype).view(ranks, size)
        for row in range(ranks):
            buffer[row] = everyone[rank] * (row % 3)
        part, found = torch.empty(size, dtype=dtype), []
        read = partial(_keep, found)
        works = [communicator.scatter_sum(buffer, part), *(communicator.share(one, read) for one in mine)]
        works[0].is_completed()
        for work in works if rank % 2 else works[::-1]:
            work.wait()
        right = right and all(torch.equal(one, torch.stack(everyone)) for one in found) and len(found) == len(mine)
        right = right and torch.equal(part, (torch.stack(everyone).sum(0) * (rank % 3)).to(dtype))
    communicator.synchronize()
    return right


def _keep(found: list[torch.Tensor], rows: list[torch.Tensor]) -> None:
    found.append(torch.stack(rows))


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_parts_and_sums_over_hosts(hosts: tuple[int, ...]) -> None:
    assert all(run_ranks(exchanged, sum(hosts), hosts))


def kinds(hosts: tuple[int, ...]) -> str:
    return type(on_hosts(hosts)[1]).__name__


@pytest.mark.parametrize(
    ("hosts", "kind"), [((1, 1), "NoneType"), ((2,), "SharedMemoryCommunicator"), ((2, 1), "HierarchicalCommunicator")]
)
def test_tiers_are_where_hosts_have_several_ranks(hosts: tuple[int, ...], kind: str) -> None:
    assert run_ranks(kinds, sum(hosts), hosts) == [kind] * sum(hosts)


def crossing(hosts: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Values that this rank's messages carry to other hosts: of parts, of rows to be summed."""
    _, communicator = tiered(hosts)
    sent: list[int] = []
    note("send", lambda tensor: sent.append(tensor.numel()))
    communicator.share(torch.zeros(7), lambda rows: None).wait()
    parts = list(sent)
    communicator.scatter_sum(torch.zeros(sum(hosts), 7), torch.zeros(7)).wait()
    return parts, sent[len(parts) :]


def test_a_host_sends_what_all_of_another_need_once() -> None:
    """Of 4 parts of 7 values a host of two sends its two, and two sums of what the other is to have."""
    for parts, sums in run_ranks(crossing, 4, (2, 2)):
        assert parts == sums == [7]


def begun() -> Callable[[], None]:
    """An exchange between two hosts of two."""
    _, communicator = tiered((2, 2))

    def exchange() -> None:
        communicator.share(torch.zeros(7), lambda rows: None).wait()
        time.sleep(0.02)

    return exchange


@pytest.mark.parametrize("dies", killed.DIES)
def test_a_killed_rank_is_told_to_all(dies: int) -> None:
    """To its host in shared memory, to its partners by their connections, to others when those have gone."""
    killed.check(run_ranks(killed.told, 4, dies, begun, timeout_s=30), dies)
