"""Where rows live when one sample is cut among ranks: who owns which, who needs which, who sends what. No torch.

A cut dim of extent n in p parts is owned in contiguous runs, as equal as can be: part i owns rows n*i//p up to
n*(i+1)//p. Every layer's output is owned by that same rule, so tensors of one extent always agree; what a strided
layer shifts is fetched together with its halo. Rows are global numbers; needed ranges may reach below 0 or beyond the
extent, where padding stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Rows = tuple[int, int]
"""(start, stop) along a spatial dim of the whole tensor."""


def bounds_of(extent: int, parts: int) -> tuple[int, ...]:
    """The parts + 1 boundaries of the rows that each part owns."""
    return tuple(index * extent // parts for index in range(parts + 1))


def owned(bounds: Sequence[int], index: int) -> Rows:
    """The rows that part `index` owns."""
    return bounds[index], bounds[index + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A sliding window along one dim: convolution, pooling, padding (kernel 1), slicing (kernel 1, negative padding).

    `before`, `after`: rows of padding.
    """

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0

    @property
    def span(self) -> int:
        """Rows from the first to the last that one window covers."""
        return self.dilation * (self.kernel - 1) + 1

    def extent(self, size: int, *, ceil: bool = False) -> int:
        """Output rows of `size` input rows; `ceil`: with a last window that may reach beyond the padding."""
        room = size + self.before + self.after - self.span
        rows = (-(-room // self.stride) if ceil else room // self.stride) + 1
        if ceil and (rows - 1) * self.stride >= size + self.before:
            rows -= 1  # the last window would start in the padding after the rows
        return max(rows, 0)

    def needs(self, rows: Rows) -> Rows:
        """The input rows that the output `rows` are computed from."""
        start, stop = rows
        first = start * self.stride - self.before
        return first, first + max(stop - start - 1, 0) * self.stride + self.span

    def divisor(self, row: int, size: int, *, count_padding: bool) -> int:
        """How many rows an average over output `row` divides by, of `size` input rows."""
        start = row * self.stride - self.before
        stop = min(start + self.kernel, size + self.after)
        if count_padding:
            return stop - start
        return min(stop, size) - max(start, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposedWindow:
    """The transpose of a window along one dim: transposed convolution. `padding`: output rows dropped at both ends;
    `extra`: output rows added at the end.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    extra: int = 0

    @property
    def reach(self) -> int:
        """How far beyond its first output row an input row reaches."""
        return self.dilation * (self.kernel - 1)

    def extent(self, size: int) -> int:
        """Output rows of `size` input rows."""
        return (size - 1) * self.stride - 2 * self.padding + self.reach + 1 + self.extra

    def needs(self, rows: Rows) -> Rows:
        """Input rows whose spread, without padding, covers the output `rows` and holds all that adds to them."""
        start, stop = rows[0] + self.padding, rows[1] + self.padding
        first = min(-((self.reach - start) // self.stride), start // self.stride)
        last = max((stop - 1) // self.stride, -((1 + self.reach - stop) // self.stride))
        return first, last + 1

    def offset(self, rows: Rows) -> int:
        """Where the output `rows` begin in the spread of the input rows that they need."""
        return rows[0] + self.padding - self.needs(rows)[0] * self.stride


@dataclass(frozen=True, slots=True, kw_only=True)
class HaloRows:
    """Rows that travel to or from another part of the same line."""

    part: int
    rows: Rows


def overlap(one: Rows, other: Rows) -> Rows:
    """The rows of both; empty: (x, x)."""
    start = max(one[0], other[0])
    return start, max(min(one[1], other[1]), start)


def sends(bounds: Sequence[int], needs: Sequence[Rows], index: int) -> tuple[HaloRows, ...]:
    """What part `index` sends: its rows that others need, one message a part at most."""
    mine = owned(bounds, index)
    found = [(part, overlap(mine, need)) for part, need in enumerate(needs) if part != index]
    return tuple(HaloRows(part=part, rows=rows) for part, rows in found if rows[0] < rows[1])


def receives(bounds: Sequence[int], needs: Sequence[Rows], index: int) -> tuple[HaloRows, ...]:
    """What part `index` receives: rows it needs and others own; several where a halo is wider than a neighbour."""
    found = [(part, overlap(owned(bounds, part), needs[index])) for part in range(len(needs)) if part != index]
    return tuple(HaloRows(part=part, rows=rows) for part, rows in found if rows[0] < rows[1])


def idle(bounds: Sequence[int], needs: Sequence[Rows]) -> bool:
    """Whether every part needs exactly what it owns."""
    return all(need == owned(bounds, part) for part, need in enumerate(needs))


def count(messages: Sequence[HaloRows]) -> int:
    """Rows in all messages."""
    return sum(message.rows[1] - message.rows[0] for message in messages)


def inner(window: Window, rows: Rows, have: Rows) -> Rows:
    """Of the output `rows`, those that need no more than the input rows `have`: what is computed while halos travel."""
    first = -((-have[0] - window.before) // window.stride)
    last = (have[1] + window.before - window.span) // window.stride
    return overlap(rows, (first, max(last + 1, first)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One exchange along a spatial dim of a tensor: `dim` counts spatial dims; `parts` of the grid cut it."""

    dim: int
    extent: int
    parts: int
    window: Window | TransposedWindow

    @property
    def needs(self) -> tuple[Rows, ...]:
        """What every part needs, for its rows of the output."""
        bounds = bounds_of(self.window.extent(self.extent), self.parts)
        return tuple(self.window.needs(owned(bounds, part)) for part in range(self.parts))


def halo_nbytes(
    fetches: Sequence[Fetch], place: Sequence[int], local: Sequence[int], row_nbytes: int
) -> tuple[int, int]:
    """(bytes sent in forward, bytes sent in backward) by one rank for the halos of one layer.

    `fetches`: in the order they are made; each also carries the halos that came before it, so that corners arrive.
    `place`: this rank's part along each spatial dim; `local`: rows it owns along each spatial dim; `row_nbytes`:
    bytes of one point, batch x channels x bytes of a number. Backward returns what forward received.
    """
    sizes, forward, backward = list(local), 0, 0
    for fetch in fetches:
        bounds, index = bounds_of(fetch.extent, fetch.parts), place[fetch.dim]
        plane = row_nbytes
        for dim, size in enumerate(sizes):
            plane *= 1 if dim == fetch.dim else size
        forward += count(sends(bounds, fetch.needs, index)) * plane
        backward += count(receives(bounds, fetch.needs, index)) * plane
        need = fetch.needs[index]
        sizes[fetch.dim] = need[1] - need[0]
    return forward, backward
