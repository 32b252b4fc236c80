"""Sums over ranks of one host through shared memory, against sums made on one rank."""

import gc
import os
import weakref

import pytest
import torch
import torch.distributed as dist

from harness import RankFailed, run_ranks
from tutti.comm.rendezvous import make_local_group
from tutti.comm.shared_memory import SharedMemoryAllReduce
from tutti.comm.shared_segment import attached_resident_nbytes
from tutti.comm.world import join_world

SIZES = (0, 1, 2, 31, 33, 1000, 65_537, 300_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


def _values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * rank + numel)
    return torch.randint(-20, 20, (numel,), generator=draw).to(dtype)


def sums(ranks: int) -> list[torch.Tensor]:
    """Sums of all sizes and types, several under way at once, twice over the same rooms."""
    world = join_world()
    local_group = make_local_group()
    assert local_group is not None
    cases = [(numel, dtype) for numel in SIZES for dtype in DTYPES]
    segments = [local_group.new_segment(numel * dtype.itemsize) for numel, dtype in cases]
    found = []
    for turn in range(2):
        tensors = [segment.tensor(dtype, numel) for (_, segment), (numel, dtype) in zip(segments, cases, strict=True)]
        for tensor, (numel, dtype) in zip(tensors, cases, strict=True):
            tensor.copy_(_values(world.rank + turn, numel, dtype))
        handles = []
        for (number, _), (numel, dtype) in zip(segments, cases, strict=True):
            handles.append(SharedMemoryAllReduce(local_group, number, numel, dtype))
            handles[0].is_completed()
        order = handles if world.rank % 2 else handles[::-1]  # ranks may wait in any order
        for handle in order:
            handle.wait()
        found += [tensor.clone() for tensor in tensors]
    return found


MANY = [pytest.param(ranks, marks=pytest.mark.long) for ranks in (5, 8)]


@pytest.mark.parametrize("ranks", [2, 3, 4, *MANY])
def test_all_sizes_and_types(ranks: int) -> None:
    everyone = run_ranks(sums, ranks, ranks)
    cases = [(numel, dtype) for numel in SIZES for dtype in DTYPES]
    for turn in range(2):
        for position, (numel, dtype) in enumerate(cases):
            expected = sum(_values(rank + turn, numel, torch.int64) for rank in range(ranks))
            for found in everyone:
                assert torch.equal(found[turn * len(cases) + position], torch.as_tensor(expected).to(dtype))


