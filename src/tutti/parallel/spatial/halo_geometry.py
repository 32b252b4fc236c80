"""Geometry of a sample cut among ranks: the rows that each part owns, needs and sends. Pure Python, without torch.

A cut dim of extent n in p parts is divided into contiguous runs of nearly equal length: part i owns rows n*i//p
up to n*(i+1)//p. The output of every layer follows the same rule, so tensors of equal extent are cut at the
same rows. Rows that a strided layer shifts to another part are fetched with its halo. Rows are global numbers.
Needed ranges may extend below 0 or beyond the extent, into the padding.
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
    """A sliding window along one dim.

    It describes convolution, pooling, padding (kernel 1) and slicing (kernel 1, negative padding).

    Attributes:
        kernel: rows that the window reads.
        stride: input rows between two windows.
        dilation: input rows between two rows of a window.
        before: rows of padding before row 0.
        after: rows of padding after the last row.
    """

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0

    @property
    def span(self) -> int:
        """Input rows from the first to the last row of one window."""
        return self.dilation * (self.kernel - 1) + 1

    def extent(self, size: int, *, ceil: bool = False) -> int:
        """Output rows of `size` input rows. With `ceil`, a last window may reach beyond the padding."""
        free_rows = size + self.before + self.after - self.span
        rows = (-(-free_rows // self.stride) if ceil else free_rows // self.stride) + 1
        if ceil and (rows - 1) * self.stride >= size + self.before:
            rows -= 1  # the last window would start in the padding after the rows
        return max(rows, 0)

    def needs(self, rows: Rows) -> Rows:
        """The input rows from which the output `rows` are computed."""
        start, stop = rows
        first = start * self.stride - self.before
        return first, first + max(stop - start - 1, 0) * self.stride + self.span

    def divisor(self, row: int, size: int, *, count_padding: bool) -> int:
        """Divisor of an average over the window of output `row`.

        Args:
            row: the output row.
            size: input rows.
            count_padding: whether padding counts.
        """
        start = row * self.stride - self.before
        stop = min(start + self.kernel, size + self.after)
        if count_padding:
            return stop - start
        return min(stop, size) - max(start, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposedWindow:
    """The transpose of a window along one dim, for transposed convolution.

    Attributes:
        kernel: output rows to which an input row contributes.
        stride: output rows between the first contributions of two input rows.
        dilation: output rows between two contributions of an input row.
        padding: output rows dropped at both ends.
        extra: output rows added at the end.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    extra: int = 0

    @property
    def reach(self) -> int:
        """Output rows from the first to the last contribution of an input row, less 1."""
        return self.dilation * (self.kernel - 1)

    def extent(self, size: int) -> int:
        """Output rows of `size` input rows."""
        return (size - 1) * self.stride - 2 * self.padding + self.reach + 1 + self.extra

    def needs(self, rows: Rows) -> Rows:
        """The input rows that contribute to the output `rows`; their result without padding covers all of these."""
        start, stop = rows[0] + self.padding, rows[1] + self.padding
        first = min(-((self.reach - start) // self.stride), start // self.stride)
        last = max((stop - 1) // self.stride, -((1 + self.reach - stop) // self.stride))
        return first, last + 1

    def offset(self, rows: Rows) -> int:
        """Where the output `rows` begin in the result, without padding, of the input rows that they need."""
        return rows[0] + self.padding - self.needs(rows)[0] * self.stride


@dataclass(frozen=True, slots=True, kw_only=True)
class HaloRows:
    """Rows sent to, or received from, another part on the same line of the grid."""

    part: int
    rows: Rows


def overlap(first: Rows, second: Rows) -> Rows:
    """The rows in both ranges; (x, x) if there are none."""
    start = max(first[0], second[0])
    return start, max(min(first[1], second[1]), start)


def sends(bounds: Sequence[int], needs: Sequence[Rows], index: int) -> tuple[HaloRows, ...]:
    """The rows that part `index` sends: its own rows that other parts need, at most one message to each."""
    own_rows = owned(bounds, index)
    overlaps = [(part, overlap(own_rows, need)) for part, need in enumerate(needs) if part != index]
    return tuple(HaloRows(part=part, rows=rows) for part, rows in overlaps if rows[0] < rows[1])


def receives(bounds: Sequence[int], needs: Sequence[Rows], index: int) -> tuple[HaloRows, ...]:
    """The rows that part `index` receives: those it needs and other parts own.

    A halo wider than a neighbour's part comes from several parts.
    """
    overlaps = [(part, overlap(owned(bounds, part), needs[index])) for part in range(len(needs)) if part != index]
    return tuple(HaloRows(part=part, rows=rows) for part, rows in overlaps if rows[0] < rows[1])


def idle(bounds: Sequence[int], needs: Sequence[Rows]) -> bool:
    """Whether every part needs exactly the rows that it owns."""
    return all(need == owned(bounds, part) for part, need in enumerate(needs))


def count(messages: Sequence[HaloRows]) -> int:
    """Number of rows in all messages."""
    return sum(message.rows[1] - message.rows[0] for message in messages)


def inner(window: Window, rows: Rows, have: Rows) -> Rows:
    """The part of the output `rows` that needs only the input rows `have`: it is computed during the halo transfer."""
    first = -((-have[0] - window.before) // window.stride)
    last = (have[1] + window.before - window.span) // window.stride
    return overlap(rows, (first, max(last + 1, first)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One exchange along a spatial dim of a tensor.

    Attributes:
        dim: index of the spatial dim, from 0.
        extent: rows of the whole tensor.
        parts: parts along the dim.
        window: the layer that needs the halo.
    """

    dim: int
    extent: int
    parts: int
    window: Window | TransposedWindow

    @property
    def needs(self) -> tuple[Rows, ...]:
        """The input rows that each part needs for its output rows."""
        bounds = bounds_of(self.window.extent(self.extent), self.parts)
        return tuple(self.window.needs(owned(bounds, part)) for part in range(self.parts))


def halo_nbytes(
    fetches: Sequence[Fetch], place: Sequence[int], local: Sequence[int], row_nbytes: int
) -> tuple[int, int]:
    """Halo bytes that one rank sends for one layer. Backward returns the rows that forward received.

    Args:
        fetches: in order of execution; each one also carries the halos of those before it, so corners are included.
        place: this rank's part along each spatial dim.
        local: rows that it owns along each spatial dim.
        row_nbytes: bytes of one point: batch x channels x bytes per number.

    Returns:
        Bytes sent in forward, and bytes sent in backward.
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
