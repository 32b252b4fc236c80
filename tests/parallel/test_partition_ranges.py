"""Spreads: what a view makes of a cut, held against positions counted one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.parallel.tensor.partition_ranges import RankRanges, even, shared_heads, viewed


def positions(spread: RankRanges, rank: int) -> list[int]:
    return [p for a, b in spread.parts[rank] for p in range(a, b)]


@given(size=st.integers(0, 40), degree=st.integers(1, 7))
def test_even_parts_cover_everything_once(size: int, degree: int) -> None:
    spread = even(size, degree)
    assert sorted(p for rank in range(degree) for p in positions(spread, rank)) == list(range(size))
    sizes = [spread.local(rank) for rank in range(degree)]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_viewed_part_is_the_part_of_the_view(data: st.DataObject) -> None:
    """Whatever `viewed` says, reshaping the local part gives exactly that part of the reshaped whole."""
    factors = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    shape = _grouped(factors, data)
    target = _grouped(factors, data)
    dim = data.draw(st.integers(0, len(shape) - 1))
    unit = data.draw(st.sampled_from([d for d in range(1, shape[dim] + 1) if shape[dim] % d == 0]))
    repeats = data.draw(st.sampled_from([d for d in range(1, shape[dim] // unit + 1) if shape[dim] // unit % d == 0]))
    degree = data.draw(st.integers(1, 3))
    spread = even(shape[dim] // unit // repeats, degree).scaled(unit).repeated(repeats)
    found = viewed(shape, dim, spread, target)
    if found is None:
        return
    new_dim, new = found
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    for rank in range(degree):
        part = whole.take(positions(spread, rank), dim)
        local = list(target)
        local[new_dim] = new.local(rank)
        expected = whole.reshape(target).take(positions(new, rank), new_dim)
        assert (part.reshape(local) == expected).all()


def _grouped(factors: list[int], data: st.DataObject) -> tuple[int, ...]:
    """The factors, multiplied together in neighbouring groups: shapes that views turn into each other."""
    shape, current = [], 1
    for index, factor in enumerate(factors):
        current *= factor
        if index == len(factors) - 1 or data.draw(st.booleans()):
            shape.append(current)
            current = 1
    return tuple(shape)


def test_known_views() -> None:
    heads = even(4, 2)
    fused = heads.scaled(8).repeated(3)  # q, k and v, of 4 heads of 8
    assert viewed((2, 5, 96), 2, fused, (2, 5, 3, 4, 8)) == (3, heads)
    assert viewed((2, 5, 32), 2, heads.scaled(8), (2, 5, 4, 8)) == (2, heads)
    assert viewed((2, 5, 4, 8), 2, heads, (2, 5, 32)) == (2, heads.scaled(8))
    merged = viewed((2, 4, 5, 8), 1, heads, (8, 5, 8))
    assert merged == (0, heads.repeated(2))
    assert merged is not None
    assert viewed((8, 5, 8), 0, merged[1], (2, 4, 5, 8)) == (1, heads)
    assert viewed((6,), 0, even(6, 4), (2, 3)) is None
    assert viewed((2, 5, 32), 2, even(32, 3), (2, 5, 4, 8)) is None


@pytest.mark.parametrize(("heads", "key_heads", "degree"), [(12, 3, 2), (12, 6, 4), (12, 1, 3), (8, 2, 8), (12, 3, 4)])
def test_shared_heads_hold_what_the_queries_need(heads: int, key_heads: int, degree: int) -> None:
    queries = even(heads, degree)
    keys = shared_heads(queries, key_heads)
    repeated = keys.scaled(heads // key_heads)
    assert repeated.contains(queries)
    for rank in range(degree):
        held = positions(repeated, rank)
        inside = [p for a, b in repeated.inside(rank, queries) for p in range(a, b)]
        assert [held[p] for p in inside] == positions(queries, rank)
        assert {p // (heads // key_heads) for p in positions(queries, rank)} == set(positions(keys, rank))
    owned = keys.owned()
    assert sorted(p for rank in range(degree) for p in positions(owned, rank)) == list(range(key_heads))


@given(size=st.integers(1, 12), degree=st.integers(1, 4), repeats=st.integers(1, 3), data=st.data())
def test_narrowed_parts_are_parts_of_the_narrowed(size: int, degree: int, repeats: int, data: st.DataObject) -> None:
    spread = even(size, degree).repeated(repeats)
    start = data.draw(st.integers(0, size * repeats))
    stop = data.draw(st.integers(start, size * repeats))
    narrowed = spread.narrowed(start, stop)
    for rank in range(degree):
        held = positions(spread, rank)
        expected = [p - start for p in held if start <= p < stop]
        assert positions(narrowed, rank) == expected
        first = spread.before(rank, start)
        assert [p - start for p in held[first : first + narrowed.local(rank)]] == expected
