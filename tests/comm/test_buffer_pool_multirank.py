"""Exchanges read where they lie: what is kept there lasts, changes only when all have read, and takes few rooms."""

import time

import torch

from harness import run_ranks
from tutti.comm.shared_memory import SharedMemoryCommunicator, make_shared_memory_communicator
from tutti.comm.world import join_world


def _open() -> SharedMemoryCommunicator:
    join_world()
    communicator = make_shared_memory_communicator()
    assert communicator is not None
    return communicator


def keeping(size: int) -> tuple[list[torch.Tensor], int]:
    """What a rank sees in five rounds, and the rooms it has made."""
    communicator = _open()
    mine = communicator.keep(torch.arange(size, dtype=torch.float64) + 100 * communicator.local_group.rank)
    rounds: list[torch.Tensor] = []
    for _ in range(5):
        communicator.share(mine, lambda everyone: rounds.append(torch.stack(everyone))).wait()
        communicator.synchronize()
        mine += 1
    return rounds, len(communicator._staging._segments)


def test_what_lasts_is_read_in_place() -> None:
    ranks = 3
    for size in (0, 1, 1001):
        expected = torch.arange(size, dtype=torch.float64) + 100 * torch.arange(ranks).unsqueeze(1)
        for rounds, segments in run_ranks(keeping, ranks, size):
            assert all(torch.equal(seen, expected + number) for number, seen in enumerate(rounds))
            assert segments == 1


def reading_late(settles: bool) -> list[float]:
    """What of rank 0's a rank reads, if rank 1 does so late and rank 0 then writes."""
    communicator = _open()
    mine = communicator.keep(torch.full((1000,), float(communicator.local_group.rank)))
    seen: list[float] = []

    def read(everyone: list[torch.Tensor]) -> None:
        if communicator.local_group.rank == 1:
            time.sleep(0.3)
        seen.extend(set(everyone[0].tolist()))

    communicator.share(mine, read).wait()
    if settles:
        communicator.synchronize()
    mine.fill_(-1)
    return seen


def test_a_late_reader_is_waited_for() -> None:
    assert run_ranks(reading_late, 2, True) == [[0.0], [0.0]]
    assert run_ranks(reading_late, 2, False) == [[0.0], [-1.0]]  # what settling is for


def running_ahead(left: int | None) -> tuple[list[list[float]], int]:
    """Sums on rank 0, which starts them as soon as it may, and on rank 1, which takes its time; and rooms made."""
    communicator = _open()
    totals, out = [], torch.empty(500)
    for number in range(10):
        if left is not None:
            communicator.synchronize(left)
        buffer = communicator.borrow(1000, torch.float32)
        buffer.fill_(number + communicator.local_group.rank)
        work = communicator.scatter_sum(buffer, out)
        if communicator.local_group.rank == 1:
            while not work._exchange.present():  # type: ignore[union-attr]
                time.sleep(0.001)
            time.sleep(0.02)
        work.wait()
        totals.append(list(set(out.tolist())))
    return totals, len(communicator._staging._segments)


def test_who_is_ahead_takes_few_rooms() -> None:
    for left, most in ((0, 1), (1, 2)):
        for totals, segments in run_ranks(running_ahead, 2, left):
            assert totals == [[2.0 * number + 1] for number in range(10)]
            assert segments <= most
