"""Process groups that only their members open, on ranks that have opened different numbers of groups before."""

import torch
import torch.distributed as dist

from harness import run_ranks
from tutti.comm.rendezvous import open_group
from tutti.comm.world import join_world, leave_world


def _groups_after_unequal_ones() -> list[float]:
    """Ranks 0 and 2 open a group that rank 1 is not in; then all open two groups, as after unequal hosts."""
    world = join_world()
    sums = []
    try:
        if world.rank != 1:
            open_group([0, 2])
        for _ in range(2):
            value = torch.tensor(float(world.rank + 1))
            dist.all_reduce(value, group=open_group([0, 1, 2]))
            sums.append(float(value))
    finally:
        leave_world()
    return sums


def test_members_meet_however_many_groups_each_has_opened() -> None:
    assert run_ranks(_groups_after_unequal_ones, 3) == [[6.0, 6.0]] * 3
