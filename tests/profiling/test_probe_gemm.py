"""Rates of matrix products: the formula against published tables, bounds on time, and a clock that waits."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tutti.config.cluster import GemmRate
from tutti.profile.probe import compute_rates, memory_rates, probe_timing
from tutti.profile.probe.compute_rates import gemm_flops_per_s
from tutti.profile.probe.probe_timing import Effort

_FILE = Path(__file__).parents[1] / "data" / "machine_examples.json"
EXAMPLES: dict[str, Any] = {entry["id"]: entry for entry in json.loads(_FILE.read_text(encoding="utf-8"))["examples"]}
CPU = torch.device("cpu")

TINY = Effort(
    gemm_sizes=(16, 32),
    cuda_gemm_sizes=(16, 32),
    concurrent_sizes=(16,),
    dtypes=("float32", "bfloat16", "tf32", "float8"),
    threads="ends",
    repeats=2,
    gemm_budget_s=1.0,
    link_nbytes=(1024, 65536),
    link_repeats=2,
    link_budget_s=0.5,
    copy_nbytes=2**20,
    disk_nbytes=2**16,
)


@pytest.mark.parametrize(("n", "seconds", "gflops"), EXAMPLES["gemm_gflops"]["cases"])
def test_rate_of_timed_products(n: int, seconds: float, gflops: float) -> None:
    assert gemm_flops_per_s(n, seconds) / 1e9 == pytest.approx(gflops, rel=1e-14)


@pytest.mark.parametrize("row", EXAMPLES["magma_dgemm"]["rows"])
def test_rates_of_a_printed_table(row: list[float]) -> None:
    n, *pairs = row
    for rate, milliseconds in zip(pairs[::2], pairs[1::2], strict=True):
        # The table prints times to 0.01 ms.
        assert gemm_flops_per_s(int(n), milliseconds / 1e3) / 1e9 == pytest.approx(rate, rel=1e-4)


def test_the_clock_waits_for_the_device_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: order.append("wait"))
    monkeypatch.setattr(
        probe_timing.time, "perf_counter", lambda: float(len(order)) if not order.append("clock") else 0.0
    )
    assert probe_timing.once(lambda: order.append("launch"), torch.device("cuda")) > 0
    assert order == ["wait", "clock", "launch", "wait", "clock"]


def test_no_other_file_of_the_probe_reads_a_clock_around_device_work() -> None:
    folder = Path(probe_timing.__file__).parent
    readers = {path.name for path in folder.glob("*.py") if "perf_counter" in path.read_text(encoding="utf-8")}
    launches = "accelerator_rates.py"  # it times the host alone, while the device is at work
    assert readers == {"probe_timing.py", "memory_rates.py", launches}


def test_quartile_median_and_spread() -> None:
    took = probe_timing.summary([2.0, 1.0, 6.0])
    assert (took.quartile_s, took.median_s, took.spread, took.repeats) == (1.0, 2.0, 2.5, 3)
    assert probe_timing.quartile([5.0, 4.0, 3.0, 2.0, 1.0]) == 2.0
    assert probe_timing.quartile(list(map(float, range(100)))) == 24.0


def test_more_samples_are_taken_as_long_as_they_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disturbed in three of four calls at first, and never later: the quiet time is found, in bounded time."""
    calls = iter([1.0, 0.1, 0.1, *([0.1, 0.9, 0.9, 0.9] * 2), *([0.1] * 100)])
    clock = [0.0]

    def once(call: Any, device: torch.device) -> float:
        clock[0] += (seconds := next(calls))
        return seconds

    monkeypatch.setattr(probe_timing, "once", once)
    monkeypatch.setattr(probe_timing.time, "perf_counter", lambda: clock[0])
    took = probe_timing.repeated(lambda: None, CPU, repeats=4, budget_s=100.0)
    assert (took.quartile_s, took.median_s, took.repeats) == (0.1, pytest.approx(0.1), 16)
    calls = iter([0.1, 0.1, 0.1, *([0.1, 0.9, 0.9, 0.9] * 100)])
    clock[0] = 0.0
    took = probe_timing.repeated(lambda: None, CPU, repeats=4, budget_s=5.0)
    assert took.repeats == 8  # 5.6 s: twice the budget is never reached


