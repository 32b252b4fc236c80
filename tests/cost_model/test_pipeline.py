"""The timeline of a pipeline: bubbles as in the literature, the runtime's own simulation, and long runs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples_mesh import machines, meshed, transformer
from tutti.config.model import ModelSpec, ModuleSpec
from tutti.config.pipeline_schedule import COSTS, Action, build_schedule, needed_before, total_time
from tutti.config.plan import PipelinePlan, Plan
from tutti.cost_model import predict
from tutti.cost_model.pipeline_cost import Messages, ends, moments, most_held, order_of, play, shortened
from tutti.cost_model.stage_cuts import stages_of
from tutti.errors import PlanError

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1)]


def pipe(name: Any, ranks: int, microbatches: int, chunks: int = 1) -> Plan:
    return meshed(256, microbatches, {"stage": ranks}, pipeline=PipelinePlan(schedule=name, stages_per_rank=chunks))


def sent(seconds: Any, latency_s: float = 0.0) -> Messages:
    return Messages(arrive_s=seconds, occupy_s=seconds - latency_s)


def silent(boundaries: int, microbatches: int) -> Messages:
    return sent(np.zeros((boundaries, microbatches)))


def equal(stages: int, microbatches: int, backward: float = 2.0) -> Any:
    """Return the seconds of equal stages: a forward of 1, a backward of 2 in two halves of 1."""
    kinds = np.array([1.0, backward, backward / 2, backward / 2])
    return np.broadcast_to(kinds[:, None, None], (4, stages, microbatches)).copy()


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8), (8, 16), (4, 64), (3, 100)])
def test_bubbles_of_gpipe_and_1f1b_are_those_of_the_papers(ranks: int, microbatches: int) -> None:
    for name in ("gpipe", "1f1b"):
        end = max(ends(pipe(name, ranks, microbatches), equal(ranks, microbatches), silent(ranks - 1, microbatches)))
        assert end / (3 * microbatches) - 1 == pytest.approx((ranks - 1) / microbatches)


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 4, 16), (4, 2, 64)])
def test_interleaving_divides_the_bubble_by_the_chunks(ranks: int, chunks: int, microbatches: int) -> None:
    plan = pipe("interleaved", ranks, microbatches, chunks)
    seconds = equal(ranks * chunks, microbatches) / chunks
    end = max(ends(plan, seconds, silent(ranks * chunks - 1, microbatches)))
    assert end / (3 * microbatches) - 1 == pytest.approx((ranks - 1) / (chunks * microbatches))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 64), (8, 24)])
def test_zero_bubble_leaves_a_third_to_two(ranks: int, microbatches: int) -> None:
    plan = pipe("zero-bubble", ranks, microbatches)
    end = max(ends(plan, equal(ranks, microbatches), silent(ranks - 1, microbatches)))
    bubble = (ranks - 1) / microbatches
    # a third with two stages, as in the paper (Qi et al. 2023); the runtime's order leaves more with more stages
    assert bubble / 3 - 1e-9 <= end / (3 * microbatches) - 1 <= (bubble / 3 + 1e-9 if ranks == 2 else 0.6 * bubble)


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_equal_stages_take_what_the_runtimes_simulation_says(name: Any, chunks: int, microbatches: int) -> None:
    for ranks in (2, 3, 4):
        orders = build_schedule(name, ranks, chunks, microbatches)
        seconds = np.array([COSTS[kind] for kind in "FBIW"], dtype=float)
        everything = np.broadcast_to(seconds[:, None, None], (4, ranks * chunks, microbatches)).copy()
        played = play(order_of(name, ranks, chunks, microbatches), everything, silent(ranks * chunks, microbatches))
        assert max(played) == total_time(orders)


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 1), (3, 7), (4, 2), (5, 20), (8, 16)])
def test_orders_are_the_runtimes_and_every_action_comes_after_what_it_needs(
    name: Any, chunks: int, ranks: int, count: int
) -> None:
    order, stages = order_of(name, ranks, chunks, count), ranks * chunks
    actions = [
        Action("FBIW"[kind], int(stage), int(microbatch))  # type: ignore[arg-type]
        for kind, stage, microbatch in zip(order.kind, order.stage, order.microbatch, strict=True)
    ]
    place = {action: at for at, action in enumerate(actions)}
    for rank, actions_of_rank in enumerate(build_schedule(name, ranks, chunks, count)):
        assert [action for action, of in zip(actions, order.rank, strict=True) if of == rank] == actions_of_rank
    for at, (action, after) in enumerate(zip(actions, order.after, strict=True)):
        needed = [
            place[before]
            for alternatives in needed_before(action, stages)
            for before in alternatives
            if before in place
        ]
        assert all(before < at for before in needed)
        across = [before for before in needed if actions[before].stage != action.stage]
        assert ([after] if after >= 0 else []) == across
        if across:
            assert order.crosses[after] == min(action.stage, actions[after].stage)


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(SCHEDULES),
    ranks=st.integers(2, 4),
    more=st.integers(0, 9),
    data=st.data(),
)
def test_long_runs_continue_as_if_played_out(kind: Any, ranks: int, more: int, data: Any) -> None:
    name, chunks = kind
    stages, count = ranks * chunks, 11 * ranks + more
    factors = data.draw(st.lists(st.floats(0.8, 1.25), min_size=stages, max_size=stages))
    message = data.draw(st.floats(0.0, 0.5))
    seconds = equal(stages, count) * np.array(factors)[None, :, None]
    messages = sent(np.full((stages - 1, count), message))
    whole = play(order_of(name, ranks, chunks, count), seconds, messages)
    assert name == "zero-bubble" or shortened(name, count, ranks) < count
    assert ends(pipe(name, ranks, count, chunks), seconds, messages) == pytest.approx(whole, rel=0.02)


def test_a_long_run_whose_microbatches_take_turns_is_continued_so() -> None:
    """The period of these three ranks is two microbatches long, which take 3.75 s and 4.75 s."""
    seconds = equal(3, 33) * np.array([1.25, 1.25, 0.875])[None, :, None]
    messages = sent(np.full((2, 33), 0.5))
    assert ends(pipe("1f1b", 3, 33), seconds, messages) == pytest.approx([147.0, 144.0, 141.0])


@settings(deadline=None, max_examples=60)
@given(kind=st.sampled_from(SCHEDULES), ranks=st.integers(2, 4), count=st.integers(1, 40), data=st.data())
def test_slower_stages_and_links_never_end_sooner(kind: Any, ranks: int, count: int, data: Any) -> None:
    name, chunks = kind
    stages = ranks * chunks
    plan = pipe(name, ranks, count, chunks)
    seconds, messages = equal(stages, count), np.full((stages - 1, count), 0.1)
    before = max(ends(plan, seconds, sent(messages)))
    slow = data.draw(st.integers(0, stages - 1))
    slower = seconds.copy()
    slower[:, slow] *= data.draw(st.floats(1.0, 3.0))
    assert max(ends(plan, slower, sent(messages))) >= before - 1e-9
    assert max(ends(plan, seconds, sent(2 * messages))) >= before - 1e-9


def test_a_message_arrives_after_its_time() -> None:
    seconds = equal(2, 1)
    assert max(ends(pipe("1f1b", 2, 1), seconds, sent(np.full((1, 1), 0.5)))) == 2 * (1 + 2) + 2 * 0.5
    # with more microbatches in flight, work hides all but the first and the last message
    assert max(ends(pipe("gpipe", 2, 8), equal(2, 8), sent(np.full((1, 8), 0.5)))) == 9 + 18 + 2 * 0.5


def test_1f1b_holds_as_many_microbatches_as_stages_follow() -> None:
    for ranks, count in ((2, 8), (4, 8), (4, 2), (4, 100)):
        held = [most_held(pipe("1f1b", ranks, count), np.ones((ranks, count)), rank)[0] for rank in range(ranks)]
        assert held == [min(count, ranks - rank) for rank in range(ranks)]
        assert most_held(pipe("gpipe", ranks, count), np.ones((ranks, count)), 0)[0] == count


def test_interleaving_holds_more() -> None:
    p, v = 4, 2
    held = most_held(pipe("interleaved", p, 16, v), np.full((p * v, 16), 1 / v), 0)[0]
    assert held == pytest.approx(p * (1 + (p - 1) / (p * v)), rel=0.1)  # Narayanan et al. 2021, within one chunk


def test_a_step_over_stages_has_the_papers_bubble() -> None:
    model = transformer(8, s=512, h=256)
    for name, share in (("1f1b", 1.0), ("interleaved", 0.5), ("zero-bubble", 1 / 3)):
        chunks = 2 if name == "interleaved" else 1
        done = predict(model, machines(network=1e6), pipe(name, 4, 16, chunks))
        work = done.phases["forward"] + done.phases["backward"]
        waited = done.phases["exposed_communication"] / work
        assert share * 3 / 16 * 0.95 <= waited <= (0.7 if name == "zero-bubble" else share * 1.05) * 3 / 16


def test_stages_are_cut_by_cost_and_by_name() -> None:
    model = transformer(8, ends=True)
    even = stages_of(model, pipe("1f1b", 4, 8))
    place = {module.name: int(stage) for module, stage in zip(model.modules, even.stage, strict=True)}
    assert [place[f"blocks.{index}"] for index in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (place["tokens"], place["head"], place[""]) == (0, 3, 3)
    assert [place[name] for name in ("blocks.3.up", "blocks.4.qkv")] == [1, 2]
    assert even.sent.tolist() == [2.0 * 64 * 32] * 3
    assert [(model.modules[a].name, model.modules[b].name) for a, b in even.ties] == [("head", "tokens")]
    named = meshed(8, 2, {"stage": 2}, pipeline=PipelinePlan(cuts=("blocks.6",)))
    assert np.bincount(stages_of(model, named).stage).tolist() == [2 - 1 + 6 * 9, 2 * 9 + 2]


@pytest.mark.parametrize(
    ("cuts", "words"),
    [(("blocks.9",), "no such module"), (("blocks.1", "blocks.2"), "names 2 modules"), (("tokens.x",), "cannot begin")],
)
def test_cuts_that_make_no_pipeline_are_refused(cuts: tuple[str, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        stages_of(transformer(4), meshed(8, 2, {"stage": 2}, pipeline=PipelinePlan(cuts=cuts)))


def test_more_stages_than_parts_are_refused() -> None:
    model = ModelSpec(name="two", modules=(ModuleSpec(name="a", kind="A", output_nbytes=4.0),))
    with pytest.raises(PlanError, match="use at most 1 stages"):
        stages_of(model, meshed(8, 2, {"stage": 2}))


def test_blocks_too_heavy_for_equal_stages_are_taken_apart() -> None:
    model = transformer(5)
    whole, apart = (stages_of(model, meshed(8, 2, {"stage": ranks})) for ranks in (2, 4))

    def places(stage: Any) -> int:
        return len({(int(module), m.block) for module, m in zip(stage, model.modules, strict=True) if m.block >= 0})

    assert places(whole.stage) == 5
    assert places(apart.stage) > 5  # some block lies on two stages
    costs = np.bincount(apart.stage, weights=[sum(op.flops_forward for op in m.ops) for m in model.modules])
    assert costs.max() < 1.3 * costs.mean()
    assert apart.sent.max() > whole.sent.max()  # its residual is sent too


@pytest.mark.parametrize("count", [1, 4, 9])
def test_messages_on_one_way_queue(count: int) -> None:
    """By hand: forwards take 1 s, messages 5 s. The first stage is done at once; its messages arrive one by one."""
    seconds = np.zeros((4, 2, count))
    seconds[0] = 1.0
    order = order_of("gpipe", 2, 1, count)
    _, ended = moments(order, seconds, sent(np.full((1, count), 5.0)))
    second = [end for end, rank, kind in zip(ended, order.rank, order.kind, strict=True) if rank == 1 and kind == 0]
    assert second == [1.0 + 5.0 * (microbatch + 1) + 1.0 for microbatch in range(count)]


def test_a_queue_is_of_what_is_on_the_wire_not_of_latencies() -> None:
    """By hand: forwards take 1 s, messages 5 s, of which 4 are latency. They arrive as fast as they are made."""
    order = order_of("gpipe", 2, 1, 3)
    seconds = np.zeros((4, 2, 3))
    seconds[0, 0] = 1.0
    _, ended = moments(order, seconds, sent(np.full((1, 3), 5.0), latency_s=4.0))
    second = [end for end, rank, kind in zip(ended, order.rank, order.kind, strict=True) if rank == 1 and kind == 0]
    assert second == [6.0, 7.0, 8.0]


@pytest.mark.parametrize(("chunks", "shared"), [(1, False), (2, True)])
def test_messages_of_several_boundaries_between_two_ranks_share_the_way(chunks: int, shared: bool) -> None:
    """Rank 0 sends to rank 1 forward over the first boundary.

    With two stages per rank, it also sends forward over the third boundary, and gradients over the second.
    """
    order = order_of("interleaved" if chunks > 1 else "1f1b", 2, chunks, 4)
    crossed = {(way, int(boundary)) for way, boundary in zip(order.link, order.crosses, strict=True) if way >= 0}
    ahead = {boundary for way, boundary in crossed if way == 0 * 2 + 1}
    back = {boundary for way, boundary in crossed if way == 1 * 2 + 0}
    assert (ahead, back) == (({0, 1, 2}, {0, 1, 2}) if shared else ({0}, {0}))
    assert sum(way < 0 for way in order.link) == sum(
        (kind == 0 and stage == 2 * chunks - 1) or (kind == 1 and stage == 0)
        for kind, stage in zip(order.kind, order.stage, strict=True)
    )
