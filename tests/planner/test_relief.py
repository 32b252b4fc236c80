"""Recompute of some blocks: the knapsack against every choice, and plans against trying all of them."""

import dataclasses
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples import plan
from planner.machines import cards
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import LayoutRule, PipelinePlan, Plan
from tutti.cost_model import predict
from tutti.planner import PlanRequest, choose
from tutti.planner.plan_description import settings_words
from tutti.planner.plan_refinement import BlockLoad, least_recompute, with_forms
from tutti.profile.architectures import architecture

BLOCKS = 4


def load(nbytes: list[list[float]], seconds: list[list[float]], place: list[int]) -> BlockLoad:
    return BlockLoad(
        names=tuple(f"blocks.{index}" for index in range(len(place))),
        nbytes=np.array(nbytes),
        within=np.zeros((3, len(place))),
        seconds=np.array(seconds),
        pipeline_rank=np.array(place),
        fixed=np.zeros(max(place) + 1),
    )


@settings(deadline=None, max_examples=80)
@given(data=st.data(), count=st.integers(1, 6))
def test_the_choice_is_as_good_as_any_that_keeps_a_little_less(data: st.DataObject, count: int) -> None:
    """Bytes are rounded up to a 400th of the budget.

    So the choice keeps the budget, and costs no more than any choice that keeps a 400th less for each block.
    """
    place = sorted(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    numbers = st.lists(st.floats(0.1, 9), min_size=count, max_size=count)
    nbytes, seconds = [data.draw(numbers) for _ in range(3)], [[0.0] * count, data.draw(numbers), data.draw(numbers)]
    model = load(nbytes, seconds, place)
    budget = np.array(data.draw(st.lists(st.floats(0.5, 30), min_size=2, max_size=2)))[: max(place) + 1]

    def totals(forms: tuple[int, ...]) -> tuple[np.ndarray, float]:
        kept = np.zeros(len(budget))
        for block, form in enumerate(forms):
            kept[place[block]] += nbytes[form][block]
        return kept, sum(seconds[form][block] for block, form in enumerate(forms))

    every = [totals(forms) for forms in product(range(3), repeat=count)]
    picked = least_recompute(model, budget)
    tighter = budget * (1 - count / 400)
    if picked is None:
        assert not any((kept <= tighter).all() for kept, _ in every)
        return
    kept, lost = totals(tuple(picked.tolist()))
    assert (kept <= budget * (1 + 1e-9)).all()
    assert lost <= min((cost for kept, cost in every if (kept <= tighter).all()), default=np.inf) + 1e-9


def gpt() -> ModelSpec:
    return architecture("gpt", {"layers": BLOCKS, "hidden": 512, "heads": 8, "seq_len": 1024, "vocab": 1000})


def steps(model: ModelSpec, machines: ClusterSpec, intended: Plan) -> dict[tuple[int, ...], float]:
    """Return the step time of every choice of forms that fits."""
    step_s_by_forms = {}
    for forms in product(range(3), repeat=BLOCKS):
        names = tuple(f"blocks.{index}" for index in range(BLOCKS))
        done = predict(model, machines, with_forms(intended, names, forms))
        if done.fits:
            step_s_by_forms[forms] = done.step_time_s.value
    return step_s_by_forms


@pytest.mark.parametrize(("mesh", "microbatches"), [({"replicate": 1}, 1), ({"stage": 2}, 4)])
def test_some_blocks_recompute_where_that_is_all_that_memory_asks(mesh: dict[str, int], microbatches: int) -> None:
    model = gpt()
    intended = dataclasses.replace(plan(16, 1, microbatches, pipeline=PipelinePlan(schedule="gpipe")), mesh=mesh)
    bare = predict(model, cards(1, 2), intended).memory.total
    names = tuple(f"blocks.{index}" for index in range(BLOCKS))
    full = predict(model, cards(1, 2), with_forms(intended, names, (2,) * BLOCKS)).memory.total
    machines = cards(1, 2, memory_nbytes=int(0.4 * bare + 0.6 * full))
    every = steps(model, machines, intended)
    assert (0,) * BLOCKS not in every
    request = PlanRequest(script=intended, scope="all", mesh=mesh, keep_microbatches=True)
    choice = choose(model, machines, request)
    assert choice.prediction.fits
    assert choice.prediction.step_time_s.value <= 1.02 * min(every.values())
    uniform = min(every[forms] for forms in ((1,) * BLOCKS, (2,) * BLOCKS) if forms in every)
    assert choice.prediction.step_time_s.value < 0.99 * uniform
    assert any(f"of {number} block" in settings_words(choice.best) for number in range(1, BLOCKS + 1))


def test_a_layout_that_the_script_wrote_stays() -> None:
    script = dataclasses.replace(plan(16), layout=(LayoutRule(modules="blocks.1", recompute=True),))
    choice = choose(gpt(), cards(1, 1), PlanRequest(script=script, scope="all"))
    assert choice.best.layout == script.layout
