"""SpatialTensor: this rank's part of a cut tensor. It behaves as the whole one, or refuses what it cannot compute."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch

from tutti.errors import PlanError
from tutti.parallel.divided_tensor import DividedTensor, local, name_of
from tutti.parallel.spatial.halo_exchange import SpatialGroup, fetch
from tutti.parallel.spatial.halo_geometry import Rows, bounds_of, owned


@dataclass(frozen=True, slots=True)
class Along:
    """How a dim of a tensor is cut: along `axis` of the grid of ranks, at `bounds`."""

    axis: int
    bounds: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Rows of the whole tensor."""
        return self.bounds[-1]

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.bounds) - 1


Where = tuple[Along | None, ...]
"""For each dim of a tensor, how it is cut; None if it is whole on this rank."""


class SpatialTensor(DividedTensor):
    """A part of a tensor. `where_of(x)` tells which dims are cut among the ranks of `space_of(x)`.

    Handlers are found by the names of functions (`divided_tensor.name_of`).

    Raises:
        PlanError: a function has no handler.
    """

    _tutti_where: Where
    _tutti_space: SpatialGroup

    @staticmethod
    def handler_key(func: Any) -> str:
        return name_of(func)

    @classmethod
    def call_unhandled(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise PlanError(
            f"mesh.space: {name_of(func)} is not supported on a cut tensor; compute it on the whole tensor, "
            "tutti.parallel.spatial.whole(x), or remove space from the mesh"
        )

    def _whole_shape(self) -> tuple[int, ...]:
        return tuple(
            size if along is None else along.extent for size, along in zip(self.shape, self._tutti_where, strict=True)
        )

    def with_same_placement(self, part: torch.Tensor) -> Self:
        result: Self = cut(part, self._tutti_where, self._tutti_space)  # type: ignore[assignment]
        return result

    def placement_text(self) -> str:
        dims = [dim for dim, along in enumerate(self._tutti_where) if along is not None]
        return f"dims {dims} cut"


handles = SpatialTensor.handles


def where_of(value: Any) -> Where:
    """How a tensor is cut: all None for a plain tensor."""
    if isinstance(value, SpatialTensor):
        where: Where = value._tutti_where
        return where
    return (None,) * int(value.dim())


def space_of(values: Iterable[Any]) -> SpatialGroup:
    """The SpatialGroup of the first cut tensor among `values`."""
    return next(value._tutti_space for value in values if isinstance(value, SpatialTensor))


def cut(part: torch.Tensor, where: Where, space: SpatialGroup) -> torch.Tensor:
    """Wrap this rank's `part` as a SpatialTensor; a plain tensor if no dim is cut."""
    if not any(where):
        return local(part)
    result = part.as_subclass(SpatialTensor)
    result._tutti_where, result._tutti_space = where, space
    return result


def rows_of(along: Along, space: SpatialGroup) -> Rows:
    """The rows that this rank owns."""
    return owned(along.bounds, space.place[along.axis])


def narrowed(tensor: torch.Tensor, dim: int, along: Along, space: SpatialGroup) -> torch.Tensor:
    """This rank's rows of a plain tensor that is whole along `dim`."""
    start, stop = rows_of(along, space)
    return tensor.narrow(dim, start, stop - start)


def cut_whole(tensor: torch.Tensor, first: int, space: SpatialGroup) -> torch.Tensor:
    """Cut a tensor that is whole on this rank as the grid says.

    Args:
        tensor: the whole tensor.
        first: the dim that grid axis 0 cuts; later axes cut the dims after it.
        space: the parts.

    Raises:
        PlanError: a dim has fewer rows than parts.
    """
    where: list[Along | None] = [None] * tensor.dim()
    for axis, parts in enumerate(space.grid):
        extent = tensor.shape[first + axis]
        if parts > 1:
            if extent < parts:
                raise PlanError(
                    f"space_grid = {list(space.grid)} cuts dim {first + axis} of an input of shape "
                    f"{tuple(tensor.shape)} into more parts than it has rows; use a smaller grid"
                )
            where[first + axis] = Along(axis, bounds_of(extent, parts))
            tensor = narrowed(tensor, first + axis, where[first + axis], space)  # type: ignore[arg-type]
    return cut(tensor, tuple(where), space)


def whole(tensor: torch.Tensor, dims: Iterable[int] | None = None) -> torch.Tensor:
    """The whole tensor, on every rank: rows along cut dims are fetched from their owners.

    A plain tensor is returned unchanged, so a script may call this on any number of devices.

    Args:
        tensor: cut or plain.
        dims: the dims to make whole; all if None.
    """
    if not isinstance(tensor, SpatialTensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        where, space = list(tensor._tutti_where), tensor._tutti_space
        part = local(tensor)
        for dim in range(len(where)) if dims is None else dims:
            along = where[dim]
            if along is not None:
                needs = ((0, along.extent),) * along.parts
                part = fetch(part, dim, along.axis, along.bounds, needs, 0.0, space)
                where[dim] = None
        return cut(part, tuple(where), space)
