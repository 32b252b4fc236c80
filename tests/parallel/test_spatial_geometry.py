"""Whose rows are whose: geometry against brute force over single rows, and halo bytes against what is sent."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from harness import run_ranks
from tutti.comm.world import join_world
from tutti.parallel.mesh import Mesh
from tutti.parallel.spatial.apply_spatial_parallel import open_space
from tutti.parallel.spatial.halo_exchange import HaloRoute, SpatialGroup
from tutti.parallel.spatial.halo_geometry import (
    Fetch,
    TransposedWindow,
    Window,
    bounds_of,
    count,
    halo_nbytes,
    idle,
    inner,
    overlap,
    owned,
    receives,
    sends,
)
from tutti.parallel.spatial.spatial_convolution import divide_into_pieces
from tutti.parallel.spatial.spatial_tensor import cut_whole

small = st.integers(0, 4)
windows = st.builds(
    Window, kernel=st.integers(1, 5), stride=st.integers(1, 4), dilation=st.integers(1, 3), before=small, after=small
)


@given(extent=st.integers(1, 40), parts=st.integers(1, 6))
@settings(deadline=None)
def test_rows_are_owned_once_and_evenly(extent: int, parts: int) -> None:
    bounds = bounds_of(extent, parts)
    rows = [row for part in range(parts) for row in range(*owned(bounds, part))]
    sizes = [stop - start for start, stop in (owned(bounds, part) for part in range(parts))]
    assert rows == list(range(extent))
    assert max(sizes) - min(sizes) <= 1


@given(window=windows, size=st.integers(1, 40), data=st.data())
@settings(deadline=None)
def test_window_needs_what_its_rows_touch(window: Window, size: int, data: st.DataObject) -> None:
    extent = window.extent(size)
    if extent < 1:
        return
    start = data.draw(st.integers(0, extent - 1))
    stop = data.draw(st.integers(start + 1, extent))
    touched = [
        o * window.stride - window.before + k * window.dilation
        for o in range(start, stop)
        for k in range(window.kernel)
    ]
    assert window.needs((start, stop)) == (min(touched), max(touched) + 1)
    assert max(touched) < size + window.after


@given(
    size=st.integers(1, 30),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 5),
    padding=st.integers(0, 2),
    ceil=st.booleans(),
    counted=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_pooling_sizes_and_divisors_are_those_of_torch(
    size: int, kernel: int, stride: int, padding: int, ceil: bool, counted: bool
) -> None:
    if padding > kernel // 2 or size + 2 * padding < kernel:
        return
    window = Window(kernel=kernel, stride=stride, before=padding, after=padding)
    ones = torch.ones(1, 1, size, dtype=torch.float64)
    expected = F.avg_pool1d(ones, kernel, stride, padding, ceil_mode=ceil, count_include_pad=counted)[0, 0]
    assert window.extent(size, ceil=ceil) == len(expected)
    for row, value in enumerate(expected.tolist()):
        start = row * stride - padding
        inside = sum(0 <= start + k < size for k in range(kernel))
        divisor = window.divisor(row, size, count_padding=counted)
        assert divisor == 0 or abs(inside / divisor - value) < 1e-12


@given(
    size=st.integers(1, 20),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    padding=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_spread_covers_its_rows_and_all_that_adds_to_them(
    size: int, kernel: int, stride: int, dilation: int, padding: int, data: st.DataObject
) -> None:
    extra = data.draw(st.integers(0, max(stride, dilation) - 1))
    spread = TransposedWindow(kernel=kernel, stride=stride, dilation=dilation, padding=padding, extra=extra)
    extent = spread.extent(size)
    if extent < 1:
        return
    rows = data.draw(st.integers(0, extent - 1).flatmap(lambda a: st.tuples(st.just(a), st.integers(a + 1, extent))))
    need = spread.needs(rows)
    adding = {i for i in range(size) for k in range(kernel) if rows[0] <= i * stride - padding + k * dilation < rows[1]}
    assert adding <= set(range(*need))
    length = (need[1] - need[0] - 1) * stride + spread.reach + 1
    assert spread.offset(rows) >= 0
    assert spread.offset(rows) + rows[1] - rows[0] <= length


@given(window=windows, size=st.integers(1, 40), parts=st.integers(1, 6))
@settings(deadline=None)
def test_what_is_sent_is_what_is_received_and_suffices(window: Window, size: int, parts: int) -> None:
    bounds, extent = bounds_of(size, parts), window.extent(size)
    if extent < parts:
        return
    outputs = bounds_of(extent, parts)
    needs = [window.needs(owned(outputs, part)) for part in range(parts)]
    for part in range(parts):
        sent = {(part, message.part, message.rows) for message in sends(bounds, needs, part)}
        got = {
            (part, other, message.rows)
            for other in range(parts)
            for message in receives(bounds, needs, other)
            if message.part == part
        }
        assert sent == got
        have = set(range(*owned(bounds, part)))
        for message in receives(bounds, needs, part):
            assert not have & set(range(*message.rows))
            have |= set(range(*message.rows))
        assert {row for row in range(*needs[part]) if 0 <= row < size} <= have
    if idle(bounds, needs):
        assert not any(sends(bounds, needs, part) for part in range(parts))


@given(
    window=windows, have=st.tuples(st.integers(0, 20), st.integers(1, 20)), rows=st.tuples(small, st.integers(5, 30))
)
@settings(deadline=None)
def test_inner_rows_need_only_what_is_there(window: Window, have: tuple[int, int], rows: tuple[int, int]) -> None:
    have = (have[0], have[0] + have[1])
    core = inner(window, rows, have)
    expected = [
        row
        for row in range(*rows)
        if have[0] <= window.needs((row, row + 1))[0] and window.needs((row, row + 1))[1] <= have[1]
    ]
    assert list(range(*core)) == expected


def test_overlap_and_count() -> None:
    assert overlap((0, 5), (3, 9)) == (3, 5)
    assert overlap((0, 2), (5, 9)) == (5, 5)
    bounds = (0, 4, 8)
    assert count(sends(bounds, [(0, 5), (3, 8)], 0)) == 1
    assert count(receives(bounds, [(-1, 8), (3, 8)], 0)) == 4


LAYERS = {
    "conv": (lambda: nn.Conv3d(2, 3, 3, padding=1), lambda: Window(kernel=3, before=1, after=1)),
    "strided": (lambda: nn.Conv3d(2, 3, 5, 2, 2), lambda: Window(kernel=5, stride=2, before=2, after=2)),
    "pool": (lambda: nn.MaxPool3d(2), lambda: Window(kernel=2, stride=2)),
    "transposed": (lambda: nn.ConvTranspose3d(2, 3, 3, 2, 1), lambda: TransposedWindow(kernel=3, stride=2, padding=1)),
}


def sent_and_predicted(grid: tuple[int, ...]) -> list[tuple[str, int, int, int, int]]:
    """For each layer: bytes that this rank sent forward and backward, and what was predicted."""
    torch.set_default_dtype(torch.float64)
    world = join_world()
    space: SpatialGroup = open_space(Mesh({"space": world.world_size}, world.rank), grid)
    sizes, found = (13, 12, 10), []
    for name, (make, window) in LAYERS.items():
        x = cut_whole(torch.randn(2, 2, *sizes, requires_grad=True), 2, space)
        before = space.sent_nbytes
        y = make()(x)
        forward = space.sent_nbytes - before
        loss = y.sum() / math.prod(space.grid)
        before = space.sent_nbytes
        loss.backward()
        backward = space.sent_nbytes - before
        fetches = [
            Fetch(dim=dim, extent=sizes[dim], parts=parts, window=window())
            for dim, parts in enumerate(grid)
            if parts > 1
        ]
        own = [owned(bounds_of(size, parts), at) for size, parts, at in zip(sizes, grid, space.place, strict=True)]
        local = [stop - start for start, stop in own]
        found.append((name, forward, backward, *halo_nbytes(fetches, space.place, local, row_nbytes=2 * 2 * 8)))
    return found


def test_halo_bytes_are_predicted_exactly() -> None:
    for ranks, grid in ((3, (1, 3, 1)), (4, (2, 1, 2))):
        for found in run_ranks(sent_and_predicted, ranks, grid):
            for name, forward, backward, predicted_forward, predicted_backward in found:
                assert (forward, backward) == (predicted_forward, predicted_backward), (grid, name)
                assert name == "pool" or forward + backward > 0


@pytest.mark.parametrize(
    ("rows", "grid", "place", "apart"),
    [
        (16, (2, 1), (0, 0), True),  # 6 of 8 rows need neither halo nor padding
        (14, (2, 1), (1, 0), False),  # 5 of 7
        (32, (2, 2), (0, 1), True),  # 14 of 16 both ways
        (16, (2, 2), (0, 1), False),  # 6 of 8
        (4, (4, 1), (1, 0), False),  # none
    ],
)
def test_a_part_is_taken_apart_where_most_of_it_needs_no_halo(
    rows: int, grid: tuple[int, int], place: tuple[int, int], apart: bool
) -> None:
    window = Window(kernel=3, stride=1, dilation=1, before=1, after=1)
    space = SpatialGroup(grid=grid, place=place, group=None, sums={}, scopes={})
    bounds = [bounds_of(rows, parts) for parts in grid]
    needs = [
        tuple(window.needs(owned(one, part)) for part in range(parts)) for one, parts in zip(bounds, grid, strict=True)
    ]
    routes = [HaloRoute(dim=2 + i, axis=i, bounds=bounds[i], needs=needs[i]) for i in range(2) if grid[i] > 1]
    own = [owned(one, at) for one, at in zip(bounds, place, strict=True)]
    pieces = divide_into_pieces((window, window), own, (0, 0), 1, routes, space)
    assert (pieces.interior is not None) == apart
    counted = [box for box in (pieces.interior, *pieces.slabs) if box is not None]
    area = sum(math.prod(r[1] - r[0] for r in box if r is not None) for box in counted)
    assert area == math.prod(r[1] - r[0] for r in pieces.full if r is not None)
