"""Exchanges of any tensors over the ranks of one host: each copies its own in, all read what they need.

An exchange needs of the other ranks only that they have started it. Sums are made in the order of ranks, half
precisions in float32, so they are bit-identical on all ranks.
"""

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.combining import combine
from tutti.comm.expected import Expected
from tutti.comm.meeting import make_team
from tutti.comm.staging import Staging
from tutti.comm.team import DONE, READY, Team

Read = Callable[[list[torch.Tensor]], None]

_LINGER_S = 2.0
"""Longest wait at the end for ranks that have all they need to go on, but had no turn yet."""


class Staged:
    """One exchange: `tensor` of this rank can be read by all until they have said that they did."""

    def __init__(self, team: Team, staging: Staging, under_way: list["Staged"], tensor: torch.Tensor) -> None:
        self._team, self._staging, self._under_way, self._dtype = team, staging, under_way, tensor.dtype
        self._room = staging.put(tensor.detach().reshape(-1))
        self._slot = team.start(self._room, tensor.numel(), self.settle)
        self._absent, self._reading = (Expected(team, self._slot, kind) for kind in (READY, DONE))

    def present(self) -> bool:
        """Whether all ranks have started."""
        return self._absent.here()

    def arrive(self) -> list[torch.Tensor]:
        """Every rank's tensor, flat, once all have started. Say `leave` when they have been read."""
        self._absent.wait()
        return self._team.tensors(self._slot, self._dtype)

    def leave(self) -> None:
        """This rank has read what it needs."""
        self._team.tell(self._slot, DONE)
        self._under_way.append(self)

    def read_by_all(self) -> bool:
        """Whether all others have left; the room is free then."""
        return self._reading.here()

    def settle(self) -> None:
        """Return when all others have left."""
        self._reading.wait()

    def give_back(self) -> None:
        """Its room may be used again."""
        self._team.forget(self._slot, self.settle)
        self._staging.give(self._room)


class Desk:
    """Where a team's exchanges of any tensors are made. One thread of a rank starts them, others may do the rest."""

    def __init__(self, team: Team) -> None:
        self.team, self._staging = team, Staging(team)
        self._under_way: list[Staged] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _linger, self._under_way)

    def put(self, tensor: torch.Tensor) -> Staged:
        """Start an exchange; contiguous tensors of one size on all ranks."""
        with self._lock:
            _tidy(self._under_way)
            return Staged(self.team, self._staging, self._under_way, tensor)

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor that is exchanged here next, without a copy; after that it is the desk's again."""
        with self._lock:
            _tidy(self._under_way)
            return self._staging.lend(numel, dtype)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a flat tensor, to be exchanged here again and again without one. It must not change while others
        may read it: `settle` first.
        """
        with self._lock:
            return self._staging.keep(tensor)

    def settle(self, left: int = 0) -> None:
        """Wait until all others have read what this rank has exchanged here and done with, but for the `left` last."""
        while (oldest := self._oldest(left)) is not None:
            oldest.settle()  # not under the lock: who is to read it may wait for what another thread puts here
            with self._lock:
                oldest.give_back()

    def _oldest(self, left: int) -> Staged | None:
        """Of the exchanges that others still read the oldest, taken out, if there are more than `left`."""
        with self._lock:
            _tidy(self._under_way)
            return self._under_way.pop(0) if len(self._under_way) > left else None

    def share(self, mine: torch.Tensor, read: Read) -> "Work":
        """Let all ranks read `mine`; `read` is called with every rank's, flat, once all have started; wait for it."""
        return Work(self.put(mine), read)

    def reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Replace `tensor` by the sum (or maximum) over ranks."""
        self.start_reduce(tensor, op).wait()

    def start_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> "Work":
        """The same; wait for it."""
        return self.share(tensor, lambda tensors: combine(tensors, [tensor.view(-1)], op))

    def gather(self, segments: torch.Tensor, mine: torch.Tensor) -> "Work":
        """Every rank's `mine` into its row of `segments`, (ranks, values); wait for it."""
        return self.share(mine, partial(copy_rows, segments))

    def scatter_sum(self, buffer: torch.Tensor, out: torch.Tensor) -> "Work":
        """Row r of `buffer`, (ranks, values), summed over ranks, into `out` of rank r; wait for it."""
        return self.share(buffer, partial(_sum_parts, out, self.team.rank))


def make_desk(group: Any = None) -> Desk | None:
    """A process group's desk, where `make_team` gives it a team; its ranks call this together."""
    team = make_team(group)
    return None if team is None else Desk(team)


def _tidy(under_way: list[Staged]) -> None:
    """Take rooms back that all have read."""
    done = [one for one in under_way if one.read_by_all()]
    for one in done:
        one.give_back()
        under_way.remove(one)


def _linger(under_way: list[Staged]) -> None:
    """At the desk's end: what others have not read yet lies in this process' rooms, so give them a moment."""
    end = time.monotonic() + _LINGER_S
    while under_way and time.monotonic() < end:
        _tidy(under_way)
        time.sleep(0.001)


class Work:
    """An exchange under way, which this rank ends when it waits for it or finds that all have started. `read` takes
    what it needs of every rank's tensor, flat.
    """

    def __init__(self, exchange: Staged, read: Read) -> None:
        self._exchange: Staged | None = exchange
        self._read = read

    def is_completed(self) -> bool:
        """Whether it is done; does it, if all have started."""
        if self._exchange is not None and self._exchange.present():
            self.wait()
        return self._exchange is None

    def wait(self) -> None:
        """Return when it is done. Raises RuntimeError when a rank has ended or does not come in time."""
        if self._exchange is not None:
            self._read(self._exchange.arrive())
            self._exchange.leave()
            self._exchange = None


def copy_rows(segments: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Each of `tensors` into its row of `segments`."""
    for row, theirs in zip(segments, tensors, strict=True):
        row.copy_(theirs.view(row.shape))


def _sum_parts(out: torch.Tensor, rank: int, tensors: list[torch.Tensor]) -> None:
    start, stop = rank * out.numel(), (rank + 1) * out.numel()
    combine([theirs[start:stop] for theirs in tensors], [out.view(-1)])
