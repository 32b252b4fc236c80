"""What would have to change for another plan to win, and how long the planner looks for it."""

import dataclasses
import itertools

import pytest

from planner.machines import cards, own_links
from planner.test_meshes import ask, gpt
from tutti.config.cluster import scale_bandwidth
from tutti.cost_model import predict
from tutti.errors import PlanError
from tutti.planner import choose
from tutti.planner.plan_description import plan_words
from tutti.planner.scenarios import what_if, with_bandwidth

MACHINES = with_bandwidth(cards(2, 2), "network", 1e9)


def test_at_the_link_that_is_named_the_other_plan_is_quicker_by_as_much() -> None:
    choice = choose(gpt(), MACHINES, ask())
    (sentence,) = choice.changes
    assert sentence.startswith("At 4 Gbit/s on network links instead of 8 Gbit/s, ")
    slower, _ = what_if(MACHINES, "link=4gbit")
    (rival,) = [
        alternative.plan
        for alternative in choice.alternatives
        if f", {plan_words(alternative.plan)} would be " in sentence
    ]
    best_s, rival_s = (predict(gpt(), slower, plan).step_time_s.value for plan in (choice.best, rival))
    assert float(sentence.partition(" would be ")[2].partition("x as fast")[0]) == pytest.approx(
        best_s / rival_s, abs=0.005
    )
    assert best_s / rival_s > 1 / 0.98


def test_it_is_looked_at_for_a_part_of_the_searchs_time() -> None:
    seconds = itertools.count()
    hurried = choose(gpt(), MACHINES, ask(), clock=lambda: float(next(seconds)), limit_s=1e6)
    assert hurried.changes  # time for a hundred thousand reads of this clock
    seconds = itertools.count(step=1000)
    assert choose(gpt(), MACHINES, ask(), clock=lambda: float(next(seconds)), limit_s=9000.0).changes == ()


def test_links_that_hosts_have_of_their_own_are_changed_too() -> None:
    machines = own_links(cards(2, 2))
    changed, words = what_if(machines, "link=8gbit")
    assert words == "8 Gbit/s on network links"
    assert [link.bandwidth_bytes_per_s for link in changed.every_link if link.tier == "network"] == [1e9, 1e9]
    assert [link for link in changed.every_link if link.tier == "node"] == [
        link for link in machines.every_link if link.tier == "node"
    ]
    more, _ = what_if(machines, "devices=8")
    assert [node.links for node in more.nodes] == [node.links for node in machines.nodes]
    bare = dataclasses.replace(machines, nodes=(machines.nodes[0], dataclasses.replace(machines.nodes[1], links=())))
    with pytest.raises(PlanError, match="need a link between them"):
        what_if(bare, "devices=8")


def test_slow_hosts_that_a_choice_leaves_idle_change_nothing_of_it() -> None:
    quick = dataclasses.replace(MACHINES.nodes[0], links=MACHINES.links)
    slow = dataclasses.replace(quick, name="idle", links=tuple(scale_bandwidth(link, 1e-3) for link in MACHINES.links))
    machines = dataclasses.replace(MACHINES, nodes=(quick, slow), links=())
    request = dataclasses.replace(ask(), mesh={"replicate": 4})
    both, uncontended = (choose(gpt(), where, request) for where in (machines, MACHINES))
    assert both.prediction == uncontended.prediction
