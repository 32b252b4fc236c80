"""The mesh: the world's ranks as a grid of named axes, with a process group for every set of axes."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from tutti.config.vocabulary import DATA_AXES, AxisName
from tutti.errors import PlanError


class Mesh:
    """Ranks in row-major order over `degrees` (outermost axis first). All ranks must make it together.

    `coordinates`: this rank's place along every axis. Axes of degree 1 need not be named.
    """

    def __init__(self, degrees: Mapping[AxisName, int], rank: int) -> None:
        self.degrees: dict[AxisName, int] = {axis: degree for axis, degree in degrees.items() if degree > 1}
        self.rank = rank
        self.world_size = math.prod(self.degrees.values())
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank} is outside the mesh of {self.world_size} ranks")
        self.coordinates: dict[AxisName, int] = _coordinates(self.degrees, rank)
        self._groups: dict[tuple[AxisName, ...], Any] = {}
        axes = tuple(self.degrees)
        for count in range(1, len(axes)):
            for some in itertools.combinations(axes, count):
                self._groups[some] = self._open(some)

    def degree(self, *axes: AxisName) -> int:
        """Ranks of the joint group of `axes`."""
        return math.prod(self.degrees.get(axis, 1) for axis in axes)

    def index(self, *axes: AxisName) -> int:
        """This rank's position in the joint group of `axes`, row-major in the mesh's order."""
        position = 0
        for axis in self._known(axes):
            position = position * self.degrees[axis] + self.coordinates[axis]
        return position

    def ranks(self, *axes: AxisName) -> list[int]:
        """Global ranks of this rank's joint group of `axes`, in order of index."""
        return _members(self.degrees, self._known(axes), self.coordinates)

    def group(self, *axes: AxisName) -> Any:
        """The process group of `axes`: None for all ranks (torch's default group). Ask only where degree(...) > 1."""
        known = self._known(axes)
        return None if known == tuple(self.degrees) else self._groups[known]

    def new_group(self, *axes: AxisName) -> Any:
        """A group over `axes` of its own, whose exchanges never mix with others'; every rank must ask together."""
        known = self._known(axes)
        return dist.new_group() if known == tuple(self.degrees) else self._open(known)

    @property
    def data_index(self) -> int:
        """This rank's position among the data-parallel ranks."""
        return self.index(*DATA_AXES)

    @property
    def data_degree(self) -> int:
        """Number of data-parallel ranks."""
        return self.degree(*DATA_AXES)

    def _known(self, axes: tuple[AxisName, ...]) -> tuple[AxisName, ...]:
        return tuple(axis for axis in self.degrees if axis in axes)

    def _open(self, axes: tuple[AxisName, ...]) -> Any:
        """One group for each setting of the other axes; returns this rank's."""
        others = [axis for axis in self.degrees if axis not in axes]
        mine = None
        for setting in itertools.product(*(range(self.degrees[axis]) for axis in others)):
            ranks = _members(self.degrees, axes, dict(zip(others, setting, strict=True)))
            group = dist.new_group(ranks)
            if self.rank in ranks:
                mine = group
        return mine


def _coordinates(degrees: Mapping[AxisName, int], rank: int) -> dict[AxisName, int]:
    coordinates: dict[AxisName, int] = {}
    for axis, degree in reversed(list(degrees.items())):
        rank, coordinates[axis] = divmod(rank, degree)
    return {axis: coordinates[axis] for axis in degrees}


def _members(degrees: Mapping[AxisName, int], axes: tuple[AxisName, ...], fixed: Mapping[AxisName, int]) -> list[int]:
    """Ranks whose coordinates outside `axes` are `fixed`, in row-major order."""
    ranges = [range(degree) if axis in axes else [fixed[axis]] for axis, degree in degrees.items()]
    ranks = []
    for place in itertools.product(*ranges):
        rank = 0
        for degree, coordinate in zip(degrees.values(), place, strict=True):
            rank = rank * degree + coordinate
        ranks.append(rank)
    return ranks
