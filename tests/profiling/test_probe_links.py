"""From timed transfers to links: which formula each kind is fitted with, and which sizes are timed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tutti.profile.probe import link_rates, probe_timing
from tutti.profile.probe.probe_timing import QUICK, Effort

LATENCY_S, BANDWIDTH = 2e-5, 1e9


@dataclass
class Party:
    """Ranks that agree at once. `ranks` as in ways.Party."""

    ranks: tuple[int, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "gloo"

    def largest(self, values: list[float]) -> list[float]:
        return values


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Transfers that take what the model says; returns the sizes that are timed."""
    sizes: list[int] = []

    class ProbedTransfers:
        local_group = None

        def __init__(self, group: Any) -> None:
            self.group = group

        def all_reduce(self, numel: int) -> Callable[[], float]:
            return self._takes(4 * numel, lambda nbytes: ring(self.group, nbytes))

        def round_trip(self, numel: int) -> Callable[[], float]:
            return self._takes(4 * numel, lambda nbytes: 2 * (LATENCY_S + nbytes / BANDWIDTH))

        def _takes(self, nbytes: int, seconds: Callable[[int], float]) -> Callable[[], float]:
            sizes.append(nbytes)
            return lambda: seconds(nbytes)

    def ring(group: Any, nbytes: int) -> float:
        ranks = len(group.ranks)
        return 2 * (ranks - 1) * (LATENCY_S + nbytes / ranks / BANDWIDTH)

    monkeypatch.setattr(link_rates, "ProbedTransfers", ProbedTransfers)
    monkeypatch.setattr(probe_timing, "once", lambda call, device: call() or 0.0)
    monkeypatch.setattr(link_rates, "_in_a_row", lambda call, count: call() * count)
    return sizes


def measured(ranks: int, effort: Effort = QUICK) -> tuple[link_rates.LinkSpec, ...]:
    group: Any = Party(ranks=tuple(range(ranks)))
    return link_rates.measure(group, "network", effort, "here")


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_both_kinds_of_transfer_find_the_wire(modelled: list[int], ranks: int) -> None:
    together, pair = measured(ranks)
    for link in (together, pair):
        assert link.latency_s == pytest.approx(LATENCY_S)
        assert link.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH)
        assert link.residual < 1e-9
        assert (link.tier, link.backend, link.evidence) == ("network", "gloo", "measured")
    assert (together.fitted_to, together.ranks) == ("all_reduce", ranks)
    assert (pair.fitted_to, pair.ranks) == ("send", 2)
    assert modelled == [*QUICK.link_nbytes, *QUICK.link_nbytes]
    assert pair.points[0].time_s == pytest.approx(LATENCY_S + QUICK.link_nbytes[0] / BANDWIDTH)


def test_sizes_that_would_take_too_long_are_left_out_but_never_the_first_two(
    modelled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_probe_links.BANDWIDTH", 1e4)
    together, _ = measured(2)
    assert [point.nbytes for point in together.points] == list(QUICK.link_nbytes[:2])


def test_a_link_is_as_fast_as_its_quiet_times_and_one_disturbed_call_leaves_no_size_out(
    modelled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three calls take hundreds of times longer, as where other work has the cores."""
    quiet, calls = probe_timing.once, [0]

    def disturbed(call: Callable[[], float], device: torch.device) -> float:
        calls[0] += 1
        return quiet(call, device) + (0.0 if calls[0] % 3 == 0 else 0.3)

    monkeypatch.setattr(probe_timing, "once", disturbed)
    together, _ = measured(2)
    assert [point.nbytes for point in together.points] == list(QUICK.link_nbytes)
    assert together.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH)
    assert all(point.median_s > 2 * point.time_s for point in together.points)
