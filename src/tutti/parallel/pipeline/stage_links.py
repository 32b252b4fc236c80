"""Messages between stages: values and their gradients, sent without waiting and received in the order of sending.

Every rank knows the schedules of all ranks, so it knows the order in which each of them sends to it. It posts
receives in that order. Messages therefore need no tags, and on NCCL one group for each direction of a pair of
ranks is enough.

NCCL connects two ranks at their first message in a group, and both block until the other side has called
(pytorch#136248). The first receive that a rank posts ahead would then block it before it sends what the other side
waits for. So all pairs are connected when the pipeline is made, in one order on all ranks.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutti.comm.local_group import LocalGroup
from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.rendezvous import connects_at_first_use, open_group
from tutti.comm.shared_memory import MessageReceiver, MessageSender
from tutti.comm.traffic import CommChannel, CommHandle
from tutti.config.pipeline_schedule import Action, Orders
from tutti.parallel.data.buckets import ReductionGroup
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.pipeline.stage_placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMessage:
    """A value sent from stage `source` to `target`, or its gradient (`gradient`) sent back.

    Attributes:
        gradient: whether this is a gradient.
        key: number of the value in the program.
        microbatch: the microbatch it belongs to.
        source: the sending stage.
        target: the receiving stage.
    """

    gradient: bool
    key: int
    microbatch: int
    source: int
    target: int


Placements = Callable[[int], Placement]
"""Microbatch -> its program, divided into stages."""


def wanted(action: Action, placement: Placement) -> list[StageMessage]:
    """The messages that an action receives before it begins."""
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
    """The messages that an action sends when it has ended."""
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
    """This rank's connections along the stage axis.

    Args:
        ranks: position along the stage axis -> global rank.
        own: this rank's position.
        groups: (source, target) -> process group for messages between two positions.
        device: where received values are allocated.
        channel: counts the messages.
        local_group: the ranks of the stage axis if they share memory; messages then go through shared memory.
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
        other_positions = (
            [position for position in range(len(ranks)) if position != own] if local_group is not None else []
        )
        self._to = {
            position: MessageSender(local_group, position) for position in other_positions if local_group is not None
        }
        self._from = {
            position: MessageReceiver(local_group, position) for position in other_positions if local_group is not None
        }

    def session(self, orders: Orders, placements: Placements) -> "Session":
        """The messages of one run of a schedule."""
        return Session(self, orders, placements)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Start to send; `tensor` must not change until `settle`."""
        self._sending = [(work, sent) for work, sent in self._sending if not work.is_completed()]
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

    def connect(self) -> None:
        """Send one value between each pair of positions, in one order on all ranks. Collective over the stage axis."""
        for source, target in position_pairs(len(self.ranks)):
            tensor = torch.zeros(1, device=self.device)
            if source == self.own:
                self.send(tensor, target)
                self.settle()
            elif target == self.own:
                self.receive(tensor, source).wait()

    def settle(self) -> None:
        """Wait until all messages are sent, or have been read from shared memory."""
        for sender in self._to.values():
            sender.synchronize()
        for work, _ in self._sending:
            work.wait()
        self._sending = []


class Session:
    """This rank's messages in one run of a schedule."""

    def __init__(self, links: Links, orders: Orders, placements: Placements) -> None:
        self._links, self._placements = links, placements
        self._ranks = len(orders)
        self._expected = {rank: self._incoming(order) for rank, order in enumerate(orders) if rank != links.own}
        self._posted: dict[StageMessage, tuple[CommHandle, torch.Tensor]] = {}
        self._here: dict[StageMessage, torch.Tensor] = {}

    def begin_each(self, actions: Sequence[Action]) -> Iterator[Action]:
        """Yield this rank's actions in order, each once its receives and those of the next action are posted.

        The caller takes what an action needs (`receive`) and sends what it has computed (`send`) before the next one.
        """
        for action, following in itertools.zip_longest(actions, actions[1:]):
            self._post(wanted(action, self._placements(action.microbatch)))
            if following is not None:
                self._post(wanted(following, self._placements(following.microbatch)))
            yield action

    def receive(self, action: Action) -> dict[int, torch.Tensor]:
        """Wait for the messages that an action needs.

        Returns:
            Number of the value -> the value, or the sum of its gradients from several stages.
        """
        received: dict[int, torch.Tensor] = {}
        for message in wanted(action, self._placements(action.microbatch)):
            tensor = self._take(message)
            received[message.key] = received[message.key] + tensor if message.key in received else tensor
        return received

    def send(self, action: Action, tensor_of: Callable[[StageMessage], torch.Tensor]) -> None:
        """Send what an action has computed; `tensor_of` returns the tensor of a message."""
        for message in given(action, self._placements(action.microbatch)):
            self._give(message, tensor_of(message))

    def _post(self, messages: Sequence[StageMessage]) -> None:
        """Post receives for `messages`, and for all messages that their senders send earlier."""
        for message in messages:
            source = message.source % self._ranks
            while source != self._links.own and message not in self._posted:
                expected = next(self._expected[source])
                buffer = self._buffer(expected)
                self._posted[expected] = (self._links.receive(buffer, source), buffer)

    def _take(self, message: StageMessage) -> torch.Tensor:
        """Wait for a message and return its tensor."""
        if message in self._here:
            return self._here.pop(message)
        work, buffer = self._posted.pop(message)
        work.wait()
        return buffer

    def _give(self, message: StageMessage, tensor: torch.Tensor) -> None:
        """Send a message. A message between two stages of this rank stays in its memory."""
        target = message.target % self._ranks
        if target == self._links.own:
            self._here[message] = tensor.clone()  # either stage may change its tensor in place
        else:
            self._links.send(tensor, target)

    def _incoming(self, order: list[Action]) -> Iterator[StageMessage]:
        """The messages that a rank with schedule `order` sends to this rank, in order."""
        for action in order:
            for message in given(action, self._placements(action.microbatch)):
                if message.target % self._ranks == self._links.own:
                    yield message

    def _buffer(self, message: StageMessage) -> torch.Tensor:
        outline = self._placements(message.microbatch).program.outlines[message.key]
        return torch.empty(outline.shape, dtype=outline.dtype, device=self._links.device)


