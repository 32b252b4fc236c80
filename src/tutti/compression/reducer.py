"""Reducers of compressed gradients: rounds of collectives, issued in the same order on all ranks.

A reducer is a generator that yields, between two rounds, the works it waits for. `RoundScheduler` runs several reducers
at once. When it issues a collective depends only on the calls made to it, which are the same on all ranks.

A reducer's state can be split by the tensors of the gradient (`states_by_tensor`), so that it outlives the reducer: a
tensor may move to another bucket, and the next run may have another number of ranks. The residuals of workers and of
servers (owners of chunks) are all terms of one sum over ranks. So a server's residual is saved as part of its own
rank's residual; nothing is lost and nothing is sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.comm.point_to_point import all_gather, all_to_all, ring_all_reduce_nbytes, start_messages
from tutti.compression.codec_state import CodecState
from tutti.errors import CheckpointError

Rounds = Generator[list[Any], None, None]
"""A generator that yields the works to wait for before the next round."""


Span = tuple[int, int]
"""(start, stop) of a range in a flat gradient."""

SharedSpan = tuple[int, int, int]
"""(start of a tensor in the flat gradient, start and stop of the tensor's part in a shared tensor)."""


class CountedCollectives:
    """Collectives over one process group that count the bytes this rank sends.

    Args:
        group: process group, None for all ranks.
        lone: treat this rank as a group of its own, whatever ranks there are.

    Attributes:
        size: number of ranks in the group.
        rank: this rank's number in the group.
        sent_nbytes: bytes sent so far.
    """

    def __init__(self, group: Any = None, *, lone: bool = False) -> None:
        self.group = group
        joined = dist.is_initialized() and not lone
        self.size = dist.get_world_size(group) if joined else 1
        self.rank = dist.get_rank(group) if joined else 0
        self.sent_nbytes = 0

    def all_to_all(self, received: Tensor, sent: Tensor, counts: tuple[list[int], list[int]] | None = None) -> Any:
        """Send rows of `sent` to their ranks and receive rows into `received`.

        Args:
            received: (rows, ...) buffer, ordered by the sending rank.
            sent: (rows, ...) rows, ordered by the receiving rank.
            counts: rows received from each rank, and rows sent to each rank. None: the same number for every rank.

        Returns:
            The work to wait for; None with one rank.
        """
        if self.size == 1:
            received.copy_(sent)
            return None
        rows = sent.shape[0] - (counts[1][self.rank] if counts else sent.shape[0] // self.size)
        self.sent_nbytes += rows * (sent.element_size() * sent[:1].numel())
        return all_to_all(received, sent, self.group, counts)

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        """Gather every rank's flat tensor into one, in the order of ranks.

        Args:
            received: (ranks * size,) buffer.
            sent: (size,) tensor of this rank.

        Returns:
            The work to wait for; None with one rank.
        """
        if self.size == 1:
            received.copy_(sent)
            return None
        self.sent_nbytes += (self.size - 1) * sent.numel() * sent.element_size()
        return all_gather(received, sent, self.group)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Reduce in place, counted with the bytes that a ring sends.

        Returns:
            The work to wait for; None with one rank.
        """
        if self.size == 1:
            return None
        self.sent_nbytes += ring_all_reduce_nbytes(tensor, self.size)
        return dist.all_reduce(tensor, op=op, group=self.group, async_op=True)

    def swap(self, received: Tensor | None, sent: Tensor | None, partner: int) -> list[Any]:
        """Send one tensor to a rank of the group and receive another from it; None leaves out either direction.

        The receive comes first in the returned list of works, which must be waited for in order. Gloo always reports a
        terminated peer to a receiver, but not always to a sender.
        """
        receives = [] if received is None else [(partner, received)]
        sends = [] if sent is None else [(partner, sent)]
        self.sent_nbytes += sum(entry.numel() * entry.element_size() for _, entry in sends)
        return start_messages(receives, sends, self.group)


class GradientReducer(ABC):
    """All-reduces one flat gradient over a group, step after step, with state that lasts between steps.

    `finish_step` ends a step. With True the new residuals are committed. With False the state is restored, because the
    step is skipped: some rank had values that are not finite. All ranks must pass the same value. `all_finite` of the
    sum is the same on all ranks.

    Args:
        collectives: collectives over the group.
        states: error feedback by name: "worker" for what this rank encodes, "server" for sums that it encodes as an
            owner.
        shared: tensors that are the same on all ranks, by name.

    Attributes:
        numel: number of values in the flat gradient.
    """

    numel: int

    def __init__(
        self, collectives: CountedCollectives, states: dict[str, CodecState], shared: dict[str, Tensor] | None = None
    ) -> None:
        self.collectives, self.states, self.shared = collectives, states, shared or {}

    @property
    def density(self) -> float | None:
        """Density of the next message where the reducer adapts it, the same on all ranks; otherwise None."""
        return None

    @property
    def spans(self) -> dict[str, list[Span]]:
        """By state: the ranges of the flat gradient that its tensors cover, one after another."""
        return {"worker": [(0, self.numel)]}

    @property
    def shared_spans(self) -> dict[str, list[SharedSpan]]:
        """By shared tensor: the part that belongs to each tensor of the gradient."""
        return {}

    @property
    def contributors(self) -> int:
        """Number of ranks that keep a residual of each value."""
        return self.collectives.size

    @abstractmethod
    def rounds(self, flat: Tensor) -> Rounds:
        """Replace `flat` by its sum over the group, bit for bit the same on all ranks."""

    def exact_rounds(self, flat: Tensor) -> Rounds:
        """Replace `flat` by its exact sum, without the codec."""
        yield [self.collectives.all_reduce(flat)]

    def run(self, flat: Tensor) -> None:
        """Run all rounds and wait for them."""
        for works in self.rounds(flat):
            wait_all(works)

    def finish_step(self, finite: bool) -> None:
        """Commit the step's residuals if `finite`, otherwise restore those before the step."""
        for state in self.states.values():
            if finite:
                state.commit()
            else:
                state.discard()

    def revert(self, start: int, stop: int) -> None:
        """Restore the residuals of elements start:stop, whose sum is not used, so that they do not count as sent.

        Call this before `finish_step`.
        """
        for state_name, spans in self.spans.items():
            state, offset = self.states[state_name], 0
            for begin, end in spans:
                low, high = max(begin, start), min(end, stop)
                if low < high:
                    part = slice(offset + low - begin, offset + high - begin)
                    for name, old in state.old.items():
                        state.new[name][part] = old[part]
                offset += end - begin

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by `factor`, because gradients are that many times as large from now on."""
        for state in self.states.values():
            for tensor in (*state.old.values(), *state.new.values()):
                tensor.mul_(factor)

    def reset(self) -> None:
        """Set residuals to zero, because the unit of what is sent changes."""
        for state in self.states.values():
            for tensor in (*state.old.values(), *state.new.values()):
                tensor.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint of this rank needs, by name. They are not copied."""
        result = {
            f"{state_name}.{name}": t
            for state_name, state in self.states.items()
            for name, t in state.tensors().items()
        }
        return result | {f"shared.{name}": tensor for name, tensor in self.shared.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load `tensors` of a reducer with the same settings, on the same rank of equally many.

        Raises:
            CheckpointError: if a tensor is missing or has another size.
        """
        for state_name, state in self.states.items():
            prefix = f"{state_name}."
            state.load({name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)})
        for name, tensor in self.shared.items():
            if f"shared.{name}" not in tensors:
                raise CheckpointError(
                    f"the checkpoint has no {name} of the compressor; resume with the compression method that wrote it"
                )
            tensor.copy_(tensors[f"shared.{name}"])


class RoundScheduler:
    """Runs several reducers at once.

    Each `start` first advances by one round the reducers that were started at least `ahead` starts earlier.

    Args:
        ahead: number of further starts after which a reducer is first advanced.
    """

    def __init__(self, ahead: int = 2) -> None:
        self.ahead = ahead
        self._running: list[tuple[int, Rounds, list[Any]]] = []
        self._started = 0

    def start(self, rounds: Rounds) -> None:
        """Start another reducer and issue its first collectives."""
        self._started += 1
        self._advance(self._started - self.ahead)
        self._running.append((self._started, rounds, []))
        self._advance(self._started, since=self._started)

    def finish(self) -> None:
        """Run all remaining rounds of all reducers, in turns."""
        while self._running:
            self._advance(self._started)

    def _advance(self, last: int, since: int = 0) -> None:
        """Advance by one round the reducers that were started as number `since` to `last`."""
        still = []
        for number, rounds, works in self._running:
            if since <= number <= last:
                wait_all(works)
                following = next(rounds, None)
                if following is None:
                    continue
                works = following
            still.append((number, rounds, works))
        self._running = still


def wait_all(works: list[Any]) -> None:
    """Wait for all works; None entries are already complete."""
    for work in works:
        if work is not None:
            work.wait()


def all_finite(flat: Tensor) -> bool:
    """Return whether all values are finite."""
    if not flat.numel():
        return True
    low, high = torch.aminmax(flat)  # both are NaN if any value is
    return bool(low.isfinite() & high.isfinite())


TensorStates = dict[str, Tensor]
"""State of one tensor of the gradient, flat, by name: values of its size (residual, momentum), and its part of the
tensors that are the same on all ranks (shared.q).
"""


def states_by_tensor(reducer: GradientReducer, sizes: Sequence[int]) -> list[TensorStates]:
    """Copy the reducer's state, with one entry for each tensor in the flat gradient.

    Args:
        reducer: the reducer.
        sizes: number of values of each tensor.
    """
    return split_by_tensor(reducer.tensors(), reducer.spans, reducer.shared_spans, sizes)


def load_states_by_tensor(
    reducer: GradientReducer, sizes: Sequence[int], saved: Iterable[Mapping[str, Tensor]], count: int = 0
) -> None:
    """Load saved states, one per tensor, into a new reducer. Entries that the reducer has no use for are ignored.

    Args:
        reducer: the new reducer.
        sizes: number of values of each tensor in its flat gradient.
        saved: the states of these tensors.
        count: number of committed steps, so that no random number is drawn twice.
    """
    rows = [row for row in zip(_starts(sizes), sizes, saved, strict=True) if row[1]]
    for state in reducer.states.values():
        state.count = count
    worker = reducer.states["worker"]
    for name, old in worker.old.items():
        whole = old.new_zeros(reducer.numel)
        for start, size, entry in rows:
            if name in entry:
                whole[start : start + size] = entry[name]
        parts = [whole[begin:end] for begin, end in reducer.spans["worker"]]
        if parts:
            old.copy_(torch.cat(parts))
            worker.new[name].copy_(old)
    by_start = {start: entry for start, _, entry in rows}
    for name, shared_spans in reducer.shared_spans.items():
        for start, begin, end in shared_spans:
            part = by_start[start].get(f"shared.{name}")
            if part is not None and part.numel() == end - begin:
                reducer.shared[name][begin:end] = part


def split_by_tensor(
    tensors: Mapping[str, Tensor],
    spans: Mapping[str, Sequence[Span]],
    shared_spans: Mapping[str, Sequence[SharedSpan]],
    sizes: Sequence[int],
) -> list[TensorStates]:
    """Split a reducer's tensors by the tensors of the gradient.

    Args:
        tensors: as from `GradientReducer.tensors`.
        spans: as from `GradientReducer.spans`.
        shared_spans: as from `GradientReducer.shared_spans`.
        sizes: number of values of each tensor in the flat gradient.

    Returns:
        One entry per tensor. Residuals of the same value are added up.
    """
    numel, result = sum(sizes), [TensorStates() for _ in sizes]
    for key, tensor in tensors.items():
        owner, _, name = key.partition(".")
        if owner == "shared":
            at = {start: tensor[begin:end] for start, begin, end in shared_spans[name]}
            for entry, start, size in zip(result, _starts(sizes), sizes, strict=True):
                if size and start in at:
                    entry[key] = at[start].clone()
        elif name != "count":
            whole, offset = tensor.new_zeros(numel), 0
            for begin, end in spans[owner]:
                whole[begin:end] = tensor[offset : offset + end - begin]
                offset += end - begin
            for entry, part in zip(result, torch.split(whole, list(sizes)), strict=True):
                entry[name] = entry[name] + part if name in entry else part.clone()
    return result


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts
