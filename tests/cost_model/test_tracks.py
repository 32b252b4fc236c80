"""The timeline of a step: tracks fill it without gaps, and their sums are those of the prediction."""

import re
from typing import Any

import pytest

from cost_model.examples import cluster, cpu, mlp, plan
from cost_model.examples_mesh import machines, meshed, transformer
from planner.machines import mixed
from tutti.config.cluster import ClusterSpec
from tutti.config.plan import PipelinePlan, Plan
from tutti.config.prediction import Timeline, Track
from tutti.cost_model import predict
from tutti.cost_model.rank_tracks import ranks_in_words, timeline

PLANS = {
    "one device": meshed(64, 1, {"replicate": 1}),
    "replicas": meshed(64, 2, {"replicate": 4}),
    "split and sharded": meshed(64, 2, {"split": 2, "shard": 4}),
    "1f1b": meshed(64, 8, {"replicate": 2, "stage": 4}),
    "1f1b, long": meshed(256, 128, {"stage": 4, "split": 2}),
    "gpipe": meshed(64, 8, {"stage": 4}, pipeline=PipelinePlan(schedule="gpipe")),
    "interleaved": meshed(64, 8, {"stage": 2}, pipeline=PipelinePlan(schedule="interleaved", stages_per_rank=2)),
    "zero-bubble": meshed(64, 40, {"stage": 4}, pipeline=PipelinePlan(schedule="zero-bubble")),
    "many microbatches": meshed(256, 64, {"replicate": 2}),
}


def drawn(name: str) -> tuple[Timeline, Any]:
    model, cards = transformer(), machines(1, 8)
    return timeline(model, cards, PLANS[name]), predict(model, cards, PLANS[name])


def idle(track: Track) -> float:
    return sum(track.seconds.get(doing, 0.0) for doing in ("communication", "bubble", "waiting"))


@pytest.mark.parametrize("name", PLANS)
def test_a_lane_fills_the_step_but_for_what_is_left_out(name: str) -> None:
    drawing, prediction = drawn(name)
    step = prediction.step_time_s.value
    for track in drawing.tracks:
        edges = [0.0, *(edge for bar in track.bars for edge in (bar.start_s, bar.end_s)), step]
        gaps = [(end, start) for end, start in zip(edges[::2], edges[1::2], strict=True) if abs(start - end) > 1e-9]
        whole = [(drawing.left_out.start_s, drawing.left_out.end_s)] if drawing.left_out is not None else []
        assert gaps == [pytest.approx(gap) for gap in whole]
    assert (drawing.left_out is not None) == (name in ("1f1b, long", "zero-bubble", "many microbatches"))


@pytest.mark.parametrize("name", PLANS)
def test_the_sums_of_the_slowest_lane_are_the_predictions(name: str) -> None:
    drawing, prediction = drawn(name)
    step = prediction.step_time_s.value
    for track in drawing.tracks:
        assert sum(lasts for doing, lasts in track.seconds.items() if doing != "hidden") == pytest.approx(step)
    slowest = min(drawing.tracks, key=lambda track: track.seconds.get("waiting", 0.0))
    phases = prediction.phases
    assert slowest.seconds.get("waiting", 0.0) == pytest.approx(0.0, abs=1e-6 * step)
    assert slowest.seconds["forward"] == pytest.approx(phases["forward"])
    backward = slowest.seconds["backward"] + slowest.seconds.get("weights", 0.0)
    assert backward == pytest.approx(phases["backward"])
    assert slowest.seconds["optimizer"] == pytest.approx(phases["optimizer"])
    assert idle(slowest) == pytest.approx(phases["exposed_communication"], abs=1e-6 * step)
    fullest = max(track.memory.total for track in drawing.tracks)
    assert fullest == pytest.approx(prediction.memory.total)


@pytest.mark.parametrize("name", ["one device", "replicas", "split and sharded", "1f1b", "gpipe", "interleaved"])
def test_what_bars_last_is_what_the_lane_says(name: str) -> None:
    drawing, _ = drawn(name)
    for track in drawing.tracks:
        for doing, lasts in track.seconds.items():
            bars = track.hidden if doing == "hidden" else track.bars
            assert sum(bar.lasts_s for bar in bars if bar.doing == doing) == pytest.approx(lasts)


