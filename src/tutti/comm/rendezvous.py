"""Rendezvous: the ranks of a process group find out which of them share a host and its memory."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import tutti.environment as environment
from tutti.comm import shared_segment
from tutti.comm.group_proof import prove_members, resolved_group
from tutti.comm.local_group import LocalGroup, control_nbytes
from tutti.comm.object_collectives import gather_values
from tutti.comm.shared_segment import SharedSegment, attach_segment
from tutti.errors import LaunchError


@dataclass(frozen=True, slots=True)
class HostHierarchy:
    """Two levels of links: inside hosts and between them.

    Attributes:
        local_group: the ranks of this host.
        parts: number of slices in which a tensor is exchanged between hosts: one per rank of the smallest host.
        inter_host_group: process group of the ranks that exchange this rank's slice; None where this rank has no slice.
        hosts: number of hosts.
    """

    local_group: LocalGroup
    parts: int
    inter_host_group: Any
    hosts: int


@dataclass(frozen=True, slots=True)
class _Participant:
    """What a rank announces about itself.

    Attributes:
        host: identity of its host.
        process: its process id.
        control: file descriptor of its control segment; -1 if it has none.
        said: value of its TUTTI_SHARED_MEMORY setting.
    """

    host: str
    process: int
    control: int
    said: str


def make_local_group(group: Any = None) -> LocalGroup | None:
    """Return the local group of a process group (None: all ranks). Collective; all ranks get the same answer.

    Returns None where its ranks are on several hosts, compute on GPUs, or may not share memory. A single rank with
    TUTTI_SHARED_MEMORY=off is enough for that.
    """
    rendezvous = rendezvous_hosts(group)
    return None if rendezvous is None or len(rendezvous[0]) > 1 else rendezvous[1]


def make_local_group_or_hierarchy(group: Any = None) -> LocalGroup | HostHierarchy | None:
    """Return the local group of a process group, or its hierarchy if it spans hosts.

    Collective, like `make_local_group`. Returns None where memory cannot be shared, or where every host has only one
    rank.
    """
    rendezvous = rendezvous_hosts(group)
    if rendezvous is None:
        return None
    hosts, local_group = rendezvous
    if len(hosts) == 1:
        return local_group
    if max(map(len, hosts)) == 1:
        return None
    parts = min(map(len, hosts))
    return HostHierarchy(
        local_group,
        parts,
        _inter_host_group(hosts, local_group.rank, group) if local_group.rank < parts else None,
        len(hosts),
    )


def rendezvous_hosts(group: Any) -> tuple[list[list[int]], LocalGroup] | None:
    """Find the hosts of a process group and join this host's local group. Collective.

    Returns:
        (ranks of the group by host, this rank's local group); None where memory cannot be shared.

    Raises:
        LaunchError: TUTTI_SHARED_MEMORY is neither "on" nor "off" on some rank.
    """
    if dist.get_backend(group) != "gloo" or dist.get_world_size(group) < 2:
        return None
    size, rank, setting = dist.get_world_size(group), dist.get_rank(group), environment.shared_memory_setting()
    control = _control_segment(size) if setting == environment.SHARED_MEMORY_ON else None
    this_rank = _Participant(
        shared_segment.host_identity(), os.getpid(), control.file if control is not None else -1, setting
    )
    everyone = gather_values(this_rank, group)
    _check_settings(everyone, group)
    if any(participant.said == environment.SHARED_MEMORY_OFF for participant in everyone):
        return None
    hosts: dict[str, list[int]] = {}
    for place, participant in enumerate(everyone):
        hosts.setdefault(participant.host, []).append(place)
    local_group = (
        None
        if control is None or "" in hosts
        else _join_local_group(everyone, hosts[this_rank.host], rank, control, group)
    )
    ready = gather_values(local_group is not None, group)
    return (list(hosts.values()), local_group) if local_group is not None and all(ready) else None


def _check_settings(everyone: list[_Participant], group: Any) -> None:
    """Raise LaunchError on all ranks if the shared-memory setting of any rank is neither on nor off."""
    for place, participant in enumerate(everyone):
        if participant.said not in (environment.SHARED_MEMORY_ON, environment.SHARED_MEMORY_OFF):
            raise LaunchError(
                f"{environment.SHARED_MEMORY_VARIABLE} = {participant.said!r} on rank "
                f"{dist.get_global_rank(resolved_group(group), place)}; "
                f"set it to {environment.SHARED_MEMORY_ON} or {environment.SHARED_MEMORY_OFF}"
            )


def _control_segment(size: int) -> SharedSegment | None:
    """Create a segment for semaphores and tables, if the system can. Each host uses the one of its first rank."""
    if not shared_segment.semaphores_available():
        return None
    try:
        return SharedSegment(control_nbytes(size))
    except OSError:
        return None


def _join_local_group(
    everyone: list[_Participant], places: list[int], rank: int, control: SharedSegment, group: Any
) -> LocalGroup | None:
    processes, first = [everyone[place].process for place in places], everyone[places[0]]
    local_rank = places.index(rank)
    try:
        memory = control.memory if local_rank == 0 else attach_segment(first.process, first.control, control.nbytes)
        return LocalGroup(memory, processes, local_rank, group_timeout_s(group), create=local_rank == 0)
    except OSError:
        return None


def _inter_host_group(hosts: list[list[int]], part: int, group: Any) -> Any:
    """Open the process group of the ranks that exchange slice `part` between hosts; only these ranks call it."""
    ranks = [dist.get_global_rank(resolved_group(group), places[part]) for places in hosts]
    return open_group(ranks, timeout=_gloo_options(group)._timeout)


def group_timeout_s(group: Any) -> float:
    """Return the timeout of a process group in seconds."""
    return float(_gloo_options(group)._timeout.total_seconds())


def launch_timeout() -> timedelta:
    """Return the timeout of every process group: `--timeout`, instead of torch's own default of 30 minutes."""
    return timedelta(seconds=environment.read_launch_options().timeout_s)


def _gloo_options(group: Any) -> Any:
    return resolved_group(group)._get_backend(torch.device("cpu")).options


@dataclass(slots=True)
class _Openings:
    """How often each set of ranks has opened a group since the default group `world` was made."""

    world: Any = None
    counts: Counter[tuple[int, ...]] = field(default_factory=Counter)


_OPENINGS = _Openings()


_CONNECTED_AT_FIRST_USE = ("nccl", "xccl")
"""Back ends that make a group's communicator at its first operation."""


def connects_at_first_use(group: Any) -> bool:
    """Whether the ranks of a group connect at its first operation, which blocks each until all have called it."""
    return dist.get_backend(group) in _CONNECTED_AT_FIRST_USE


def connect_group(group: Any) -> None:
    """Connect the ranks of a group (None: all ranks) where they would connect at its first use. Collective.

    A first use blocks the host until all members call (pytorch#136248). That may deadlock where some members do other
    things first, for example where the first use is a message between two of them.

    `init_process_group(device_id=...)` would connect groups too, but it makes each new group by splitting the group of
    all ranks, and then all ranks must take part in opening every group.
    """
    if connects_at_first_use(group):
        device = torch.accelerator.current_accelerator()
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def open_group(
    ranks: Sequence[int], timeout: timedelta | None = None, *, connect: bool = True, backend: str | None = None
) -> Any:
    """Open a process group; only its members call this, in the same order for their common groups.

    torch names such a group by its ranks and by the number of groups that the process has opened. That number differs
    between members if one of them is in another group without the others; for example, only one rank of each host may
    be in a group between hosts. The members would then wait for each other until the timeout. Here the name counts how
    often the same ranks have opened a group.

    Args:
        ranks: global ranks of the members.
        timeout: timeout of the group's collectives; None: `launch_timeout`.
        connect: whether to connect the members now, for collectives and batches of messages; see `connect_group`.
        backend: the group's backend; None: that of all ranks.
    """
    if _OPENINGS.world is not dist.group.WORLD:
        _OPENINGS.world, _OPENINGS.counts = dist.group.WORLD, Counter()
    members = tuple(ranks)
    timeout = timeout or launch_timeout()
    _OPENINGS.counts[members] += 1
    text = f"tutti {members} {_OPENINGS.counts[members]}"
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    named_by_torch = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda _: name  # type: ignore[assignment]
    try:
        group = dist.new_group(list(members), timeout=timeout, backend=backend, use_local_synchronization=True)
    finally:
        distributed_c10d._hash_ranks_to_str = named_by_torch
    if connect:
        connect_group(group)
    prove_members(group)
    return group
