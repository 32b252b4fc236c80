"""Sums over the ranks of one host, in place, where the tensors lie.

Every rank's tensor is in a room that all can reach. It is cut into a part for each rank; whoever takes a part reads it
from all ranks, in their order, and writes the sum to all of them, so the sums are bit-identical everywhere. A rank
takes its own part first; one that has to wait takes what nobody has begun. A sum therefore needs of the other ranks
only that they have started it, as a process group's own all-reduce does.
"""

import torch

from tutti.comm.combining import combine
from tutti.comm.expected import Expected
from tutti.comm.team import CLAIM, DONE, READY, Team

_ALIGNED = 32
"""Parts begin at multiples of so many values, so that no two ranks write to one cache line."""


class HostSum:
    """One sum under way. `room`: the number of this rank's room, whose first `numel` values of `dtype` are summed.
    `probed`: look, while a part is in the cache, whether it is finite; `finite`: once it is over: all parts surely are.
    """

    finite = False

    def __init__(self, team: Team, room: int, numel: int, dtype: torch.dtype, *, probed: bool = False) -> None:
        self._probed = probed
        self._team, self._numel, self._dtype = team, numel, dtype
        self._untried = [(team.rank + step) % team.size for step in range(team.size)]
        self._over = False
        self._slot = team.start(room, numel, self.wait, claim=True)
        self._ready, self._done = (Expected(team, self._slot, kind) for kind in (READY, DONE))
        self._done.missing += 1  # parts, of which this rank does one or more

    def is_completed(self) -> bool:
        """Whether the sums are there. Does this rank's part if all have started and nobody has done it."""
        if not self._ready.here():
            return False
        if len(self._untried) == self._team.size:
            self._take_part()
        self._done.here()
        return self._ended()

    def wait(self) -> None:
        """Return when the sums are there. Raises RuntimeError when a rank has ended or does not come in time."""
        self._ready.wait()
        while self._untried and self._done.missing:
            self._take_part()
        self._done.wait()
        self._ended()

    def _ended(self) -> bool:
        if not self._done.missing and not self._over:
            self._over = True
            self.finite = self._probed and self._team.all_sound(self._slot)  # before another exchange has the slot
            self._team.forget(self._slot, self.wait)
        return self._over

    def _take_part(self) -> None:
        """The next part, unless another rank has it."""
        part = self._untried.pop(0)
        if not self._team.take(self._slot, CLAIM, part):
            return
        start, stop = (self._edge(part + end) for end in (0, 1))
        parts = [tensor[start:stop] for tensor in self._team.tensors(self._slot, self._dtype)]
        probes: list[torch.Tensor] | None = [] if self._probed else None
        combine(parts, parts, probes=probes)
        self._team.judge(self._slot, part, sound=not probes or bool(torch.stack(probes).isfinite().all()))
        self._done.missing -= 1
        self._team.tell(self._slot, DONE)

    def _edge(self, part: int) -> int:
        if part == self._team.size:
            return self._numel
        return self._numel * part // self._team.size // _ALIGNED * _ALIGNED
