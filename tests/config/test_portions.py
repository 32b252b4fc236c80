"""How units of a layer are cut where parts are unequal."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.config.partitioning import GRAIN, MANY, cut, cut_units


@pytest.mark.parametrize(
    ("total", "weights", "sizes"),
    [
        (1024, (1.0, 0.427), [720, 304]),  # 717 and 307 are odd rows
        (2048, (1.0, 0.427), [1440, 608]),
        (256, (0.5, 0.3, 0.2), [128, 80, 48]),
        (8, (1.0, 0.427), [6, 2]),  # heads
        (250, (1.0, 0.427), [175, 75]),  # few
        (1000, (1.0, 0.427), [701, 299]),  # no multiple
        (256, (1.0, 0.01), [253, 3]),  # a multiple would leave the second none
    ],
)
def test_many_units_go_in_multiples_where_everybody_has_one(
    total: int, weights: tuple[float, ...], sizes: list[int]
) -> None:
    assert [end - start for start, end in pairwise(cut_units(total, len(weights), weights))] == sizes


@given(st.integers(1, 4096), st.lists(st.floats(0.01, 10), min_size=1, max_size=6))
def test_parts_cover_all_and_none_is_far_from_its_weight(total: int, weights: list[float]) -> None:
    bounds = cut_units(total, len(weights), weights)
    plain = cut(total, len(weights), weights)
    assert (bounds[0], bounds[-1]) == (0, total)
    assert bounds == sorted(bounds)
    assert all(abs(bound - other) <= GRAIN / 2 + 1 for bound, other in zip(bounds, plain, strict=True))
    assert all(start < end for start, end in pairwise(bounds)) or bounds == plain
    assert total >= MANY or bounds == plain
