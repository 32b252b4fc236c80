"""What would have to change for another plan to win, and for how long that is looked at."""

import itertools

import pytest

from plan.machines import cards
from plan.test_meshes import ask, gpt
from tutti.plan import choose
from tutti.plan.scenarios import what_if, with_bandwidth
from tutti.plan.words import plan_words
from tutti.predict import predict

MACHINES = with_bandwidth(cards(2, 2), "network", 1e9)


def test_at_the_link_that_is_named_the_other_plan_is_quicker_by_as_much() -> None:
    choice = choose(gpt(), MACHINES, ask())
    (said,) = choice.changes
    assert said.startswith("At 4 Gbit/s on network links instead of 8 Gbit/s, ")
    slower, _ = what_if(MACHINES, "link=4gbit")
    (rival,) = [one.plan for one in choice.alternatives if f", {plan_words(one.plan)} would be " in said]
    own, other = (predict(gpt(), slower, plan).step_time_s.value for plan in (choice.best, rival))
    assert float(said.partition(" would be ")[2].partition("x as fast")[0]) == pytest.approx(own / other, abs=0.005)
    assert own / other > 1 / 0.98


def test_it_is_looked_at_for_a_part_of_the_searchs_time() -> None:
    seconds = itertools.count()
    hurried = choose(gpt(), MACHINES, ask(), clock=lambda: float(next(seconds)), limit_s=1e6)
    assert hurried.changes  # a hundred thousand looks at this clock
    seconds = itertools.count(step=1000)
    assert choose(gpt(), MACHINES, ask(), clock=lambda: float(next(seconds)), limit_s=9000.0).changes == ()
