"""Uneven stages and uneven shares: dynamic programming against every possible cut, laws of balanced loads."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples import linear
from tutti.config.model import ModelSpec
from tutti.planner.mixed_hardware import Blocks, balanced, blocks_of, cut, slowest

TIMES = st.lists(st.floats(0.1, 10), min_size=1, max_size=8)


def blocks(seconds: list[float], nbytes: list[float] | None = None) -> Blocks:
    count = len(seconds)
    return Blocks(
        names=tuple(f"layers.{index}" for index in range(count)),
        seconds=np.array(seconds),
        state=np.array(nbytes or [1.0] * count),
        kept=np.zeros(count),
    )


def best_of_all(model: Blocks, speeds: list[float], room: list[float]) -> float:
    """Find the least time of the slowest stage by trying every contiguous cut."""
    count, best = len(model.seconds), np.inf
    for starts in combinations(range(1, count), len(speeds) - 1):
        edges = [0, *starts, count]
        sizes = [model.state[a:b].sum() for a, b in pairwise(edges)]
        if all(size <= most for size, most in zip(sizes, room, strict=True)):
            best = min(best, slowest(model, np.array(speeds), starts))
    return float(best)


@settings(deadline=None, max_examples=150)
@given(seconds=TIMES, data=st.data())
def test_the_cut_is_the_best_of_all_contiguous_ones(seconds: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(seconds)))
    speeds = data.draw(st.lists(st.floats(0.2, 4), min_size=stages, max_size=stages))
    room = data.draw(st.lists(st.floats(1, 9), min_size=stages, max_size=stages))
    model = blocks(seconds)
    starts = cut(model, np.array(speeds), np.array(room), np.ones(stages))
    expected = best_of_all(model, speeds, room)
    if starts is None:
        assert expected == np.inf
    else:
        assert slowest(model, np.array(speeds), starts) == pytest.approx(expected)


def test_a_faster_stage_gets_more_blocks_and_a_small_one_no_more_than_it_holds() -> None:
    model = blocks([1.0] * 8)
    free = np.array([100.0, 100.0])
    assert cut(model, np.array([3.0, 1.0]), free, np.ones(2)) == (6,)
    assert cut(model, np.array([3.0, 1.0]), np.array([4.0, 100.0]), np.ones(2)) == (4,)
    assert cut(model, np.array([3.0, 1.0]), np.array([4.0, 3.0]), np.ones(2)) is None
    assert cut(model, np.ones(9), np.full(9, 100.0), np.ones(9)) is None


def test_activations_count_as_often_as_microbatches_are_held() -> None:
    model = Blocks(names=tuple("abcd"), seconds=np.ones(4), state=np.zeros(4), kept=np.ones(4))
    assert cut(model, np.ones(2), np.array([4.0, 4.0]), np.array([4.0, 1.0])) == (1,)


def test_blocks_are_sums_over_modules_with_what_lies_around() -> None:
    names = ("embed", "layers.0.a", "layers.0.b", "layers.1.a", "head")
    modules = tuple(linear(name, 4, 4, block=int(name[7]) if name.startswith("layers") else -1) for name in names)
    model = ModelSpec(name="m", modules=modules)
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    blocks = blocks_of(model, values, values, values)
    assert blocks.names == ("layers.0", "layers.1.a")
    assert blocks.seconds.tolist() == [6.0, 9.0]


@settings(deadline=None, max_examples=200)
@given(pairs=st.lists(st.tuples(st.floats(0.1, 5), st.floats(1, 50)), min_size=1, max_size=8), total=st.floats(1, 200))
def test_loads_sum_up_stay_in_their_rooms_and_are_proportional_where_there_is_room(
    pairs: list[tuple[float, float]], total: float
) -> None:
    rates, room = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])
    loads = balanced(rates, room, total)
    assert loads.sum() == pytest.approx(total)
    if room.sum() > total:
        assert np.all(loads <= room * (1 + 1e-9))
        free = loads < room * (1 - 1e-9)
        if free.any():
            per_speed = loads / rates
            # full ranks carry no more for their speed than the others: the excess went to the least loaded
            assert np.ptp(per_speed[free]) <= 1e-6 * per_speed[free].max()
            assert np.all(per_speed[~free] <= per_speed[free].min() * (1 + 1e-9))


def test_overflow_goes_to_the_least_loaded_that_has_room() -> None:
    loads = balanced(np.array([3.0, 1.0, 1.0]), np.array([3.0, 100.0, 100.0]), 10.0)
    assert loads.tolist() == [3.0, 3.5, 3.5]
