"""All-to-all, gather and sum by parts as messages of pairs: against what each rank has to have, and in which order
messages are begun."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from noted import note

from harness import run_ranks
from tutti.comm.point_to_point import all_gather, all_reduce_small, all_to_all, reduce_scatter, start_messages
from tutti.comm.traffic import untracked_channel
from tutti.comm.world import join_world
from tutti.compression.reducer import CountedCollectives
from tutti.local_sgd.replica_group import ReplicaGroup
from tutti.parallel.context.ring_attention import Ring
from tutti.parallel.mesh import Mesh
from tutti.parallel.pipeline.stage_links import make_links
from tutti.parallel.spatial import halo_exchange as space

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
SHAPES = ((), (3,), (2, 0), (5, 7))


def rows(source: int, target: int, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What `source` has for `target`."""
    draw = torch.Generator().manual_seed(source + 10 * target + 100 * count)
    return torch.randint(0, 5, (count, *shape), generator=draw).to(dtype)


def everything() -> bool:
    """Several under way at once, waited for in another order on every other rank; parts of all sizes, also none."""
    join_world()
    rank, size, right = dist.get_rank(), dist.get_world_size(), True
    group = dist.new_group(list(range(size)))
    for turn in range(12):
        dtype, shape = DTYPES[turn % len(DTYPES)], SHAPES[turn % len(SHAPES)]
        count = [[(3 * one + other + turn) % 4 for other in range(size)] for one in range(size)]
        sent = torch.cat([rows(rank, other, count[rank][other], shape, dtype) for other in range(size)])
        wanted = torch.cat([rows(other, rank, count[other][rank], shape, dtype) for other in range(size)])
        came = torch.empty_like(wanted)
        even = torch.cat([rows(rank, other, 2, shape, dtype) for other in range(size)])
        everyone = torch.cat([rows(other, rank, 2, shape, dtype) for other in range(size)])
        evenly, mine = torch.empty_like(everyone), rows(rank, 0, 3, shape, dtype)
        gathered = torch.empty(size * 3, *shape, dtype=dtype)
        counts = ([one[rank] for one in count], count[rank])
        works = [
            all_to_all(came, sent, group, counts),
            all_to_all(evenly, even, group),
            all_gather(gathered, mine, group),
        ]
        for work in works if rank % 2 else works[::-1]:
            work.wait()
        right = right and torch.equal(came, wanted) and torch.equal(evenly, everyone)
        right = right and torch.equal(gathered, torch.cat([rows(other, 0, 3, shape, dtype) for other in range(size)]))
        right = right and all(work.is_completed() for work in works)
    return right


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_what_is_its_own(ranks: int) -> None:
    assert all(run_ranks(everything, ranks))


def summed() -> bool:
    join_world()
    rank, size, right = dist.get_rank(), dist.get_world_size(), True
    for dtype, shape in ((torch.float64, (3, 5)), (torch.float32, (0, 2)), (torch.bfloat16, (7,)), (torch.int64, (2,))):
        whole = [torch.cat([rows(one, part, 1, shape, dtype)[0] for part in range(size)]) for one in range(size)]
        mine = torch.empty(shape, dtype=dtype)
        work = reduce_scatter(mine, whole[rank], None)
        work.wait()
        part = sum(rows(one, rank, 1, shape, dtype)[0] for one in range(size))
        right = right and torch.equal(mine, torch.as_tensor(part)) and work.is_completed()
    return right


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_sums(ranks: int) -> None:
    assert all(run_ranks(summed, ranks))