def test_a_core_that_was_shared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(granted: float, concurrent: int = 1) -> tuple[str, ...]:
        took = probe_timing.Timing(quartile_s=0.1, median_s=0.5, spread=1.0, repeats=3, granted=granted)
        monkeypatch.setattr(probe_timing, "repeated", lambda *given, **named: took)
        found = compute_rates.measure_gemm_rates(
            CPU, TINY, threads=(1,), sizes=(16,), dtypes=("float32",), concurrent=concurrent
        )
        assert found.rates[0].flops_per_s == pytest.approx(2 * 16**3 / 0.1)
        return found.notes

    (said,) = notes(0.3)
    assert "for 30% of its time" in said
    assert notes(0.95) == notes(0.3, concurrent=2) == ()


def rates(*flops_per_s: float) -> list[GemmRate]:
    return [GemmRate(dtype="float16", n=256 * 2**i, flops_per_s=rate) for i, rate in enumerate(flops_per_s)]


def test_the_next_size_is_predicted_from_the_ones_before() -> None:
    assert compute_rates.predicted_s([], 256) == 0
    assert compute_rates.predicted_s(rates(1e9), 512) == pytest.approx(2 * 512**3 / 1e9)
    # A rate that halved is expected to halve again; one that rose is not expected to go on rising.
    assert compute_rates.predicted_s(rates(2e9, 1e9), 1024) == pytest.approx(2 * 1024**3 / 0.5e9)
    assert compute_rates.predicted_s(rates(1e9, 2e9), 1024) == pytest.approx(2 * 1024**3 / 2e9)


def test_sizes_over_the_budget_are_skipped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[int] = []

    def slow(call: Any, device: torch.device, *, repeats: int, budget_s: float) -> probe_timing.Timing:
        n = int(call().shape[0])
        multiplied.append(n)
        return probe_timing.Timing(quartile_s=0.01 * (n / 16) ** 3, median_s=0.0, spread=0.0, repeats=1)

    monkeypatch.setattr(probe_timing, "repeated", slow)
    found = compute_rates.measure_gemm_rates(CPU, TINY, threads=(1,), sizes=(16, 32, 64, 128, 256), dtypes=("float32",))
    assert multiplied == [16, 32, 64]  # 0.01, 0.08, 0.64 s; then 5 s would exceed the budget of 1 s
    assert [rate.n for rate in found.rates] == [16, 32, 64]
    assert len(found.notes) == 1
    assert "float32 products of N = 128, 256 on 1 thread were skipped" in found.notes[0]


def test_real_products_of_every_dtype_the_device_has() -> None:
    before = torch.get_num_threads()
    found = compute_rates.measure_gemm_rates(CPU, TINY, threads=(1, 2), sizes=(16, 32), dtypes=TINY.dtypes)
    assert {(rate.dtype, rate.threads, rate.n) for rate in found.rates} == {
        (dtype, threads, n) for dtype in ("float32", "bfloat16") for threads in (1, 2) for n in (16, 32)
    }
    assert all(rate.flops_per_s > 0 and rate.spread >= 0 for rate in found.rates)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("cores", "kind", "counts"),
    [
        (1, "powers", (1,)),
        (2, "ends", (1, 2)),
        (6, "powers", (1, 2, 4, 6)),
        (8, "powers", (1, 2, 4, 8)),
        (8, "ends", (1, 8)),
    ],
)
def test_thread_counts(cores: int, kind: str, counts: tuple[int, ...]) -> None:
    assert compute_rates.thread_counts(cores, kind) == counts