def probed() -> list[bool]:
    """Whether sums are known to be finite: with nothing, a NaN or an infinity on rank 1, or too much on all."""
    world = join_world()
    local_group = make_local_group()
    assert local_group is not None
    found = []
    for numel in SIZES[1:]:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            number, segment = local_group.new_segment(numel * dtype.itemsize)
            for spoilt in (None, torch.nan, torch.inf, None, torch.finfo(dtype).max):
                tensor = segment.tensor(dtype, numel).fill_(1)
                if spoilt is not None and (world.rank == 1 or spoilt == torch.finfo(dtype).max):
                    tensor[numel // 2] = spoilt
                handle = SharedMemoryAllReduce(local_group, number, numel, dtype, probed=True)
                handle.wait()
                found.append(handle.finite == (spoilt is None) == bool(tensor.isfinite().all()))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_not_finite_in_a_sum_is_known_to_all(ranks: int) -> None:
    assert all(all(found) for found in run_ranks(probed, ranks))


def many(ranks: int) -> tuple[torch.Tensor, bool]:
    """More sums than there are slots; real values, so that the order of adding shows."""
    world, local_group = join_world(), make_local_group()
    assert local_group is not None
    number, segment = local_group.new_segment(4 * 1001)
    values = segment.tensor(torch.float32, 1001)
    right = True
    for step in range(300):
        everyone = [torch.randn(1001, generator=torch.Generator().manual_seed(7 * step + r)) for r in range(ranks)]
        values.copy_(everyone[world.rank])
        SharedMemoryAllReduce(local_group, number, 1001, torch.float32).wait()
        expected = everyone[0].clone()
        for other in everyone[1:]:
            expected += other
        right = right and torch.equal(values, expected)
    return values.clone(), right


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree_bit_for_bit_over_many_sums(ranks: int) -> None:
    results = run_ranks(many, ranks, ranks)
    assert all(right for _, right in results)
    assert all(torch.equal(results[0][0], values) for values, _ in results)


def crossed(ranks: int) -> float:
    """One rank waits for the sum first, the other for something else first: a sum needs only that all started it."""
    world, local_group = join_world(), make_local_group()
    assert local_group is not None
    number, segment = local_group.new_segment(4 * 100)
    values = segment.tensor(torch.float32, 100).fill_(world.rank + 1)
    handle = SharedMemoryAllReduce(local_group, number, 100, torch.float32)
    token = torch.ones(1)
    if world.rank == 0:
        handle.wait()
        dist.all_reduce(token)
    else:
        dist.all_reduce(token)
        handle.wait()
    return float(values[99])


def test_a_rank_that_waits_does_what_the_others_have_not_begun() -> None:
    assert run_ranks(crossed, 3, 3, timeout_s=30) == [6.0] * 3


def halves(_: int) -> torch.Tensor:
    """256 + 1 + 1 in bfloat16: added one by one in that precision, whose steps are 2 here, the ones get lost."""
    world, local_group = join_world(), make_local_group()
    assert local_group is not None
    number, segment = local_group.new_segment(2 * 64)
    values = segment.tensor(torch.bfloat16, 64).fill_(1 if world.rank else 256)
    SharedMemoryAllReduce(local_group, number, 64, torch.bfloat16).wait()
    return values.clone()


def test_half_precisions_are_summed_in_float32() -> None:
    assert torch.equal(run_ranks(halves, 3, 3)[0], torch.full((64,), 258.0).bfloat16())


def unequal(_: int) -> str:
    world, local_group = join_world(), make_local_group()
    assert local_group is not None
    number, _ = local_group.new_segment(4 * 64)
    try:
        SharedMemoryAllReduce(local_group, number, 10 + world.rank, torch.float32).wait()
    except RuntimeError as error:
        return str(error)
    return ""


def test_sizes_that_differ_are_named() -> None:
    assert any("different sizes: [10, 11]" in text for text in run_ranks(unequal, 2, 2, timeout_s=30))


def deserted(_: int) -> None:
    world, local_group = join_world(), make_local_group()
    assert local_group is not None
    number, _ = local_group.new_segment(4 * 64)
    if world.rank == 1:
        os._exit(0)
    SharedMemoryAllReduce(local_group, number, 64, torch.float32).wait()


def test_a_rank_that_has_ended_is_noticed() -> None:
    with pytest.raises(RankFailed, match=r"Connection closed by peer|died without a word"):
        run_ranks(deserted, 2, 2, timeout_s=30)


def dropped(_: int) -> bool:
    """A team and its rooms end with the last that refers to them, without a collection of cycles."""
    gc.disable()
    join_world()
    local_group = make_local_group()
    assert local_group is not None
    number, _ = local_group.new_segment(4 * 64)
    SharedMemoryAllReduce(local_group, number, 64, torch.float32).wait()
    gone = weakref.ref(local_group)
    del local_group
    return gone() is None


def test_memory_goes_with_its_team() -> None:
    assert run_ranks(dropped, 2, 2) == [True, True]


def borrowed(_: int) -> tuple[int, int]:
    join_world()
    local_group = make_local_group()
    assert local_group is not None
    before = attached_resident_nbytes()
    number, segment = local_group.new_segment(4 * 2**20)
    segment.tensor(torch.float32, 2**20).fill_(1)
    mine = attached_resident_nbytes() - before
    SharedMemoryAllReduce(local_group, number, 2**20, torch.float32).wait()
    return mine, attached_resident_nbytes() - before


def test_memory_of_others_is_told_apart_from_a_ranks_own() -> None:
    results = run_ranks(borrowed, 2, 2)
    assert all(mine < 2**16 for mine, _ in results)  # at most pages of the team's tables
    assert 2 * 2**20 <= sum(others for _, others in results) <= 2 * 4 * 2**20 + 2**16
