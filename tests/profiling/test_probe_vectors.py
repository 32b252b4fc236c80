"""Operators that take longer for an element than a sum does, beside a product."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from tutti.config.model import VectorKind
from tutti.profile.probe import compute_rates
from tutti.profile.probe.probe_timing import QUICK

CPU = torch.device("cpu")


def test_each_kind_is_measured_once_and_its_calls_are_of_one_size() -> None:
    subjects = compute_rates.vector_operators()
    assert sorted(one.kind for one in subjects) == sorted(get_args(VectorKind))
    for one in subjects:
        values = torch.randn(one.shape, requires_grad=True)
        assert one.numel == values.numel()
        assert [call(values).requires_grad for call in one.calls] == [one.kind != "random"] * len(one.calls)


def test_a_rate_is_of_elements_in_the_time_of_a_flop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product at 1 GFLOP/s, 2 ns and 5 ns an element: the least disturbed of each, not of one turn."""
    turns = iter([(9.0, 5.0), (2.0, 7.0)])
    paces = iter([3e-9, 1e-9])
    one = compute_rates.VectorOperators(kind="pool", shape=(10, 20), calls=(torch.relu,))
    monkeypatch.setattr(compute_rates, "product_s", lambda flops, *_: flops * next(paces))
    monkeypatch.setattr(
        compute_rates, "_vector_forward_backward_s", lambda *_: tuple(200e-9 * ns for ns in next(turns))
    )
    found = compute_rates._rate(one, CPU, replace(QUICK, kinds=2))
    assert (found.kind, found.forward, found.backward) == ("pool", pytest.approx(1 / 2), pytest.approx(1 / 5))


def test_backward_is_timed_apart_and_without_one_the_call_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two operators together; calls are told by what they give."""
    seen: list[bool] = []

    def took(call: object, *_: object) -> float:
        backward = getattr(call, "func", None) is compute_rates._gradient
        call()  # type: ignore[operator]
        seen.append(backward)
        return 10.0 if backward else 1.0

    monkeypatch.setattr(compute_rates, "_vector_time_s", took)
    both = compute_rates.VectorOperators(kind="function", shape=(4, 4), calls=(torch.tanh, torch.log))
    assert compute_rates._vector_forward_backward_s(both, CPU, QUICK) == (2.0, 20.0)
    assert seen == [False, True] * 2
    drawn = compute_rates.VectorOperators(
        kind="random", shape=(4, 4), calls=(lambda x: torch.empty_like(x).bernoulli_(0.5),)
    )
    assert compute_rates._vector_forward_backward_s(drawn, CPU, QUICK) == (1.0, 1.0)


def test_on_a_cpu_with_time_for_it_and_nowhere_else() -> None:
    threads = torch.get_num_threads()
    found = compute_rates.measure_vector_rates(CPU, replace(QUICK, repeats=1, kinds=1))
    assert {rate.kind for rate in found} == set(get_args(VectorKind))
    assert all(0 < rate.forward < 1 and 0 < rate.backward < 1 for rate in found)
    assert torch.get_num_threads() == threads
    assert (
        compute_rates.measure_vector_rates(CPU, replace(QUICK, kinds=0))
        == compute_rates.measure_vector_rates(torch.device("cuda"), QUICK)
        == ()
    )
