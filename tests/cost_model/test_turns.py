"""Pipelines on hosts with fewer cores than ranks: a rank that waits leaves its core to others."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples import cluster, cpu
from cost_model.examples_mesh import meshed, transformer
from cost_model.test_pipeline import SCHEDULES, equal, pipe, sent, silent
from tutti.config.cluster import ClusterSpec
from tutti.cost_model import cost_constants, predict
from tutti.cost_model.pipeline_cost import Actions, Oversubscription, moments, order_of
from tutti.cost_model.rank_tracks import timeline

SLOWED = 2 * cost_constants.OVERSUBSCRIBED
"""How many times as long work takes with two ranks on each core."""


def oversubscription(hosts: list[int], cores: int = 1, ranks: int = 1, slowed: float = SLOWED) -> Oversubscription:
    count = len(hosts)
    return Oversubscription(host=tuple(hosts), cores=(cores,) * count, ranks=(ranks,) * count, slowed=(slowed,) * count)


def actions(seconds: Any, messages: Any, who: Oversubscription | None, waits: Any = 0.0) -> Actions:
    return Actions(seconds=seconds, waits=seconds * waits, messages=messages, oversubscription=who)


@settings(deadline=None, max_examples=60)
@given(kind=st.sampled_from(SCHEDULES), ranks=st.integers(2, 4), count=st.integers(1, 6), data=st.data())
def test_time_lies_between_that_of_a_core_each_and_of_cores_that_are_always_shared(
    kind: Any, ranks: int, count: int, data: Any
) -> None:
    name, chunks = kind
    stages = ranks * chunks
    factors = data.draw(st.lists(st.floats(0.2, 3.0), min_size=stages, max_size=stages))
    seconds = equal(stages, count) * np.array(factors)[None, :, None]
    messages = sent(np.full((stages - 1, count), data.draw(st.floats(0.0, 2.0))))
    order = order_of(name, ranks, chunks, count)
    uncontended = moments(order, seconds, messages)
    slow = moments(order, SLOWED * seconds, messages)
    hosts = [rank // 2 for rank in range(ranks)]
    for enough in (
        oversubscription(list(range(ranks))),
        oversubscription([0] * ranks, cores=ranks),
        oversubscription(hosts, cores=2),
    ):
        played = actions(SLOWED * seconds, messages, enough).played(order)
        np.testing.assert_allclose(played.free, uncontended[0], rtol=1e-9)
        np.testing.assert_allclose(played.ended, uncontended[1], rtol=1e-9)
        assert sum(played.busy_s) == pytest.approx(
            sum(seconds[order.kind[at], order.stage[at], order.microbatch[at]] for at in range(len(order.rank)))
        )
    twice = actions(SLOWED * seconds, messages, oversubscription(list(range(ranks)), ranks=2)).played(order)
    np.testing.assert_allclose(twice.ended, slow[1], rtol=1e-9)
    shared = actions(SLOWED * seconds, messages, oversubscription(hosts)).played(order)
    work = np.zeros(2)
    for at, rank in enumerate(order.rank):
        work[hosts[rank]] += seconds[order.kind[at], order.stage[at], order.microbatch[at]]
    assert max(*work, *uncontended[0]) * (1 - 1e-9) <= max(shared.free) <= max(slow[0]) * (1 + 1e-9)


def test_two_stages_on_one_core_overlap_as_much_as_they_compute_together() -> None:
    """With one microbatch they never overlap.

    With two, forward 0 of stage 1 runs beside forward 1 of stage 0, and the backwards likewise.
    """
    for count, expected in (
        (1, 6.0),
        (2, 6.0 + 2 * cost_constants.OVERSUBSCRIBED + 2 * 2 * cost_constants.OVERSUBSCRIBED),
    ):
        whole = actions(SLOWED * equal(2, count), silent(1, count), oversubscription([0, 0]))
        free, stretch = whole.ends(pipe("gpipe", 2, count))
        assert max(free) == pytest.approx(expected)
        share = 1.0 / SLOWED if count == 1 else (1 + 2 * cost_constants.OVERSUBSCRIBED) / 2 / SLOWED
        assert stretch == pytest.approx([share, share])


def test_what_an_action_waits_for_takes_no_core() -> None:
    """Two stages wait for half of each action. The time in which both compute is less than the time that they wait."""
    seconds = equal(2, 2)
    uncontended = max(moments(order_of("gpipe", 2, 1, 2), seconds, silent(1, 2))[0])
    slowed = seconds / 2 * SLOWED + seconds / 2
    actions = Actions(
        seconds=slowed, waits=seconds / 2, messages=silent(1, 2), oversubscription=oversubscription([0, 0])
    )
    assert max(actions.ends(pipe("gpipe", 2, 2))[0]) == pytest.approx(uncontended)


@settings(deadline=None, max_examples=40)
@given(kind=st.sampled_from(SCHEDULES), count=st.integers(1, 6), data=st.data())
def test_quicker_messages_and_cores_are_never_slower(kind: Any, count: int, data: Any) -> None:
    name, chunks = kind
    factors = data.draw(st.lists(st.floats(0.2, 3.0), min_size=4 * chunks, max_size=4 * chunks))
    seconds = SLOWED * equal(4 * chunks, count) * np.array(factors)[None, :, None]
    message, more = data.draw(st.floats(0.0, 4.0)), data.draw(st.floats(1.01, 30))

    def end(speed: float, links: float) -> float:
        messages = sent(np.full((4 * chunks - 1, count), message / links))
        whole = Actions(
            seconds=seconds / speed,
            waits=seconds * 0,
            messages=messages,
            oversubscription=oversubscription([0, 0, 1, 1]),
        )
        return max(whole.ends(pipe(name, 4, count, chunks))[0])

    assert max(end(more, 1.0), end(1.0, more)) <= end(1.0, 1.0) * (1 + 1e-9)


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_long_runs_continue_as_if_played_out(name: Any, chunks: int) -> None:
    ranks, count = 2, 41
    seconds = SLOWED * equal(ranks * chunks, count) * np.array([1.0, 0.6] * chunks)[None, :, None]
    whole = actions(seconds, silent(ranks * chunks - 1, count), oversubscription([0, 0]))
    free, stretch = whole.ends(pipe(name, ranks, count, chunks))
    played = whole.played(order_of(name, ranks, chunks, count))
    assert free == pytest.approx(played.free, rel=0.02)
    kinds = [0, 2, 3] if name == "zero-bubble" else [0, 1]
    work = [seconds[kinds][:, rank::ranks].sum() for rank in range(ranks)]
    assert stretch == pytest.approx([busy / work_s for busy, work_s in zip(played.busy_s, work, strict=True)], rel=0.02)


def test_a_prediction_of_more_ranks_than_cores_counts_turns_and_its_parts_are_the_step() -> None:
    """Four stages on two cores are faster than if all always computed, and slower than on four cores."""
    plan, model = meshed(64, 4, {"stage": 4}), transformer(layers=8)

    def on(cores: int) -> ClusterSpec:
        rates = {"bfloat16": 1e9 * cores}
        device = cpu(cores=cores, gemm=(), peak_flops_per_s=rates, memory_bandwidth_bytes_per_s=1e10 * cores)
        return cluster(replace(device, evidence="published"))

    predictions = {cores: predict(model, on(cores), plan) for cores in (2, 4)}
    assert (
        predictions[4].step_time_s.value < predictions[2].step_time_s.value < SLOWED * predictions[4].step_time_s.value
    )
    for cores in (2, 4):
        assert sum(predictions[cores].phases.values()) == pytest.approx(predictions[cores].step_time_s.value)
        drawn = timeline(model, on(cores), plan)
        ends = [track.bars[-1].end_s for track in drawn.tracks]
        assert max(ends) == pytest.approx(predictions[cores].step_time_s.value)