@pytest.mark.parametrize("name", ["1f1b, long", "zero-bubble", "many microbatches"])
def test_what_is_left_out_lies_between_the_first_and_the_last_microbatches(name: str) -> None:
    drawing, _ = drawn(name)
    assert drawing.left_out is not None
    count = drawing.num_microbatches
    for track in drawing.tracks:
        waiting = sum(bar.lasts_s for bar in track.bars if bar.doing == "waiting")
        assert waiting == pytest.approx(track.seconds.get("waiting", 0.0), abs=1e-6 * drawing.step_time_s.value)
        before = {bar.what for bar in track.bars if bar.end_s <= drawing.left_out.start_s}
        after = {bar.what for bar in track.bars if bar.start_s >= drawing.left_out.end_s}
        assert f"microbatch 1 of {count}" in before - after
        assert f"microbatch {count} of {count}" in after - before


def test_bubbles_of_equal_stages_are_where_the_schedule_has_them() -> None:
    drawing, _ = drawn("gpipe")
    first, last = drawing.tracks[0], drawing.tracks[-1]
    assert [track.stage for track in drawing.tracks] == [0, 1, 2, 3]
    assert last.bars[0].doing == "bubble"  # until the first microbatch arrives
    assert first.bars[0].doing == "forward"
    assert {bar.what for bar in first.bars if bar.doing == "forward"} == {f"microbatch {i} of 8" for i in range(1, 9)}
    assert sum(track.count for track in drawing.tracks) == 4


def test_one_device_neither_waits_nor_sends() -> None:
    drawing, _ = drawn("one device")
    assert set(drawing.tracks[0].seconds) <= {"forward", "backward", "optimizer", "other"}
    assert drawing.tracks[0].ranks == "rank 0"


def test_unequal_devices_are_lanes_of_their_own() -> None:
    drawing = timeline(mlp(256, 2), mixed(), meshed(60_000, 1, {"replicate": 6}))
    assert [(track.ranks, track.count) for track in drawing.tracks] == [("ranks 0-3", 4), ("ranks 4-5", 2)]
    slow, quick = drawing.tracks
    assert quick.seconds["waiting"] > 0.0
    assert "waiting" not in slow.seconds
    assert quick.memory_limit_nbytes > slow.memory_limit_nbytes


def test_shares_give_more_to_some_ranks() -> None:
    even = plan(64, 2)
    uneven = Plan(batch=even.batch, mesh={"replicate": 2}, shares=(3.0, 1.0))
    host: ClusterSpec = cluster(cpu(cores=4), devices_per_node=1)
    drawing = timeline(mlp(256, 2), host, uneven)
    assert [track.ranks for track in drawing.tracks] == ["rank 0", "rank 1"]
    assert drawing.tracks[0].seconds["forward"] > 2 * drawing.tracks[1].seconds["forward"]


def test_of_many_lanes_some_are_shown_evenly() -> None:
    drawing = timeline(transformer(), machines(1, 8), PLANS["1f1b"], most_tracks=2)
    assert [track.stage for track in drawing.tracks] == [0, 3]
    assert drawing.tracks_left_out == 2


def test_ranks_in_words() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([0, 1, 2]) == "ranks 0-2"
    assert ranks_in_words([0, 4, 8, 12]) == "ranks 0, 4, 8, 12"
    assert ranks_in_words(list(range(0, 64, 4))) == "ranks 0, 4, 8 ... 60"


def test_what_limits_a_pipeline_is_told_as_its_tracks_tell_it() -> None:
    """Bubbles are not communication, although phases count both as exposed: a faster link would not end them."""
    plan = meshed(64, 2, {"stage": 4})
    drawing, prediction = timeline(transformer(), machines(1, 4), plan), predict(transformer(), machines(1, 4), plan)
    slowest = drawing.tracks[0].seconds
    limited_s = prediction.step_time_s.value - prediction.phases["other"]
    limits = {name.strip(): float(part) / 100 for name, part in re.findall(r"([a-z ]+) (\d+)%", prediction.notes[0])}
    assert slowest["bubble"] > 10 * slowest["communication"]
    assert limits["waiting for other stages"] == pytest.approx(slowest["bubble"] / limited_s, abs=0.02)
    assert limits["communication"] == pytest.approx(slowest["communication"] / limited_s, abs=0.02)
    assert prediction.notes[0].startswith("limited by waiting for other stages")
    uncontended = predict(transformer(), machines(1, 4), meshed(64, 2, {"replicate": 4}))
    assert "other stages" not in " ".join(uncontended.notes)
