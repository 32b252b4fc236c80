"""The mesh: ranks as a grid of named axes, and the process groups over sets of those axes.

A process group is opened when a mechanism first asks for it, by its members only. torch's DeviceMesh opens the groups
of every axis at once, and every rank takes part in opening those of others (docs/decisions/device-mesh.md).
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from tutti.comm.rendezvous import open_group
from tutti.comm.world import deprioritise_gloo_threads
from tutti.config.vocabulary import DATA_AXES, AxisName
from tutti.errors import PlanError


class Mesh:
    """Ranks in row-major order over `degrees`, outermost axis first. Axes of degree 1 may be left out.

    Attributes:
        degrees: ranks along every axis of degree 2 or more.
        coordinates: this rank's position along each of these axes.
        opened: sets of axes whose groups this rank has opened, in order.
    """

    def __init__(self, degrees: Mapping[AxisName, int], rank: int) -> None:
        self.degrees: dict[AxisName, int] = {axis: degree for axis, degree in degrees.items() if degree > 1}
        self.rank = rank
        self.world_size = math.prod(self.degrees.values())
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank} is outside the mesh of {self.world_size} ranks")
        self.coordinates: dict[AxisName, int] = coordinates_of(self.degrees, rank)
        self.opened: list[tuple[AxisName, ...]] = []
        self._groups: dict[tuple[AxisName, ...], Any] = {}
        self._known_degrees: dict[tuple[AxisName, ...], int] = {}

    def degree(self, *axes: AxisName) -> int:
        """Return the number of ranks in the joint group of `axes`."""
        known = self._known_degrees.get(axes)
        if known is None:
            known = self._known_degrees[axes] = math.prod(self.degrees.get(axis, 1) for axis in axes)
        return known

    def index(self, *axes: AxisName) -> int:
        """Return this rank's position in the joint group of `axes`, row-major in the mesh's order of axes."""
        position = 0
        for axis in self._in_mesh_order(axes):
            position = position * self.degrees[axis] + self.coordinates[axis]
        return position

    def ranks(self, *axes: AxisName) -> list[int]:
        """Return the global ranks of this rank's joint group of `axes`, in order of index."""
        return group_ranks(self.degrees, self._in_mesh_order(axes), self.coordinates)

    def group(self, *axes: AxisName) -> Any:
        """Return the process group of this rank over `axes`, which all users of these axes share.

        All members must ask for their common groups in the same order. Ask only where degree(*axes) > 1.

        Returns:
            torch's process group; None, which means the default group, where `axes` are all axes of the mesh.
        """
        known = self._in_mesh_order(axes)
        if known == tuple(self.degrees):
            return None
        if known not in self._groups:
            self._groups[known] = self._open(known)
        return self._groups[known]

    def new_group(self, *axes: AxisName) -> Any:
        """Open a process group over `axes` that has no other user, so that its messages never mix with others'.

        All members must ask for their common groups in the same order.
        """
        return self._open(self._in_mesh_order(axes))

    @property
    def data_index(self) -> int:
        """This rank's position among the data-parallel ranks."""
        return self.index(*DATA_AXES)

    @property
    def data_degree(self) -> int:
        """Number of data-parallel ranks."""
        return self.degree(*DATA_AXES)

    def _in_mesh_order(self, axes: tuple[AxisName, ...]) -> tuple[AxisName, ...]:
        return tuple(axis for axis in self.degrees if axis in axes)

    def _open(self, axes: tuple[AxisName, ...]) -> Any:
        group = open_group(self.ranks(*axes))
        self.opened.append(axes)
        deprioritise_gloo_threads()  # each Gloo group starts a thread
        return group


def coordinates_of(degrees: Mapping[AxisName, int], rank: int) -> dict[AxisName, int]:
    """Return the position of `rank` along every axis of a row-major grid of `degrees`."""
    coordinates: dict[AxisName, int] = {}
    for axis, degree in reversed(list(degrees.items())):
        rank, coordinates[axis] = divmod(rank, degree)
    return {axis: coordinates[axis] for axis in degrees}


def group_ranks(
    degrees: Mapping[AxisName, int], axes: tuple[AxisName, ...], coordinates: Mapping[AxisName, int]
) -> list[int]:
    """Return the ranks that have these `coordinates` along all axes but `axes`, in row-major order."""
    ranges = [range(degree) if axis in axes else [coordinates[axis]] for axis, degree in degrees.items()]
    ranks = []
    for position in itertools.product(*ranges):
        rank = 0
        for degree, coordinate in zip(degrees.values(), position, strict=True):
            rank = rank * degree + coordinate
        ranks.append(rank)
    return ranks
