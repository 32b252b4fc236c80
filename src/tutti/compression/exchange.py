"""Exchanges of compressed gradients: rounds of collectives, issued in one order on all ranks.

An exchange is written as a generator: between two rounds it says what it waits for. `InOrder` runs several of them at
once; when it issues a collective depends on the calls made to it and on nothing that differs between ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.comm.point_to_point import all_gather, all_to_all, ring_all_reduce_nbytes, start_messages
from tutti.compression.state import State
from tutti.errors import CheckpointError

Rounds = Generator[list[Any], None, None]
"""Yields the works that must be over before it goes on."""


Span = tuple[int, int]
"""(start, stop) in a flat gradient."""

Place = tuple[int, int, int]
"""(start of a tensor in the flat gradient, start and stop of its part of a shared tensor)."""


class Wire:
    """Collectives over one process group (None: all ranks); counts the bytes this rank sends. `lone`: over no other."""

    def __init__(self, group: Any = None, *, lone: bool = False) -> None:
        self.group = group
        joined = dist.is_initialized() and not lone
        self.size = dist.get_world_size(group) if joined else 1
        self.rank = dist.get_rank(group) if joined else 0
        self.sent_nbytes = 0

    def all_to_all(self, received: Tensor, sent: Tensor, counts: tuple[list[int], list[int]] | None = None) -> Any:
        """Rows to their ranks; `counts`: rows (from, to) each rank, equal where it is not given."""
        if self.size == 1:
            received.copy_(sent)
            return None
        rows = sent.shape[0] - (counts[1][self.rank] if counts else sent.shape[0] // self.size)
        self.sent_nbytes += rows * (sent.element_size() * sent[:1].numel())
        return all_to_all(received, sent, self.group, counts)

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        """(ranks * size,) from (size,), flat."""
        if self.size == 1:
            received.copy_(sent)
            return None
        self.sent_nbytes += (self.size - 1) * sent.numel() * sent.element_size()
        return all_gather(received, sent, self.group)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """In place; counted as a ring sends it."""
        if self.size == 1:
            return None
        self.sent_nbytes += ring_all_reduce_nbytes(tensor, self.size)
        return dist.all_reduce(tensor, op=op, group=self.group, async_op=True)

    def swap(self, received: Tensor | None, sent: Tensor | None, partner: int) -> list[Any]:
        """Send one tensor to a rank of the group and receive another from it. What comes is to be waited for first:
        Gloo tells whoever receives that a peer has ended, and not always who sends."""
        comes = [] if received is None else [(partner, received)]
        goes = [] if sent is None else [(partner, sent)]
        self.sent_nbytes += sum(one.numel() * one.element_size() for _, one in goes)
        return start_messages(comes, goes, self.group)


class Exchange(ABC):
    """Sums one flat gradient over a group, step after step, with what it keeps between them.

    `settle` ends a step: with True what was kept back counts, with False (some rank's values were not finite, the
    step is skipped) everything is as before the step. All ranks must say the same; `all_finite` of the sum is.
    """

    numel: int

    def __init__(self, wire: Wire, states: dict[str, State], shared: dict[str, Tensor] | None = None) -> None:
        self.wire, self.states, self.shared = wire, states, shared or {}

    @property
    def density(self) -> float | None:
        """Of the next message, where the exchange chooses it by what it sees; the same on all ranks of the group."""
        return None

    @property
    def spans(self) -> dict[str, list[Span]]:
        """By state: the ranges of the flat gradient that its tensors are of, one behind the other."""
        return {"worker": [(0, self.numel)]}

    @property
    def places(self) -> dict[str, list[Place]]:
        """By shared tensor: which of its parts belongs to which tensor of the gradient."""
        return {}

    @property
    def holders(self) -> int:
        """How many ranks keep something back of each value."""
        return self.wire.size

    @abstractmethod
    def rounds(self, flat: Tensor) -> Rounds:
        """Leave the sum over the group in `flat`, bit for bit the same on all ranks."""

    def exactly(self, flat: Tensor) -> Rounds:
        """The same, of values as they are."""
        yield [self.wire.all_reduce(flat)]

    def run(self, flat: Tensor) -> None:
        """The rounds at once."""
        for works in self.rounds(flat):
            wait(works)

    def settle(self, finite: bool) -> None:
        """The step counts, or not."""
        for state in self.states.values():
            if finite:
                state.commit()
            else:
                state.discard()

    def undo(self, start: int, stop: int) -> None:
        """Before `settle`: the sum of elements start:stop is not used, so nothing of them was sent."""
        for who, spans in self.spans.items():
            state, offset = self.states[who], 0
            for begin, end in spans:
                low, high = max(begin, start), min(end, stop)
                if low < high:
                    part = slice(offset + low - begin, offset + high - begin)
                    for name, old in state.old.items():
                        state.new[name][part] = old[part]
                offset += end - begin

    def rescale(self, factor: float) -> None:
        """Values come `factor` times as large from now on, so what was kept of them becomes so, too."""
        for state in self.states.values():
            for tensor in (*state.old.values(), *state.new.values()):
                tensor.mul_(factor)

    def reset(self) -> None:
        """Forget what was kept: what is sent from now on has another unit."""
        for state in self.states.values():
            for tensor in (*state.old.values(), *state.new.values()):
                tensor.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint of this rank needs: plain tensors by name; `by_tensor` takes them apart."""
        found = {f"{who}.{name}": t for who, state in self.states.items() for name, t in state.tensors().items()}
        return found | {f"shared.{name}": tensor for name, tensor in self.shared.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from `tensors`, of an exchange of the same settings on the same rank of as many."""
        for who, state in self.states.items():
            begin = f"{who}."
            state.load({name[len(begin) :]: t for name, t in tensors.items() if name.startswith(begin)})
        for name, tensor in self.shared.items():
            if f"shared.{name}" not in tensors:
                raise CheckpointError(
                    f"the checkpoint has no {name} of the compressor; use the method it was made with"
                )
            tensor.copy_(tensors[f"shared.{name}"])


class InOrder:
    """Exchanges under way. Each `start` first moves those begun `ahead` starts before, or earlier, on by one round."""

    def __init__(self, ahead: int = 2) -> None:
        self.ahead = ahead
        self._flying: list[tuple[int, Rounds, list[Any]]] = []
        self._started = 0

    def start(self, rounds: Rounds) -> None:
        """Begin one more: its first collectives are issued now."""
        self._started += 1
        self._move(self._started - self.ahead)
        self._flying.append((self._started, rounds, []))
        self._move(self._started, since=self._started)

    def finish(self) -> None:
        """All rounds of all exchanges, in turns."""
        while self._flying:
            self._move(self._started)

    def _move(self, last: int, since: int = 0) -> None:
        """One round of those that were started as number `since` to `last`."""
        still = []
        for number, rounds, works in self._flying:
            if since <= number <= last:
                wait(works)
                following = next(rounds, None)
                if following is None:
                    continue
                works = following
            still.append((number, rounds, works))
        self._flying = still


def wait(works: list[Any]) -> None:
    """Until all are over."""
    for work in works:
        if work is not None:
            work.wait()


def all_finite(flat: Tensor) -> bool:
    """Whether all values are finite; the same on all ranks for the same values."""
    if not flat.numel():
        return True
    low, high = torch.aminmax(flat)  # NaN goes through
    return bool(low.isfinite() & high.isfinite())
