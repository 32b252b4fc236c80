"""GFLOP/s of square matrix products against N, by dtype and number of threads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tutti.config.cluster import GemmRate
from tutti.profile.probe import timing
from tutti.profile.probe.effort import Effort

Say = Callable[[str], None]

GRANTED = 0.8
"""A process that has a core for less of its time shares it: what it measures then is a part of the machine."""

DIP = 0.95
"""Products are about as quick whatever their size; a rate below this part of the best size's is looked at again."""

APART = 0.5
"""So is one whose samples are further apart, as a part of their median: they were disturbed, maybe all but a few."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRates:
    """Measured rates, and in words which sizes were skipped."""

    rates: tuple[GemmRate, ...]
    notes: tuple[str, ...] = ()


def gemm_flops_per_s(n: int, seconds: float) -> float:
    """Rate of an N x N x N matrix product: 2 N^3 / t (N^3 multiplications and as many additions)."""
    return 2 * n**3 / seconds


def thread_counts(cores: int, kind: str) -> tuple[int, ...]:
    """1 and `cores` ("ends"), or the powers of two between them too ("powers")."""
    between = [2**k for k in range(1, cores.bit_length()) if 2**k < cores] if kind == "powers" else []
    return tuple(dict.fromkeys([1, *between, cores]))


def supported(dtype: str, device: torch.device) -> bool:
    """Whether the device multiplies in `dtype` (on a CPU tf32 and float8 do not exist)."""
    if device.type == "cpu":
        return dtype in DTYPES and dtype != "tf32"
    capability = torch.cuda.get_device_capability(device)
    needed = {"tf32": (8, 0), "bfloat16": (8, 0), "float16": (5, 3), "float8": (8, 9)}.get(dtype, (0, 0))
    return capability >= needed and (dtype != "float8" or hasattr(torch, "_scaled_mm"))


def measure(
    device: torch.device,
    effort: Effort,
    *,
    threads: tuple[int, ...],
    sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    concurrent: int = 1,
    say: Say = lambda text: None,
) -> GemmRates:
    """Rates of all combinations that fit the budget. The number of threads is put back afterwards."""
    rates: list[GemmRate] = []
    notes: list[str] = []
    granted = 1.0
    for dtype in dtypes:
        if not supported(dtype, device):
            continue
        for count in threads:
            on = f" on {count} thread{'s' * (count > 1)}" if device.type == "cpu" else ""
            say(f"matrix products in {dtype}{on}")
            with on_threads(count):
                found, skipped, least = _sizes(device, effort, dtype, count, sizes, concurrent)
            rates += found
            granted = min(granted, least if count == 1 else 1.0)  # of several threads some wait for others
            if skipped:
                notes.append(
                    f"{dtype} products of N = {', '.join(map(str, skipped))}{on} were skipped: predicted to take "
                    f"more than {effort.gemm_budget_s:g} s each"
                )
    if granted < GRANTED and concurrent == 1:
        notes.append(
            f"other work took cores while matrix products were timed (for {granted:.0%} of its time this process had "
            "one), so rates are too low; measure again when the machine is quiet"
        )
    return GemmRates(rates=tuple(rates), notes=tuple(notes))


def again(rates: Sequence[GemmRate], device: torch.device, effort: Effort) -> tuple[GemmRate, ...]:
    """The same rates, where one dips or its samples are apart measured once more, and the better one kept: shared
    machines have slow spells, while what a device really loses is found again. To be called some time after.
    """
    found: list[GemmRate] = []
    for rate in rates:
        alike = [one.flops_per_s for one in rates if (one.dtype, one.threads) == (rate.dtype, rate.threads)]
        if rate.spread > APART or rate.flops_per_s < DIP * max(alike):
            with on_threads(rate.threads):
                second, _, _ = _sizes(device, effort, rate.dtype, rate.threads, (rate.n,), rate.concurrent)
            rate = max(rate, *second, key=lambda one: one.flops_per_s)
        found.append(rate)
    return tuple(found)


def predicted_s(rates: list[GemmRate], n: int) -> float:
    """Time expected of the next size from the ones before it: 2 N^3 at the last rate, which keeps falling if it fell.

    Emulated dtypes lose rate with every size (float16 on a CPU: 2.5 times for each doubling).
    """
    if not rates:
        return 0.0
    last = rates[-1]
    fall = max(1.0, rates[-2].flops_per_s / last.flops_per_s) if len(rates) > 1 else 1.0
    return 2 * n**3 / last.flops_per_s * fall


def _sizes(
    device: torch.device, effort: Effort, dtype: str, threads: int, sizes: tuple[int, ...], concurrent: int
) -> tuple[list[GemmRate], list[int], float]:
    """Rates, the sizes that were skipped, and the least part of the time for which this process had a core."""
    rates: list[GemmRate] = []
    granted = 1.0
    for index, n in enumerate(sizes):
        if predicted_s(rates, n) > effort.gemm_budget_s:
            return rates, list(sizes[index:]), granted
        with _product(device, dtype, n) as call:
            if call is None:
                return rates, list(sizes[index:]), granted
            took = timing.repeated(call, device, repeats=effort.repeats, budget_s=effort.gemm_budget_s)
        granted = min(granted, took.granted)
        rates.append(
            GemmRate(
                dtype=dtype,
                n=n,
                threads=threads,
                flops_per_s=gemm_flops_per_s(n, took.quartile_s),
                spread=took.spread,
                concurrent=concurrent,
            )
        )
    return rates, [], granted


@contextmanager
def _product(device: torch.device, dtype: str, n: int) -> Iterator[Callable[[], object] | None]:
    """A call that multiplies two N x N matrices in `dtype`; None where the device refuses it."""
    if dtype == "float8":
        yield _float8_product(device, n)
        return
    left, right = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
    out = torch.empty(n, n, dtype=DTYPES[dtype], device=device)
    with _matmul_precision("high" if dtype == "tf32" else "highest"):
        yield lambda: torch.mm(left, right, out=out)


def _float8_product(device: torch.device, n: int) -> Callable[[], object] | None:
    left = torch.randn(n, n, device=device).to(torch.float8_e4m3fn)
    right = torch.randn(n, n, device=device).to(torch.float8_e4m3fn).t()  # the kernel wants columns together
    one = torch.ones((), device=device)

    def call() -> object:
        return torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    try:
        call()
    except RuntimeError:  # built without it, or this card's kernels lack it
        return None
    return call


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
