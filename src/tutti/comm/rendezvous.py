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
from tutti.comm.local_group import LocalGroup, control_nbytes
from tutti.comm.shared_segment import SharedSegment, attach_segment
from tutti.errors import LaunchError


@dataclass(frozen=True, slots=True)
class HostHierarchy:
    """Two levels of links: inside hosts and between them.

    Attributes:
        local_group: the ranks of this host.
        parts: slices of a tensor exchanged between hosts, one per rank of the smallest host.
        inter_host_group: process group of the ranks that exchange this rank's slice; None where it has none.
        hosts: number of hosts.
    """

    local_group: LocalGroup
    parts: int
    inter_host_group: Any
    hosts: int


@dataclass(frozen=True, slots=True)
class _Participant:
    """What a rank announces. `control`: file of its control segment; `said`: its TUTTI_SHARED_MEMORY."""

    host: str
    process: int
    control: int
    said: str


def make_local_group(group: Any = None) -> LocalGroup | None:
    """The local group of a process group (None: all ranks).

    Returns None where its ranks are on several hosts, compute on GPUs, or may not share memory: one rank with
    TUTTI_SHARED_MEMORY=off is enough. Collective; all ranks get the same answer.
    """
    found = rendezvous_hosts(group)
    return None if found is None or len(found[0]) > 1 else found[1]


def make_local_group_or_hierarchy(group: Any = None) -> LocalGroup | HostHierarchy | None:
    """The local group of a process group, or its hierarchy if it spans hosts and some have several ranks.

    Returns None where neither exists. Collective, as `make_local_group`.
    """
    found = rendezvous_hosts(group)
    if found is None:
        return None
    hosts, local_group = found
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
    """(ranks of the group by host, this rank's local group); None where memory cannot be shared. Collective."""
    if dist.get_backend(group) != "gloo" or dist.get_world_size(group) < 2:
        return None
    size, rank, said = dist.get_world_size(group), dist.get_rank(group), environment.shared_memory_setting()
    control = _control_segment(size) if said == environment.SHARED_MEMORY_ON else None
    mine = _Participant(shared_segment.host_identity(), os.getpid(), control.file if control is not None else -1, said)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine, group=group)
    _check_settings(everyone, group)
    if any(one.said == environment.SHARED_MEMORY_OFF for one in everyone):
        return None
    hosts: dict[str, list[int]] = {}
    for place, one in enumerate(everyone):
        hosts.setdefault(one.host, []).append(place)
    local_group = (
        None if control is None or "" in hosts else _join_local_group(everyone, hosts[mine.host], rank, control, group)
    )
    ready: list[Any] = [None] * size
    dist.all_gather_object(ready, local_group is not None, group=group)
    return (list(hosts.values()), local_group) if local_group is not None and all(ready) else None


def _check_settings(everyone: list[_Participant], group: Any) -> None:
    """Raise LaunchError, on all ranks alike, where one's environment says neither on nor off."""
    for place, one in enumerate(everyone):
        if one.said not in (environment.SHARED_MEMORY_ON, environment.SHARED_MEMORY_OFF):
            raise LaunchError(
                f"{environment.SHARED_MEMORY_VARIABLE} = {one.said!r} on rank "
                f"{dist.get_global_rank(_resolved_group(group), place)}; "
                f"set it to {environment.SHARED_MEMORY_ON} or {environment.SHARED_MEMORY_OFF}"
            )


def _control_segment(size: int) -> SharedSegment | None:
    """Segment for semaphores and tables; each host uses the one of its first rank."""
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
    own = places.index(rank)
    try:
        memory = control.memory if own == 0 else attach_segment(first.process, first.control, control.nbytes)
        return LocalGroup(memory, processes, own, group_timeout_s(group), create=own == 0)
    except OSError:
        return None


def _inter_host_group(hosts: list[list[int]], part: int, group: Any) -> Any:
    """Process group of the ranks that exchange slice `part` between hosts; only they call it."""
    ranks = [dist.get_global_rank(_resolved_group(group), places[part]) for places in hosts]
    return open_group(ranks, timeout=_gloo_options(group)._timeout)


def group_timeout_s(group: Any) -> float:
    """Timeout of a process group in seconds."""
    return float(_gloo_options(group)._timeout.total_seconds())


def _gloo_options(group: Any) -> Any:
    return _resolved_group(group)._get_backend(torch.device("cpu")).options


def _resolved_group(group: Any) -> Any:
    return dist.distributed_c10d._get_default_group() if group is None else group


@dataclass(slots=True)
class _Openings:
    """How often each set of ranks has opened a group, since the default group `world` was made."""

    world: Any = None
    counts: Counter[tuple[int, ...]] = field(default_factory=Counter)


_OPENINGS = _Openings()


def open_group(ranks: Sequence[int], timeout: timedelta | None = None) -> Any:
    """Open a process group; only its members call this, in the same order for their common groups.

    torch names such a group by its ranks and by the number of groups that the process has opened. That number differs
    between members where one of them is in a group without the others, such as one rank for each of unequal hosts, and
    they would wait for each other until the time-out. Here the name counts the openings by the same ranks.

    Args:
        ranks: global ranks of the members.
        timeout: of its collectives; None: torch's default.
    """
    if _OPENINGS.world is not dist.group.WORLD:
        _OPENINGS.world, _OPENINGS.counts = dist.group.WORLD, Counter()
    members = tuple(ranks)
    _OPENINGS.counts[members] += 1
    text = f"tutti {members} {_OPENINGS.counts[members]}"
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    named_by_torch = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda _: name  # type: ignore[assignment]
    try:
        return dist.new_group(list(members), timeout=timeout, use_local_synchronization=True)
    finally:
        distributed_c10d._hash_ranks_to_str = named_by_torch
