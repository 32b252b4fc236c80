"""What products of few rows take beyond their FLOPs: by hand, and on this machine."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tutti.profile.probe import compute_rates
from tutti.profile.probe.probe_timing import QUICK

CPU = torch.device("cpu")


def test_time_that_does_not_grow_with_the_rows_is_the_weights() -> None:
    # t(rows) = 0.1 ms x rows + 4 ms, and 8 MB of weights: 2 GB/s.
    assert compute_rates.stream_rate(8e6, 4e-3 + 16e-4, 4e-3 + 128e-4) == pytest.approx(2e9)


@pytest.mark.parametrize("many_s", [8e-3, 9e-3])
def test_where_rows_are_all_of_it_the_weights_cost_a_hundredth_at_most(many_s: float) -> None:
    assert compute_rates.stream_rate(1e6, 1e-3, many_s) == pytest.approx(1e6 / 1e-5)


def test_longer_products_of_fewer_rows_do_not_make_rows_negative() -> None:
    assert compute_rates.stream_rate(1e6, 2e-3, 1e-3) == pytest.approx(1e6 / 2e-3)


@pytest.mark.long
def test_native_dtypes_are_measured_on_every_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(compute_rates, "ROUNDS", 1)  # for time: what they are for is tested below
    effort = dataclasses.replace(QUICK, weight_size=64, gemm_budget_s=0.03)
    found = compute_rates.measure_weight_rates(
        CPU, effort, threads=(1, 2), dtypes=("float32", "float16", "float64"), concurrent=3
    )
    assert [(rate.kind, rate.dtype, rate.threads, rate.concurrent) for rate in found] == [
        ("gemm", "float32", 1, 3),
        ("conv", "float32", 1, 3),
        ("gemm", "float32", 2, 3),
        ("conv", "float32", 2, 3),
        ("gemm", "float64", 1, 3),
        ("gemm", "float64", 2, 3),
    ]
    assert all(min(rate.forward, rate.input_gradient, rate.weight_gradient) > 0 for rate in found)
    assert torch.get_num_threads() == before
    assert (
        compute_rates.measure_weight_rates(
            CPU, dataclasses.replace(QUICK, weight_size=0), threads=(1,), dtypes=("float32",)
        )
        == ()
    )
    assert compute_rates.measure_weight_rates(torch.device("cuda"), effort, threads=(1,), dtypes=("float32",)) == ()


def test_a_spell_of_another_pace_between_two_products_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([4e-3 + 16e-4, 4e-3 + 128e-4] * 3 + [9e-3, 4e-3 + 128e-4] * 3 + [4e-3 + 16e-4, 4e-3 + 128e-4] * 3)
    monkeypatch.setattr(
        compute_rates.probe_timing, "repeated", lambda *_, **__: SimpleNamespace(quartile_s=next(taken))
    )
    monkeypatch.setattr(compute_rates, "KINDS", {"float32": ("gemm",)})
    effort = dataclasses.replace(QUICK, weight_size=1000)
    (found,) = compute_rates.measure_weight_rates(CPU, effort, threads=(1,), dtypes=("float32",))
    assert found.forward == found.input_gradient == found.weight_gradient == pytest.approx(1e9)  # 4 MB in 4 ms
    assert not list(taken)


def test_more_weights_than_caches_hold_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each use of one comes after uses of all others."""
    made = compute_rates._products
    seen: list[list[torch.Tensor]] = []

    def noted(*given: list[torch.Tensor]) -> list[Callable[[], object]]:
        seen.append(given[0])
        return made(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(compute_rates, "_products", noted)
    monkeypatch.setattr(compute_rates.host_facts, "cache_nbytes", lambda: 40_000)
    effort = dataclasses.replace(QUICK, weight_size=64, weight_caches=4.0)
    compute_rates.measure_weight_rates(CPU, effort, threads=(1,), dtypes=("float32",))
    assert {len(one) for one in seen if one[0].dim() == 2} == {10}  # 64 x 64 x 4 bytes each, 160,000 in all
    assert len({one.data_ptr() for one in seen[0]}) == 10
    many = [torch.full((2, 2), float(value)) for value in range(3)]
    forward, back, into = made(many, [torch.empty(2, 2) for _ in many], torch.eye(2), torch.eye(2))
    assert [forward()[0, 0].item() for _ in range(4)] == [0.0, 1.0, 2.0, 0.0]  # type: ignore[index]
    assert [back()[0, 0].item() for _ in range(4)] == [0.0, 1.0, 2.0, 0.0]  # type: ignore[index]
    places = [into().data_ptr() for _ in range(4)]  # type: ignore[attr-defined]
    assert len(set(places)) == 3
    assert places[0] == places[3]


def test_each_product_is_that_of_a_linear_layer() -> None:
    layer = torch.nn.Linear(6, 6, bias=False, dtype=torch.float64)
    input = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    output = torch.randn(3, 6, dtype=torch.float64)
    layer(input).backward(output)
    with torch.no_grad():
        gradient = torch.empty(6, 6, dtype=torch.float64)
        forward, back, into_weights = compute_rates._products([layer.weight], [gradient], input, output)
        torch.testing.assert_close(forward(), layer(input), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(back(), input.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(into_weights(), layer.weight.grad, rtol=1e-12, atol=1e-12)


def test_each_product_is_that_of_a_convolution() -> None:
    layer = torch.nn.Conv2d(3, 3, 3, padding=1, bias=False, dtype=torch.float64)
    input = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    output = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    layer(input).backward(output)
    with torch.no_grad():
        forward, back, into_weights = compute_rates._convolutions([layer.weight], [], input, output)
        torch.testing.assert_close(forward(), layer(input), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(back()[0], input.grad, rtol=1e-12, atol=1e-12)  # type: ignore[index]
        torch.testing.assert_close(into_weights()[1], layer.weight.grad, rtol=1e-12, atol=1e-12)  # type: ignore[index]


def test_a_dtype_that_is_far_slower_than_float32_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {torch.bfloat16: 60.0, torch.float64: 2.0}

    def mm(one: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> None:
        clock[0] += slow.get(one.dtype, 1.0)

    clock = [0.0]
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(compute_rates.probe_timing.time, "perf_counter", lambda: clock[0])
    assert compute_rates.emulated(CPU) == ("bfloat16",)
    slow[torch.bfloat16] = 7.0
    assert compute_rates.emulated(CPU) == ()
