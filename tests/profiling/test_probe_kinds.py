"""Linear layers, convolutions and attention beside products of as many FLOPs."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tutti.profile.probe import compute_rates
from tutti.profile.probe.probe_timing import QUICK, Effort

KINDS = ("gemm", "conv", "attention")
CPU = torch.device("cpu")
SUBJECTS = [
    *compute_rates.layers(),
    *compute_rates.convolutions(),
    *compute_rates.small_images(),
    compute_rates.attention(),
]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_subjects_have_the_flops_that_are_said_of_them(subject: compute_rates.TimedOperator) -> None:
    """Attention's are those of its two products, which torch counts where it makes them one by one."""
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        subject.forward()
    assert counted.get_total_flops() == subject.flops


def test_what_is_measured_is_relative_to_products_timed_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 4 ms in each pass, forward and backward together 24 ms: 12 of 24."""
    monkeypatch.setattr(compute_rates, "product_s", lambda *_: 4e-3)
    monkeypatch.setattr(compute_rates, "_forward_backward_s", lambda *_: 24e-3)
    found = compute_rates.measure_operator_rates(CPU, QUICK)
    assert found.efficiency == dict.fromkeys(KINDS, pytest.approx(0.5))
    assert [rate.relative for rate in found.convolutions] == pytest.approx([1.0] * 4)
    assert [rate.relative for rate in found.images] == pytest.approx([1.0] * 3)


def test_sizes_of_convolutions_are_told_from_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes its own part more than products: all of them the mean by time, each one a part of that."""
    subjects = compute_rates.convolutions()
    slower = dict(zip((one.weight_nbytes for one in subjects), (4.0, 3.0, 2.0, 1.0), strict=True))
    monkeypatch.setattr(compute_rates, "product_s", lambda flops, *_: flops)
    monkeypatch.setattr(
        compute_rates, "_forward_backward_s", lambda one, *_: 3 * one.flops * slower.get(one.weight_nbytes, 1.0)
    )
    found = compute_rates.measure_operator_rates(CPU, QUICK)
    assert [rate.weight_nbytes for rate in found.convolutions] == sorted(slower)
    own = [found.efficiency["conv"] * rate.relative for rate in found.convolutions]
    assert own == pytest.approx([1 / 4, 1 / 3, 1 / 2, 1.0])
    flops = [one.flops for one in subjects]
    took = sum(one * times for one, times in zip(flops, (4.0, 3.0, 2.0, 1.0), strict=True))
    assert found.efficiency == {"gemm": 1.0, "conv": pytest.approx(sum(flops) / took), "attention": 1.0}


def test_small_images_are_told_from_the_largest_of_as_many_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 x 4 and 2 x 2: in half of its time, and in four times as much; 16 x 16 is what they are told from."""
    relative_speed = {16: 0.5, 4: 4.0}
    monkeypatch.setattr(compute_rates, "product_s", lambda flops, *_: flops)
    monkeypatch.setattr(
        compute_rates, "_forward_backward_s", lambda one, *_: 6 * one.flops * relative_speed.get(one.pixels, 1.0)
    )
    found = compute_rates.measure_operator_rates(CPU, QUICK)
    assert [(rate.pixels, rate.relative) for rate in found.images] == [(256, 1.0), (16, 2.0), (4, 0.25)]
    assert [rate.relative for rate in found.convolutions] == pytest.approx([1.0] * 4)


def test_all_kinds_are_measured_on_a_cpu_where_there_is_time_for_them() -> None:
    threads = torch.get_num_threads()
    found = compute_rates.measure_operator_rates(CPU, replace(QUICK, repeats=1))
    assert set(found.efficiency) == set(KINDS)
    assert all(0 < value < 20 for value in found.efficiency.values())
    assert all(0 < rate.relative < 20 for rate in (*found.convolutions, *found.images))
    assert torch.get_num_threads() == threads
    nothing = compute_rates.measure_operator_rates(CPU, replace(QUICK, kinds=0))
    assert nothing == compute_rates.measure_operator_rates(torch.device("cuda"), QUICK) == compute_rates.OperatorRates()


@pytest.mark.parametrize("flops", [1e3, 151e6, 1.2e9])
def test_products_have_sides_whose_rates_are_known(flops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8, 422 and 843, the sides of as many FLOPs, none is measured by a probe; a second a product is a second times
    its part of the FLOPs."""
    made: list[float] = []

    def repeated(call: Callable[[], object], *_: object, **__: object) -> SimpleNamespace:
        with FlopCounterMode(display=False) as counted:
            call()
        made.append(counted.get_total_flops())
        return SimpleNamespace(quartile_s=1.0)

    monkeypatch.setattr(compute_rates.probe_timing, "repeated", repeated)
    assert compute_rates.product_s(flops, CPU, QUICK) == pytest.approx(flops / made[0])
    side = round((made[0] / 2) ** (1 / 3))
    assert side % 64 == 0
    assert side == 64 or abs(side - (flops / 2) ** (1 / 3)) <= 32


def test_of_each_the_least_disturbed_turn_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    products, operators = iter((1.0, 5.0)), iter((20.0, 4.0))
    monkeypatch.setattr(compute_rates, "product_s", lambda *_: next(products))
    monkeypatch.setattr(compute_rates, "_forward_backward_s", lambda *_: next(operators))
    assert compute_rates._paired_times_s([compute_rates.attention()], CPU, replace(QUICK, kinds=2)) == (
        3.0,
        4.0,
    )


def test_layers_have_twice_the_turns_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[int, int]] = []

    def took(subjects: list[compute_rates.TimedOperator], device: object, effort: Effort) -> tuple[float, float]:
        turns.append((len(subjects), effort.kinds))
        return 1.0, 1.0

    monkeypatch.setattr(compute_rates, "_paired_times_s", took)
    compute_rates.measure_operator_rates(CPU, replace(QUICK, kinds=3))
    assert turns == [(len(compute_rates.layers()), 6), *[(1, 3)] * 7]
