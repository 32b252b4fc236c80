"""Who carries what between hosts that have several ranks, so that it crosses to each host once.

Every rank has one partner on each other host: what is its own goes there, and what it is to have comes from there.
Ranks of a host share partners where it has more of them than the other has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Ways:
    """The ways of the rank at place `own` of a process group. `hosts`: the places on each host; a host's ranks in the
    order of their team."""

    hosts: tuple[tuple[int, ...], ...]
    own: int

    @cached_property
    def ranks(self) -> int:
        """How many there are on all hosts."""
        return sum(map(len, self.hosts))

    @cached_property
    def host(self) -> int:
        """This rank's host."""
        return next(host for host, places in enumerate(self.hosts) if self.own in places)

    @cached_property
    def others(self) -> list[int]:
        """The other hosts, from the next one on: so not all begin with the same."""
        return [(self.host + step) % len(self.hosts) for step in range(1, len(self.hosts))]

    @cached_property
    def partners(self) -> list[int]:
        """This rank's partner on each of the `others`."""
        index = self.hosts[self.host].index(self.own)
        return [self.hosts[host][index % len(self.hosts[host])] for host in self.others]

    @cached_property
    def wards(self) -> list[int]:
        """The ranks of other hosts whose partner this one is, in the order of `others`."""
        here = self.hosts[self.host]
        mine = here.index(self.own)
        return [
            place for host in self.others for index, place in enumerate(self.hosts[host]) if index % len(here) == mine
        ]

    @cached_property
    def most_wards(self) -> int:
        """The most that a rank of this host has."""
        here = len(self.hosts[self.host])
        return sum(-(-len(self.hosts[host]) // here) for host in self.others)

    def carried(self, place: int) -> tuple[int, int]:
        """(rank of this host, row) that brings what is a rank's of another host: one of its `wards`, in their order."""
        here = self.hosts[self.host]
        row = 0
        carrier = self._index(place) % len(here)
        for host in self.others:
            if place in self.hosts[host]:
                return carrier, row + self._index(place) // len(here)
            row += len(range(carrier, len(self.hosts[host]), len(here)))
        raise ValueError(f"place {place} is on this host")

    def _index(self, place: int) -> int:
        return next(places.index(place) for places in self.hosts if place in places)


def ways_of(hosts: Sequence[Sequence[int]], own: int) -> Ways:
    """The ways of a rank, from the places on each host."""
    return Ways(tuple(map(tuple, hosts)), own)
