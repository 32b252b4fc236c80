"""Sums of any tensors over ranks of several hosts, waited for at once: inside each host first, then between hosts.

Each rank of a host sums a part over its host, then over hosts, and all read the parts: so a host with a tensor of B
bytes sends 2 (hosts - 1) / hosts B, where a ring of all ranks sends up to 2 (ranks - 1) / ranks B out of it, and what
goes between ranks of a host leaves out the network.

Unlike `TieredSum`, the tensors lie anywhere, and the rank that waits does the work, without a thread.
"""

from typing import Any

import torch
import torch.distributed as dist

from tutti.collectives.combining import combine
from tutti.collectives.meeting import Tiers, make_team_or_tiers
from tutti.collectives.staged import Desk


class TieredReduce:
    """Where the ranks of a process group, on several hosts, sum what they all wait for. One thread of a rank calls."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers, self._desk = tiers, Desk(tiers.team)

    def reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Replace a contiguous `tensor` by the sum (or maximum) over ranks, bit-identical on all; half precisions are
        rounded once for each host. Raises RuntimeError when a rank has ended or does not come in time."""
        flat = tensor.view(-1)
        size = -(-flat.numel() // self._tiers.parts)
        parts = [flat[start : start + size] for start in range(0, flat.numel(), max(size, 1))]
        shared = self._desk.put(self._part(flat, size, op))
        for whole, theirs in zip(parts, shared.arrive(), strict=False):
            whole.copy_(theirs[: whole.numel()])
        shared.leave()

    def _part(self, flat: torch.Tensor, size: int, op: Any) -> torch.Tensor:
        """This rank's part of the sum, `size` values with anything behind where it has fewer or none."""
        room, start = self._desk.lend(size, flat.dtype), self._tiers.team.rank * size
        mine = room[: max(0, flat.numel() - start)] if self._tiers.across is not None else room[:0]
        whole = self._desk.put(flat)
        combine([theirs[start : start + mine.numel()] for theirs in whole.arrive()], [mine], op)
        whole.leave()
        if mine.numel():
            dist.all_reduce(mine, op, group=self._tiers.across)
        return room


def make_reducer(group: Any = None) -> Desk | TieredReduce | None:
    """Where a process group sums what its ranks wait for, if not in its own all-reduce: a desk on one host, in tiers
    where hosts have several of its ranks. Its ranks call this together."""
    found = make_team_or_tiers(group)
    if isinstance(found, Tiers):
        return TieredReduce(found)
    return None if found is None else Desk(found)
