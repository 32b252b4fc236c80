"""Exchanges of any tensors between ranks of one host through shared memory, against what one rank computes."""

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from tutti.comm.shared_memory import make_shared_memory_communicator
from tutti.comm.world import join_world

SIZES = (1, 5, 0, 1000, 70_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def _values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank + 10 * size)
    return torch.randint(-20, 20, (size,), generator=draw).to(dtype)


def reductions(ranks: int) -> bool:
    world, communicator = join_world(), make_shared_memory_communicator()
    assert communicator is not None
    right = True
    for turn in range(40):  # more exchanges than there are slots
        for size, dtype in ((SIZES[turn % len(SIZES)], dtype) for dtype in DTYPES):
            everyone = torch.stack([_values(rank, size, dtype) for rank in range(ranks)])
            total, largest = everyone[world.rank].clone(), everyone[world.rank].clone().view(1, -1)
            communicator.reduce(total)
            communicator.reduce(largest, dist.ReduceOp.MAX)
            right = right and torch.equal(total, everyone.sum(0).to(dtype))
            right = right and torch.equal(largest[0], everyone.max(0).values)
    return right


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_and_maxima(ranks: int) -> None:
    assert all(run_ranks(reductions, ranks, ranks))


def rows(ranks: int) -> bool:
    """Several gathers and scattered sums under way at once, ended in another order on every other rank."""
    world, communicator = join_world(), make_shared_memory_communicator()
    assert communicator is not None
    right = True
    for size in SIZES * 3:
        mine = _values(world.rank, size, torch.float32)
        everyone = [_values(rank, size, torch.float32) for rank in range(ranks)]
        segments, part = torch.empty(ranks, size), torch.empty(size)
        buffers = [torch.stack([one * (row + 1) for row in range(ranks)]) for one in everyone]
        works = [communicator.gather(segments, mine), communicator.scatter_sum(buffers[world.rank], part)]
        mine.fill_(-99)  # what was handed in may be used again
        buffers[world.rank].fill_(-99)
        works[0].is_completed()
        for work in works if world.rank % 2 else works[::-1]:
            work.wait()
        right = right and torch.equal(segments, torch.stack(everyone))
        right = right and torch.equal(part, torch.stack(everyone).sum(0) * (world.rank + 1))
    return right


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rows_to_everyone_and_sums_of_rows(ranks: int) -> None:
    assert all(run_ranks(rows, ranks, ranks))


def lent(ranks: int) -> bool:
    """Tensors made in the desk's memory, several before the first is exchanged."""
    world, communicator = join_world(), make_shared_memory_communicator()
    assert communicator is not None
    right = True
    for _ in range(3):
        mine = [communicator.borrow(size, torch.float32) for size in SIZES * 2]
        segments = [torch.empty(ranks, size) for size in SIZES * 2]
        for tensor, size in zip(mine, SIZES * 2, strict=True):
            tensor.copy_(_values(world.rank, size, torch.float32))
        for work in [communicator.gather(*both) for both in zip(segments, mine, strict=True)]:
            work.wait()
        for rows, size in zip(segments, SIZES * 2, strict=True):
            everyone = [_values(rank, size, torch.float32) for rank in range(ranks)]
            right = right and torch.equal(rows, torch.stack(everyone))
    return right


def test_memory_that_is_lent() -> None:
    assert all(run_ranks(lent, 3, 3))


def agree(ranks: int) -> torch.Tensor:
    world, communicator = join_world(), make_shared_memory_communicator()
    assert communicator is not None
    values = torch.randn(10_001, generator=torch.Generator().manual_seed(world.rank))
    communicator.reduce(values)
    return values


def test_sums_are_bit_identical_on_all_ranks() -> None:
    results = run_ranks(agree, 4, 4)
    assert all(torch.equal(results[0], other) for other in results)
    parts = [torch.randn(10_001, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    assert torch.equal(results[0], ((parts[0] + parts[1]) + parts[2]) + parts[3])
