"""Sums over the ranks of one host, in place, where the tensors lie.

Every rank's tensor is in a room that all can reach. It is cut into a part for each rank; whoever takes a part reads it
from all ranks, in their order, and writes the sum to all of them, so the sums are bit-identical everywhere. A rank
takes its own part first; one that has to wait takes what nobody has begun. A sum therefore needs of the other ranks
only that they have started it, as a process group's own all-reduce does.
"""

import torch

from tutti.collectives.team import CLAIM, DONE, READY, Team

BLOCK_NBYTES = 2**18
"""Summed at a time: so small that it is still in the cache when it is written back."""

_ALIGNED = 32
"""Parts begin at multiples of so many values, so that no two ranks write to one cache line."""


class HostSum:
    """One sum under way. `room`: the number of this rank's room, whose first `numel` values of `dtype` are summed."""

    def __init__(self, team: Team, room: int, numel: int, dtype: torch.dtype) -> None:
        self._team, self._numel, self._dtype = team, numel, dtype
        self._absent, self._missing = team.size - 1, team.size
        self._untried = [(team.rank + step) % team.size for step in range(team.size)]
        self._over = False
        self._slot = team.start(room, numel, self.wait, claim=True)

    def is_completed(self) -> bool:
        """Whether the sums are there. Does this rank's part if all have started and nobody has done it."""
        team = self._team
        while self._absent and team.take(self._slot, READY, team.rank):
            self._absent -= 1
        if self._absent:
            return False
        if len(self._untried) == team.size:
            self._take_part()
        while self._missing and team.take(self._slot, DONE, team.rank):
            self._missing -= 1
        return self._ended()

    def wait(self) -> None:
        """Return when the sums are there. Raises RuntimeError when a rank has ended or does not come in time."""
        team = self._team
        while self._absent:
            team.wait(self._slot, READY)
            self._absent -= 1
        while self._untried and self._missing:
            self._take_part()
        while self._missing:
            team.wait(self._slot, DONE)
            self._missing -= 1
        self._ended()

    def _ended(self) -> bool:
        if not self._missing and not self._over:
            self._over = True
            self._team.forget(self._slot, self.wait)
        return self._over

    def _take_part(self) -> None:
        """The next part, unless another rank has it."""
        part = self._untried.pop(0)
        if not self._team.take(self._slot, CLAIM, part):
            return
        start, stop = (self._edge(part + end) for end in (0, 1))
        sum_in_place([tensor[start:stop] for tensor in self._team.tensors(self._slot, self._dtype)])
        self._missing -= 1
        self._team.tell(self._slot, DONE)

    def _edge(self, part: int) -> int:
        if part == self._team.size:
            return self._numel
        return self._numel * part // self._team.size // _ALIGNED * _ALIGNED


def sum_in_place(tensors: list[torch.Tensor]) -> None:
    """Replace all of `tensors`, flat and of one size, by their sum. Half precisions are summed in float32."""
    first, others = tensors[0], tensors[1:]
    size = max(BLOCK_NBYTES // first.element_size(), 1)
    wide = widened(first.dtype)
    for start in range(0, first.numel(), size):
        blocks = [tensor[start : start + size] for tensor in others]
        total = first[start : start + size]
        wider = total.to(wide)  # itself where that is its dtype
        for block in blocks:
            wider.add_(block)
        for block in [total, *blocks] if wider is not total else blocks:
            block.copy_(wider)


def widened(dtype: torch.dtype) -> torch.dtype:
    """The precision in which values of `dtype` are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
