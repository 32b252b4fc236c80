"""Sharding's exchanges over sockets: everyone's parts, and rows to their ranks, as messages."""

import pytest
import torch

from harness import run_ranks


def exchanged(first: str) -> tuple[list[float], list[float]]:
    """What a rank gathers and what it has to sum, when ranks do not begin the two in the same order."""
    import torch.distributed as dist

    from tutti.comm.traffic import CommChannel, Traffic
    from tutti.comm.world import join_world
    from tutti.parallel.sharding.shard_collectives import ShardGroup, addends, gather, scatter_sum

    world = join_world()
    size = world.world_size
    shard_group = ShardGroup(dist.group.WORLD, CommChannel(Traffic()))
    assert shard_group.rows
    mine = torch.full((2,), float(world.rank))
    segments, received = torch.zeros(size, 2), torch.zeros(size, 3)
    buffer = torch.arange(3.0 * size).reshape(size, 3) + 100 * world.rank
    found: list[float] = []

    def begin_gather() -> None:
        begun.append(
            gather(mine, shard_group, lambda: segments, lambda rows: found.extend(torch.stack(list(rows)).flatten()))
        )

    def begin_sum() -> None:
        begun.append(scatter_sum(buffer, received, shard_group))

    begun: list[object] = []
    order = [begin_gather, begin_sum] if (first == "gather") == (world.rank == 0) else [begin_sum, begin_gather]
    for begin in order:
        begin()
    for one in begun:
        one.wait()  # type: ignore[attr-defined]
    added = torch.stack(list(addends(buffer, received, shard_group)))
    assert len(added) == size
    return [float(value) for value in found], added.sum(0).tolist()


@pytest.mark.parametrize(("ranks", "first"), [(2, "gather"), (3, "sum")])
def test_parts_and_rows_arrive_whatever_is_begun_first(ranks: int, first: str) -> None:
    for rank, (parts, summed) in enumerate(run_ranks(exchanged, ranks, first)):
        assert parts == [float(other) for other in range(ranks) for _ in range(2)]
        assert summed == [sum(3.0 * rank + place + 100 * other for other in range(ranks)) for place in range(3)]
