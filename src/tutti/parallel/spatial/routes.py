"""The exchanges of a layer, in the order they are made: one dim after another, so that corners arrive."""

from collections.abc import Sequence

from tutti.parallel.spatial.exchange import Route
from tutti.parallel.spatial.geometry import Rows, Spread, Window, idle, owned
from tutti.parallel.spatial.tensor import Along, Where


def routes_of(
    where: Where, windows: Sequence[Window | Spread], result: Where, *, fill: float = 0.0
) -> tuple[Route, ...]:
    """One Route for each cut spatial dim (tensor dims 2 and on) of which some part needs more than it owns."""
    routes = []
    for dim, (along, window, out) in enumerate(zip(where[2:], windows, result[2:], strict=True), start=2):
        if along is not None and out is not None:
            needs = needs_of(window, out)
            if not idle(along.bounds, needs):
                routes.append(Route(dim=dim, axis=along.axis, bounds=along.bounds, needs=needs, fill=fill))
    return tuple(routes)


def needs_of(window: Window | Spread, out: Along) -> tuple[Rows, ...]:
    """What every part needs for the rows it owns of a layer's output."""
    return tuple(window.needs(owned(out.bounds, part)) for part in range(out.parts))
