"""Sums over ranks of several hosts: inside each host first, then once per host between hosts, then inside again.

A host's ranks have the sum over their host in shared memory; each takes a part of it through the network, summed with
the same part of all hosts; then all read the others' parts. So a host with a tensor of B bytes sends what a rank of a
ring of hosts sends, 2 (hosts - 1) / hosts B, however many ranks it has, where a ring of all ranks sends up to
2 (ranks - 1) / ranks B out of it (Cho et al. 2019, BlueConnect, decompose an all-reduce in the same way).
"""

import torch
import torch.distributed as dist

from tutti.comm.expected import Expected
from tutti.comm.host_sum import HostSum
from tutti.comm.meeting import Tiers
from tutti.comm.team import DONE, READY, Team
from tutti.comm.worker import Errand, Worker


class TieredSum(Errand):
    """One sum under way. `room`: the number of this rank's room; `flat`: its values, which are summed in place. To wait
    for it raises RuntimeError when a rank has ended or does not come in time."""

    def __init__(self, tiers: Tiers, worker: Worker, room: int, flat: torch.Tensor) -> None:
        self._tiers, self._room, self._flat = tiers, room, flat
        super().__init__(worker, self._sum)

    def _sum(self) -> None:
        tiers, team = self._tiers, self._tiers.team
        HostSum(team, self._room, self._flat.numel(), self._flat.dtype).wait()
        if tiers.across is not None:
            dist.all_reduce(part_of(self._flat, tiers.parts, team.rank), group=tiers.across)
        share_parts(team, self._room, self._flat, tiers.parts)


def part_of(flat: torch.Tensor, parts: int, part: int) -> torch.Tensor:
    """The part of a flat tensor that one rank of a host exchanges between hosts."""
    return torch.tensor_split(flat, parts)[part]


def share_parts(team: Team, room: int, flat: torch.Tensor, parts: int) -> None:
    """Copy what each of the first `parts` ranks of a host has as its part of `flat`, which lies in a room."""
    slot = team.start(room, flat.numel(), lambda: None)
    Expected(team, slot, READY).wait()
    for part, theirs in enumerate(team.tensors(slot, flat.dtype)[:parts]):
        if part != team.rank:
            part_of(flat, parts, part).copy_(part_of(theirs, parts, part))
    team.tell(slot, DONE)
    Expected(team, slot, DONE).wait()  # the others have read this rank's part: it may change