def summed_little() -> tuple[torch.Tensor, list[int]]:
    """Several at once, with what is large under way between, which ranks begin before or after."""
    join_world()
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [torch.linspace(-1.0, 1.0, 5, dtype=torch.float64) * (one + 1) * math.sqrt(rank + 2) for one in range(3)]
    large = torch.zeros(size, 1 << 16)
    rows = all_to_all(large, large.clone(), None) if rank % 2 else None
    begun = [all_reduce_small(one, None) for one in mine]
    (rows or all_to_all(large, large.clone(), None)).wait()
    for work, _ in begun[::-1]:
        work.wait()
        assert work.is_completed()
    return torch.stack(mine), [nbytes for _, nbytes in begun]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_of_little(ranks: int) -> None:
    (first, nbytes), *others = run_ranks(summed_little, ranks)
    whole = sum(math.sqrt(rank + 2) for rank in range(ranks))
    wanted = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64) * torch.tensor([[1.0], [2.0], [3.0]]) * whole
    torch.testing.assert_close(first, wanted, rtol=1e-12, atol=1e-12)
    assert nbytes == [(ranks - 1) * 5 * 8] * 3
    assert all(torch.equal(first, other) for other, _ in others)


def as_partners() -> None:
    me = dist.get_rank()
    for work in CountedCollectives().swap(torch.empty(3), torch.ones(3), 1 - me):
        work.wait()


def as_ring() -> None:
    order = SimpleNamespace(index=dist.get_rank(), degree=2)
    Ring(order=order, group=None, channel=untracked_channel()).pass_on(torch.ones(3))[1].wait()  # type: ignore[arg-type]


def as_replicas() -> None:
    me = dist.get_rank()
    replicas = ReplicaGroup(me, 2, (0, 1), None, untracked_channel(), untracked_channel())
    replicas.start_swap([torch.ones(3)], [1 - me], [[torch.empty(3)]], [1 - me]).wait()


def as_halos() -> None:
    me = dist.get_rank()
    place: Any = SimpleNamespace(dry=False, neighbour=lambda axis, part: 1 - me, group=None, halos=untracked_channel(),
                                 sent_nbytes=0)  # fmt: skip
    message = space.HaloRows(part=1 - me, rows=(0, 1))
    travel = space._start_transfer(torch.ones(2, 3), 0, 0, [message], [message], 0, place)
    assert travel.handle is not None
    travel.handle.wait()


def by(begin: Callable[..., Any]) -> None:
    """One of those that say what they wait for."""
    values = torch.ones(4)
    begin(values.clone() if begin is not all_gather else torch.empty(8), values, None).wait()


def by_parts() -> None:
    reduce_scatter(torch.empty(2), torch.ones(4), None).wait()


def plainly() -> None:
    me = dist.get_rank()
    for work in start_messages([(1 - me, torch.empty(3)), (1 - me, torch.empty(0))], [(1 - me, torch.ones(3))], None):
        work.wait()


WAYS: dict[str, Callable[[], None]] = {
    "all-to-all": partial(by, all_to_all),
    "gather": partial(by, all_gather),
    "sum by parts": by_parts,
    "messages": plainly,
    "swap of codes": as_partners,
    "ring attention": as_ring,
    "swap of replicas": as_replicas,
    "halos": as_halos,
}


def begun(name: str) -> list[str]:
    """Which of the two was begun, one after another."""
    join_world()
    seen: list[str] = []
    for which in ("send", "recv"):
        note(which, lambda tensor, which=which: seen.append(which))  # type: ignore[misc]
    WAYS[name]()
    return seen


@pytest.mark.parametrize("name", WAYS)
def test_receives_are_begun_before_sends(name: str) -> None:
    """Or a late rank's word that it is ready waits behind its own message, and both ways follow each other."""
    assert run_ranks(begun, 2, name) == [["recv", "send"]] * 2


def grouped() -> list[Any]:
    join_world()
    mesh = Mesh({"stage": 3}, dist.get_rank())
    groups = make_links(mesh, torch.device("cpu"), untracked_channel(), None)._groups
    return [
        groups(0, 1) is groups(1, 2) is groups(0, 2),
        groups(1, 0) is groups(2, 1),
        groups(0, 1) is groups(1, 0),
    ]


def test_messages_of_a_pipeline_have_a_group_for_each_direction() -> None:
    assert run_ranks(grouped, 3) == [[True, True, False]] * 3
