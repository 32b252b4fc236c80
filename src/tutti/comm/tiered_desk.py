"""Exchanges of any tensors over ranks of several hosts: what all need crosses to each host once, and is read there in
shared memory; what is summed is summed inside each host before it crosses.

Of parts that make up B bytes a host of g ranks so gets (hosts - 1) / hosts B, where messages from each rank to each
other bring it g times as much. A sum of which all ranks have the whole is a sum of rows, of which each has its own, and
then those parts to everyone. A thread makes what goes between hosts, in the order in which it is asked for.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.combining import combine
from tutti.comm.meeting import met
from tutti.comm.pairs import messages
from tutti.comm.staged import Desk, Read, Staged, copy_rows
from tutti.comm.ways import Ways, ways_of
from tutti.comm.worker import Errand, Worker

_PARTS, _SUMS = 0, 1
"""Tags of messages."""


class TieredDesk:
    """Where ranks of several hosts, several of them on some, make exchanges; `desk`: this host's own. `group`: their
    process group, which carries messages of nobody else under the same tags."""

    def __init__(self, desk: Desk, ways: Ways, group: Any) -> None:
        self.desk, self.ways, self.group = desk, ways, group
        self.lend, self.keep, self.settle = desk.lend, desk.keep, desk.settle
        self._worker, self._scratch = Worker(), torch.empty(0, dtype=torch.uint8)
        weakref.finalize(self, self._worker.end)

    def share(self, mine: torch.Tensor, read: Read) -> "Sharing":
        """As `Desk.share`: `read` is called with every rank's `mine`, in the order of the group."""
        return Sharing(self, self._worker, mine, read)

    def gather(self, segments: torch.Tensor, mine: torch.Tensor) -> "Sharing":
        """Every rank's `mine` into its row of `segments`, (ranks, values); wait for it."""
        return self.share(mine, partial(copy_rows, segments))

    def scatter_sum(self, buffer: torch.Tensor, out: torch.Tensor) -> Errand:
        """As `Desk.scatter_sum`: row r of `buffer`, (ranks, values), summed over ranks, into `out` of rank r. Hosts'
        sums are added in the order of hosts; in half precisions each is rounded."""
        return Errand(self._worker, lambda: self._scatter_sum(buffer, out.view(-1)))

    def reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Replace a contiguous `tensor` by the sum (or maximum) over ranks, bit-identical on all."""
        self.start_reduce(tensor, op).wait()

    def start_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> "Sharing":
        """The same; wait for it."""
        flat = tensor.detach().view(-1)
        size = -(-flat.numel() // self.ways.ranks)
        rows, mine = (self.lend(numel, flat.dtype) for numel in (self.ways.ranks * size, size))
        rows[: flat.numel()].copy_(flat)  # behind them lies anything, of which nobody reads the sum
        return Sharing(self, self._worker, mine, partial(_copy_parts, flat), lambda: self._scatter_sum(rows, mine, op))

    def bring(self, mine: torch.Tensor) -> torch.Tensor:
        """Send `mine` to each other host; (rows, values): what this rank's wards sent, in shared memory. For the
        thread."""
        ways = self.ways
        rows = self.lend(ways.most_wards * mine.numel(), mine.dtype).view(ways.most_wards, mine.numel())
        self._messages(list(zip(ways.wards, rows, strict=False)), [(to, mine) for to in ways.partners], _PARTS)
        return rows

    def _scatter_sum(self, buffer: torch.Tensor, out: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        ways, numel, count = self.ways, out.numel(), len(self.ways.wards)
        sums = self._scratch_rows(1 + count + len(ways.partners), out)
        own, sent, came = sums[0], sums[1 : 1 + count], sums[1 + count :]
        exchange = self.desk.put(buffer)
        theirs = [tensor.view(ways.ranks, numel) for tensor in exchange.arrive()]
        for place, row in zip((ways.own, *ways.wards), sums, strict=False):
            combine([one[place] for one in theirs], [row], op)
        exchange.leave()
        partners = list(zip(ways.partners, came, strict=True))
        self._messages(partners, list(zip(ways.wards, sent, strict=True)), _SUMS)
        by_host = {ways.host: own, **dict(zip(ways.others, came, strict=True))}
        combine([by_host[host] for host in sorted(by_host)], [out], op)

    def _messages(
        self,
        received: Sequence[tuple[int, torch.Tensor]],
        sent: Sequence[tuple[int, torch.Tensor]],
        tag: int,
    ) -> None:
        """Rows from and to places of the group; returns when all have come and gone. What came is waited for first: a
        rank that has ended is noticed there."""
        for work in messages(received, sent, self.group, tag=tag):
            work.wait()

    def _scratch_rows(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        """(rows, values of `like`), in the same memory each time: the thread makes one exchange after another."""
        nbytes = rows * like.numel() * like.element_size()
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes].view(like.dtype).view(rows, like.numel())


class Sharing:
    """Parts of all ranks under way: the thread brings those of other hosts, `wait` reads all where they lie. `first`:
    what the thread does before, of which `mine` comes."""

    def __init__(
        self,
        desk: TieredDesk,
        worker: Worker,
        mine: torch.Tensor,
        read: Read,
        first: Callable[[], None] | None = None,
    ) -> None:
        self._desk, self._mine, self._read, self._first = desk, mine.detach(), read, first
        self._exchanges: tuple[Staged, Staged] | None = None
        self._over = False
        self._brought = Errand(worker, self._bring)

    def is_completed(self) -> bool:
        """Whether it is done; does it, if all is there."""
        if not self._over and self._brought.is_completed():
            exchanges = self._exchanges
            if exchanges is None or all(one.present() for one in exchanges):
                self.wait()
        return self._over

    def wait(self) -> None:
        """Return when it is done. Raises RuntimeError when a rank has ended or does not come in time."""
        if self._over:
            return
        self._brought.wait()
        assert self._exchanges is not None
        self._over = True
        here, brought = (exchange.arrive() for exchange in self._exchanges)
        self._read(self._in_order(here, brought))
        for exchange in self._exchanges:
            exchange.leave()

    def _bring(self) -> None:
        if self._first is not None:
            self._first()
        desk = self._desk
        here = desk.desk.put(self._mine)
        self._exchanges = here, desk.desk.put(desk.bring(self._mine))

    def _in_order(self, here: list[torch.Tensor], brought: list[torch.Tensor]) -> list[torch.Tensor]:
        """Every rank's part, in the order of the group."""
        ways, numel = self._desk.ways, self._mine.numel()
        rows = dict(zip(ways.hosts[ways.host], here, strict=True))
        for host in ways.others:
            for place in ways.hosts[host]:
                carrier, row = ways.carried(place)
                rows[place] = brought[carrier][row * numel : (row + 1) * numel]
        return [rows[place] for place in sorted(rows)]


def _copy_parts(flat: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Parts of one size, one behind another, into `flat`, which may end before they do."""
    for start, part in zip(range(0, flat.numel(), max(len(parts[0]), 1)), parts, strict=False):
        whole = flat[start : start + len(part)]
        whole.copy_(part[: len(whole)])


def make_desk_or_tiers(group: Any = None) -> Desk | TieredDesk | None:
    """The desk of a process group; a tiered one where its ranks are on several hosts, more than one on some of them;
    None where ranks may not share memory, or no two could. All ranks of the group call it together."""
    found = met(group)
    if found is None:
        return None
    hosts, team = found
    if len(hosts) > 1 and max(map(len, hosts)) == 1:
        return None
    desk = Desk(team)
    return desk if len(hosts) == 1 else TieredDesk(desk, ways_of(hosts, dist.get_rank(group)), group)
