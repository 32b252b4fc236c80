"""The cut tensor behaves as the whole tensor, holds this rank's part, and refuses what it cannot compute exactly."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tutti.errors import PlanError
from tutti.parallel.spatial.halo_exchange import SpatialGroup, fetch
from tutti.parallel.spatial.halo_geometry import Rows, bounds_of, owned


@dataclass(frozen=True, slots=True)
class Along:
    """How a dim is cut: along `axis` of the grid, at `bounds`."""

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

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(function, args, kwargs) -> result. Runs with the subclass disabled, so that torch sees plain tensors."""

HANDLERS: dict[str, Handler] = {}
"""Name of a torch function -> its implementation for cut tensors. Properties are named "get:property"."""


class SpatialTensor(torch.Tensor):
    """A part of a tensor. `where_of(x)` tells which dims are cut among the ranks of `space_of(x)`.

    `shape`, `size` and `numel` are those of the whole tensor. Raises PlanError for a function that is not in
    HANDLERS.
    """

    _tutti_where: Where
    _tutti_space: SpatialGroup

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = name_of(func)
        handler = HANDLERS.get(name)
        if handler is None:
            raise PlanError(
                f"mesh.space: {name} is not supported on a cut tensor; compute it on the whole tensor, "
                "tutti.parallel.spatial.whole(x), or remove space from the mesh"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return handler(func, args, kwargs or {})


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for these functions."""

    def register(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register


def name_of(function: Callable[..., Any]) -> str:
    """The key of a function in HANDLERS."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name.strip('_')}:{getattr(getattr(function, '__self__', None), '__name__', '')}"
    return name


def where_of(value: Any) -> Where:
    """How a tensor is cut: all None for a plain tensor."""
    if isinstance(value, SpatialTensor):
        where: Where = value._tutti_where
        return where
    return (None,) * int(value.dim())


def space_of(values: Iterable[Any]) -> SpatialGroup:
    """The SpatialGroup of the first cut tensor among `values`."""
    return next(value._tutti_space for value in values if isinstance(value, SpatialTensor))


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part, as a plain tensor."""
    return value.as_subclass(torch.Tensor) if isinstance(value, SpatialTensor) else value


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
