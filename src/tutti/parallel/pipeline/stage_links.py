"""Links: values and gradients between stages, sent without waiting and received in the order they were sent.

Every rank knows all ranks' schedules, so it knows in which order each other rank sends to it; receives are posted in
that order. So no message needs a tag, and one group for each direction of a pair of ranks is enough on NCCL.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutti.comm.local_group import LocalGroup
from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.shared_memory import MessageReceiver, MessageSender
from tutti.comm.traffic import CommChannel, CommHandle
from tutti.config.pipeline_schedule import Action, Orders
from tutti.parallel.data.buckets import ReductionGroup
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.pipeline.stage_placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMessage:
    """A value on its way from stage `source` to `target`, or (`gradient`) its gradient on the way back."""

    gradient: bool
    key: int
    microbatch: int
    source: int
    target: int


Placements = Callable[[int], Placement]
"""Microbatch -> its program on its stages."""


def wanted(action: Action, placement: Placement) -> list[StageMessage]:
    """The messages an action needs before it begins."""
    part, stage, microbatch = placement.parts[action.stage], action.stage, action.microbatch
    if action.kind == "F":
        return [
            StageMessage(gradient=False, key=key, microbatch=microbatch, source=source, target=stage)
            for source, keys in part.receives.items()
            for key in keys
        ]
    if action.kind == "W":
        return []
    return [
        StageMessage(gradient=True, key=key, microbatch=microbatch, source=target, target=stage)
        for target, keys in part.sends.items()
        for key in keys
        if placement.program.outlines[key].requires_grad
    ]


def given(action: Action, placement: Placement) -> list[StageMessage]:
    """The messages an action sends when it has ended."""
    part, stage, microbatch = placement.parts[action.stage], action.stage, action.microbatch
    if action.kind == "F":
        return [
            StageMessage(gradient=False, key=key, microbatch=microbatch, source=stage, target=target)
            for target, keys in part.sends.items()
            for key in keys
        ]
    if action.kind == "W":
        return []
    return [
        StageMessage(gradient=True, key=key, microbatch=microbatch, source=stage, target=source)
        for source, keys in part.receives.items()
        for key in keys
        if placement.program.outlines[key].requires_grad
    ]


class Links:
    """This rank's links along the stage axis. `ranks`: global ranks by position; `groups[(from, to)]`: whose group a
    message from one position to another uses; `channel`: where messages are counted; `local_group`: the positions'
    ranks, where
    they share memory: messages then go through that.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        own: int,
        groups: Callable[[int, int], Any],
        device: torch.device,
        channel: CommChannel,
        local_group: LocalGroup | None = None,
    ) -> None:
        self.ranks, self.own, self.device, self.channel = ranks, own, device, channel
        self._groups = groups
        self._sending: list[tuple[CommHandle, torch.Tensor]] = []
        others = [place for place in range(len(ranks)) if place != own] if local_group is not None else []
        self._to = {place: MessageSender(local_group, place) for place in others if local_group is not None}
        self._from = {place: MessageReceiver(local_group, place) for place in others if local_group is not None}

    def session(self, orders: Orders, placements: Placements) -> "Session":
        """The exchange of one run of a schedule."""
        return Session(self, orders, placements)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Start to send; the tensor must stay as it is until `settle`."""
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        nbytes = tensor.numel() * tensor.element_size()
        if self._to:
            with self.channel.waiting(nbytes):
                self._to[to].send(tensor)
            return
        work = dist.isend(tensor, self.ranks[to], group=self._groups(self.own, to))
        self._sending.append((self.channel.start([work], nbytes), tensor))

    def receive(self, tensor: torch.Tensor, source: int) -> CommHandle:
        """Start to receive into `tensor`."""
        if self._from:
            return self.channel.start([self._from[source].receive(tensor)])
        return self.channel.start([dist.irecv(tensor, self.ranks[source], group=self._groups(source, self.own))])

    def settle(self) -> None:
        """Wait until everything sent has left, or in shared memory has been read."""
        for path in self._to.values():
            path.synchronize()
        for work, _ in self._sending:
            work.wait()
        self._sending = []


class Session:
    """Messages of one run of a schedule, on this rank."""

    def __init__(self, links: Links, orders: Orders, placements: Placements) -> None:
        self._links, self._placements = links, placements
        self._ranks = len(orders)
        self._expected = {rank: self._incoming(order) for rank, order in enumerate(orders) if rank != links.own}
        self._posted: dict[StageMessage, tuple[CommHandle, torch.Tensor]] = {}
        self._here: dict[StageMessage, torch.Tensor] = {}

    def post(self, messages: Sequence[StageMessage]) -> None:
        """Get ready to receive `messages`, and whatever their senders send before them."""
        for message in messages:
            source = message.source % self._ranks
            while source != self._links.own and message not in self._posted:
                expected = next(self._expected[source])
                buffer = self._buffer(expected)
                self._posted[expected] = (self._links.receive(buffer, source), buffer)

    def take(self, message: StageMessage) -> torch.Tensor:
        """Wait for a message."""
        if message in self._here:
            return self._here.pop(message)
        work, buffer = self._posted.pop(message)
        work.wait()
        return buffer

    def give(self, message: StageMessage, tensor: torch.Tensor) -> None:
        """Send a message; one between two stages of this rank stays here."""
        target = message.target % self._ranks
        if target == self._links.own:
            self._here[message] = tensor.clone()  # either stage may change its own in place
        else:
            self._links.send(tensor, target)

    def _incoming(self, order: list[Action]) -> Iterator[StageMessage]:
        """What a rank with that order sends here, in order."""
        for action in order:
            for message in given(action, self._placements(action.microbatch)):
                if message.target % self._ranks == self._links.own:
                    yield message

    def _buffer(self, message: StageMessage) -> torch.Tensor:
        outline = self._placements(message.microbatch).program.outlines[message.key]
        return torch.empty(outline.shape, dtype=outline.dtype, device=self._links.device)


class Ties:
    """Sums gradients over the ranks that hold a parameter. `shared`: names by positions along the stage axis.

    Making one is collective.
    """

    def __init__(self, shared: Mapping[tuple[int, ...], Sequence[str]], layout: Layout) -> None:
        mesh, channel = layout.mesh, layout.channel("gradients", "stage")
        self._shared = [
            (names, ReductionGroup(group, len(positions), channel))
            for (positions, names), group in zip(shared.items(), groups_at(mesh, shared), strict=True)
            if mesh.index("stage") in positions
        ]

    def sum(self, model: nn.Module) -> None:
        """Make gradients of shared parameters equal on all ranks that hold them; None where none has one."""
        for names, group in self._shared:
            parameters = [model.get_parameter(name) for name in names]
            for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
                _sum([parameter for parameter in parameters if parameter.dtype == dtype], group)


def _sum(parameters: list[nn.Parameter], group: ReductionGroup) -> None:
    flags = [float(parameter.grad is not None) for parameter in parameters]
    parts = [
        (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).to_dense().flatten()
        for parameter in parameters
    ]
    flat = torch.cat([*parts, torch.tensor(flags, dtype=parts[0].dtype, device=parts[0].device)])
    with group.channel.waiting(ring_all_reduce_nbytes(flat, group.size)):
        dist.all_reduce(flat, group=group.handle)
    *sums, seen = torch.split(flat, [*(part.numel() for part in parts), len(parts)])
    for parameter, total, one in zip(parameters, sums, seen.tolist(), strict=True):
        parameter.grad = total.view_as(parameter).clone() if one else None


def groups_at(mesh: Mesh, sets: Iterable[tuple[int, ...]]) -> list[Any]:
    """For each set of positions along the stage axis: the group of this rank's stage-axis ranks there (None where this
    rank is not among them). Collective; all ranks must ask for the same sets.
    """
    wanted = list(sets)
    if not wanted:
        return []
    lines: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(lines, mesh.ranks("stage"))
    own: list[Any] = []
    for positions in wanted:
        mine = None
        for line in dict.fromkeys(tuple(ranks) for ranks in lines):
            group = dist.new_group([line[position] for position in positions])
            if mesh.rank in (line[position] for position in positions):
                mine = group
        own.append(mine)
    return own
