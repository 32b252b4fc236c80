"""Strategies that count as equal are ordered by how much they change; margins of error apply to all links."""

from types import SimpleNamespace
from typing import Any

import pytest

from planner.machines import cards, own_links
from tutti.planner.relaxed_search import TIE, ErrorMargins, TriedStrategy, _better, _ranked
from tutti.planner.relaxed_strategies import RELAXED_STRATEGIES, REQUIRED_SAVING

BY_WORDS = {strategy.words: strategy for strategy in RELAXED_STRATEGIES}


def tried(words: str, value: float, samples: float = 1.0) -> TriedStrategy:
    placeholder: Any = SimpleNamespace(value=value, cluster=cards(2, 2), plan=SimpleNamespace(world_size=4))
    return TriedStrategy(
        strategy=BY_WORDS[words], costed=placeholder, samples=samples, evidence="assumed", totals=placeholder
    )


@pytest.mark.parametrize(
    ("least", "rival"),
    [
        ("qsgd,bits=8", "local:period=8"),  # replicas stay equal
        ("local:period=8", "local:period=4 in qsgd,bits=4"),  # values are sent without a codec
        ("local:period=8", "post-local:period=8,after=4 in qsgd,bits=4"),
        ("post-local:period=8,after=4", "local:period=8"),
        ("local:period=4", "local:period=8"),
    ],
)
def test_the_one_that_changes_least_is_first(least: str, rival: str) -> None:
    within, beyond = 1 + 0.9 * TIE, 1 + 1.1 * TIE
    assert [candidate.strategy.words for candidate in _ranked(iter([tried(rival, 1.0), tried(least, within)]))] == [
        least,
        rival,
    ]
    assert [candidate.strategy.words for candidate in _ranked(iter([tried(rival, 1.0), tried(least, beyond)]))] == [
        rival,
        least,
    ]


def test_fewer_samples_go_before_all_but_the_dial() -> None:
    order = [tried("local:period=8", 1.0, 1.01), tried("local:period=8,delay=2 in qsgd,bits=4", 1.01)]
    assert _ranked(iter(order))[0].samples == 1.0


def test_what_is_equal_to_the_best_of_its_dial_is_as_good_as_that() -> None:
    best, gains = tried("post-local:period=8,after=4 in qsgd,bits=4", 1.0), 1.001 / (1 - REQUIRED_SAVING)
    equal = tried("post-local:period=8,after=4", 1 + 0.9 * TIE)
    others = [tried("local:period=8", 1 + 1.1 * TIE), tried("qsgd,bits=8", 1 + 0.9 * TIE)]
    assert _better([best, equal, *others], gains) == [best, equal]
    assert _better([best, equal, *others], 0.999 / (1 - REQUIRED_SAVING)) == []


def test_links_are_doubted_that_hosts_have_of_their_own() -> None:
    doubted = ErrorMargins(links=2.0, kernels=1.0).of(own_links(cards(2, 2)))
    for before, after in zip(own_links(cards(2, 2)).every_link, doubted.every_link, strict=True):
        assert after.bandwidth_bytes_per_s == 2 * before.bandwidth_bytes_per_s
        assert after.latency_s == before.latency_s / 2
