"""Meetings: the ranks of a process group find out, over that group, which of them share a host and its memory."""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm import environment, rooms, semaphores
from tutti.comm.rooms import Room, attach
from tutti.comm.team import Team, control_nbytes
from tutti.errors import LaunchError


@dataclass(frozen=True, slots=True)
class Tiers:
    """Two tiers of links. `team`: the ranks of this host; `parts`: into so many parts a tensor is cut to go between
    hosts, as many as the smallest host has ranks; `across`: the process group of those that exchange this rank's part
    between hosts, None where this rank has no part; `hosts`: how many there are.
    """

    team: Team
    parts: int
    across: Any
    hosts: int


@dataclass(frozen=True, slots=True)
class _Comer:
    """What a rank says when it meets others. `control`: its file for a team's control; `said`: its setting."""

    host: str
    process: int
    control: int
    said: str


def make_team(group: Any = None) -> Team | None:
    """The team of a process group (None: all ranks); None where its ranks are not all on one host, may not share
    memory (one whose environment says TUTTI_SHARED_MEMORY=off is enough), or compute on GPUs. All ranks of the group
    call it together, and all get the same answer.
    """
    found = met(group)
    return None if found is None or len(found[0]) > 1 else found[1]


def make_team_or_tiers(group: Any = None) -> Team | Tiers | None:
    """The team of a process group; or its tiers, where its ranks are on several hosts, more than one on some of them;
    None where `make_team` gives none and there are no tiers. All ranks of the group call it together, as `make_team`.
    """
    found = met(group)
    if found is None:
        return None
    hosts, team = found
    if len(hosts) == 1:
        return team
    if max(map(len, hosts)) == 1:
        return None
    parts = min(map(len, hosts))
    return Tiers(team, parts, _group_across(hosts, team.rank, group) if team.rank < parts else None, len(hosts))


def met(group: Any) -> tuple[list[list[int]], Team] | None:
    """Places in the group by host, hosts in order of their first, and this rank's team; None where one has none. All
    ranks of the group call it together."""
    if dist.get_backend(group) != "gloo" or dist.get_world_size(group) < 2:
        return None
    size, rank, said = dist.get_world_size(group), dist.get_rank(group), environment.setting()
    control = _control(size) if said == environment.ON else None
    mine = _Comer(rooms.host_identity(), os.getpid(), control.file if control is not None else -1, said)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine, group=group)
    _check(everyone, group)
    if any(one.said == environment.OFF for one in everyone):
        return None
    hosts: dict[str, list[int]] = {}
    for place, one in enumerate(everyone):
        hosts.setdefault(one.host, []).append(place)
    team = None if control is None or "" in hosts else _join(everyone, hosts[mine.host], rank, control, group)
    ready: list[Any] = [None] * size
    dist.all_gather_object(ready, team is not None, group=group)
    return (list(hosts.values()), team) if team is not None and all(ready) else None


def _check(everyone: list[_Comer], group: Any) -> None:
    """Raise LaunchError, on all ranks alike, where one's environment says neither on nor off."""
    for place, one in enumerate(everyone):
        if one.said not in (environment.ON, environment.OFF):
            raise LaunchError(
                f"{environment.SETTING} = {one.said!r} on rank {dist.get_global_rank(_known(group), place)}; "
                f"set it to {environment.ON} or {environment.OFF}"
            )


def _control(size: int) -> Room | None:
    """Room for a team's semaphores and tables; of the ranks of a host the first one's is used."""
    if not semaphores.available():
        return None
    try:
        return Room(control_nbytes(size))
    except OSError:
        return None


def _join(everyone: list[_Comer], places: list[int], rank: int, control: Room, group: Any) -> Team | None:
    processes, first = [everyone[place].process for place in places], everyone[places[0]]
    own = places.index(rank)
    try:
        memory = control.memory if own == 0 else attach(first.process, first.control, control.nbytes)
        return Team(memory, processes, own, timeout_s(group), create=own == 0)
    except OSError:
        return None


def _group_across(hosts: list[list[int]], part: int, group: Any) -> Any:
    """The process group of the ranks that exchange `part` between hosts; only they call it."""
    ranks = [dist.get_global_rank(_known(group), places[part]) for places in hosts]
    return dist.new_group(ranks, timeout=_options(group)._timeout, use_local_synchronization=True)


def timeout_s(group: Any) -> float:
    """A process group's own time-out."""
    return float(_options(group)._timeout.total_seconds())


def _options(group: Any) -> Any:
    return _known(group)._get_backend(torch.device("cpu")).options


def _known(group: Any) -> Any:
    return dist.distributed_c10d._get_default_group() if group is None else group