def test_memory_is_measured_on_a_buffer_beyond_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_rates.copy_nbytes(TINY, cache_nbytes=2**25, memory_nbytes=2**34) == 2**27
    assert memory_rates.copy_nbytes(TINY, cache_nbytes=2**25, memory_nbytes=2**30) == 2**26
    assert memory_rates.copy_nbytes(TINY, cache_nbytes=0, memory_nbytes=2**34) == 2**20
    monkeypatch.setattr(memory_rates.host_facts, "cache_nbytes", lambda: 0)
    monkeypatch.setattr(
        probe_timing,
        "repeated",
        lambda *a, **k: probe_timing.Timing(quartile_s=0.5, median_s=0.6, spread=0.1, repeats=2),
    )
    (rate,) = memory_rates.measure(CPU, TINY, threads=(1,), memory_nbytes=2**34)
    assert rate.bytes_per_s == 2 * 2**20 / 0.5  # read and written


def test_samples_of_stolen_time_are_set_aside_while_there_is_patience() -> None:
    rounds = probe_timing.Rounds()
    rounds.take([1.0], probe_timing.MOST_STOLEN)
    for round_ in range(probe_timing.MOST_ROUNDS + 1):
        rounds.take([10.0 + round_], 0.06)
    assert rounds.samples == [1.0, 10.0 + probe_timing.MOST_ROUNDS]


def test_a_size_that_is_slower_than_another_is_measured_again_and_the_better_rate_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rate(n: int, flops_per_s: float, dtype: str = "float32") -> GemmRate:
        return GemmRate(dtype=dtype, n=n, flops_per_s=flops_per_s)

    asked: list[tuple[str, int]] = []

    def sizes(device: Any, effort: Any, dtype: str, threads: int, wanted: tuple[int, ...], concurrent: int) -> Any:
        (n,) = wanted
        asked.append((dtype, n))
        return [rate(n, {"float32": 9.9 if n == 2048 else 9.8, "float16": 0.5}[dtype], dtype)], [], 1.0

    monkeypatch.setattr(compute_rates, "_sizes", sizes)
    first = [rate(256, 9.0), rate(512, 10.0), rate(1024, 7.0), rate(2048, 9.4)]
    slower = [rate(256, 2.0, "float16"), rate(512, 1.0, "float16")]
    found = compute_rates.remeasure_doubtful([*first, *slower], CPU, TINY)
    assert asked == [("float32", 256), ("float32", 1024), ("float32", 2048), ("float16", 512)]
    assert [one.flops_per_s for one in found] == [9.8, 10.0, 9.8, 9.9, 2.0, 1.0]


def test_a_size_whose_samples_are_apart_is_measured_again_and_the_better_rate_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow spell at the first, smallest size is no dip with size: a larger one is only quicker."""

    def rate(n: int, flops_per_s: float, spread: float) -> GemmRate:
        return GemmRate(dtype="float32", n=n, flops_per_s=flops_per_s, spread=spread)

    second = {256: 52.0, 2048: 40.0}
    monkeypatch.setattr(
        compute_rates, "_sizes", lambda device, effort, dtype, threads, wanted, concurrent: (
            [rate(wanted[0], second[wanted[0]], 0.1)], [], 1.0
        )
    )  # fmt: skip
    found = compute_rates.remeasure_doubtful(
        [rate(256, 25.0, 0.73), rate(512, 48.0, 0.2), rate(2048, 47.0, 0.6)], CPU, TINY
    )
    assert [one.flops_per_s for one in found] == [52.0, 48.0, 47.0]


def test_on_cores_in_turns_a_sample_lasts_several_of_them() -> None:
    calls = []
    for turns in (False, True, False):
        calls.append(0)
        with probe_timing.in_turns(turns):
            probe_timing.in_step(lambda: calls.append(calls.pop() + 1) or time.sleep(2e-3), CPU, lambda: None)
    assert calls[0] == calls[2] == 1 + probe_timing.IN_STEP
    assert calls[1] >= 2 + 4 * probe_timing.IN_STEP  # 12 ms in calls of 2, or somewhat more