class Ties:
    """Reduces gradients of parameters that several stages hold. Construction is collective.

    Args:
        shared: positions along the stage axis -> names of the parameters held there.
        layout: the mesh, and the channel that counts the all-reduces.
    """

    def __init__(self, shared: Mapping[tuple[int, ...], Sequence[str]], layout: Layout) -> None:
        mesh, channel = layout.mesh, layout.channel("gradients", "stage")
        self._shared = [
            (names, ReductionGroup(group, len(positions), channel))
            for (positions, names), group in zip(shared.items(), groups_at(mesh, shared), strict=True)
            if mesh.index("stage") in positions
        ]

    def sum(self, model: nn.Module) -> None:
        """All-reduce the gradients of shared parameters; a `grad` stays None if no rank has one."""
        for names, group in self._shared:
            parameters = [model.get_parameter(name) for name in names]
            for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
                _all_reduce_gradients([parameter for parameter in parameters if parameter.dtype == dtype], group)


def _all_reduce_gradients(parameters: list[nn.Parameter], group: ReductionGroup) -> None:
    flags = [float(parameter.grad is not None) for parameter in parameters]
    parts = [
        (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).to_dense().flatten()
        for parameter in parameters
    ]
    flat = torch.cat([*parts, torch.tensor(flags, dtype=parts[0].dtype, device=parts[0].device)])
    with group.channel.waiting(ring_all_reduce_nbytes(flat, group.size)):
        dist.all_reduce(flat, group=group.handle)
    *reduced, counts = torch.split(flat, [*(part.numel() for part in parts), len(parts)])
    for parameter, total, has_gradient in zip(parameters, reduced, counts.tolist(), strict=True):
        parameter.grad = total.view_as(parameter).clone() if has_gradient else None


def position_pairs(positions: int) -> list[tuple[int, int]]:
    """Return (source, target) of all directions between two positions of the stage axis, in the order of opening."""
    return list(itertools.permutations(range(positions), 2))


def groups_at(mesh: Mesh, sets: Iterable[tuple[int, ...]], *, connect: bool = True) -> list[Any]:
    """Open process groups among positions of the stage axis.

    All ranks of the axis must pass the same sets in the same order. A group is opened by its members only.

    Args:
        mesh: the mesh.
        sets: sets of positions along the stage axis.
        connect: as in `open_group`.

    Returns:
        For each set, the group within this rank's pipeline replica; None if this rank is not in the set.
    """
    ranks, own = mesh.ranks("stage"), mesh.index("stage")
    return [
        open_group(sorted(ranks[position] for position in positions), connect=connect) if own in positions else None
        for positions in sets
    ]


def make_links(mesh: Mesh, device: torch.device, channel: CommChannel, local_group: LocalGroup | None) -> Links:
    """Open the groups for messages along the stage axis and connect them. Collective over the axis.

    On Gloo there is one group for each direction. A receiver's "ready" then never waits behind a message that goes
    in the same direction (comm/point_to_point.py). On NCCL the messages of a group are serialised, so each
    direction of each pair has its own group.

    Args:
        mesh: the mesh.
        device: where received values are allocated.
        channel: counts the messages.
        local_group: the ranks of the stage axis if they share memory, else None.
    """
    ranks, own = mesh.ranks("stage"), mesh.index("stage")
    if not connects_at_first_use(None):
        forward_group, backward_group = mesh.new_group("stage"), mesh.new_group("stage")
        return Links(
            ranks,
            own,
            lambda source, to: forward_group if source < to else backward_group,
            device,
            channel,
            local_group,
        )
    pairs = position_pairs(len(ranks))
    # Messages of a pair have a communicator of their own, which another operation of the group would not connect.
    groups = dict(zip(pairs, groups_at(mesh, pairs, connect=False), strict=True))
    links = Links(ranks, own, lambda source, target: groups[source, target], device, channel, local_group)
    links.connect()
    return links
