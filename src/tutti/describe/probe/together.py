"""What ranks on equal devices of several hosts measured at once, as one.

Steps wait for the slowest, and matrix products, of which there are many samples, say which that is. What else is
measured in fewer samples scatters more than hosts do: there the middle counts.
"""

import statistics
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TypeVar

from tutti.describe.probe.findings import DeviceRates
from tutti.spec.cluster import CompressRate, ConvolutionRate, GemmRate, MemoryRate, VectorRate, WeightRate

BEHIND = 0.85
"""A host whose products run at less than this part of the hosts' median pace is named."""

T = TypeVar("T")


def slowest(found: Mapping[str, DeviceRates]) -> DeviceRates:
    """`found`: by host, the rank that speaks for all first. Of products the lowest rates, of all others the median.
    Rates that not all have (a size was skipped) are left out."""
    all_found = list(found.values())
    if len(all_found) == 1:
        return all_found[0]
    efficiency = {kind: statistics.median(one.efficiency.get(kind, value) for one in all_found)
                  for kind, value in all_found[0].efficiency.items()}  # fmt: skip
    return DeviceRates(
        gemm=merged([one.gemm for one in all_found], lambda rate: (rate.dtype, rate.n, rate.threads), _slowest),
        memory=merged([one.memory for one in all_found], lambda rate: rate.threads, median_memory),
        weights=merged([one.weights for one in all_found], weights_key, median_weights),
        codes=merged([one.codes for one in all_found], lambda rate: (rate.method, rate.numel), _codes),
        kernel_overhead_s=statistics.median(one.kernel_overhead_s for one in all_found),
        efficiency=efficiency,
        convolutions=merged([one.convolutions for one in all_found], lambda rate: rate.weight_nbytes, _convolutions),
        vectors=merged([one.vectors for one in all_found], lambda rate: rate.kind, _vectors),
        notes=(*dict.fromkeys(note for one in all_found for note in one.notes), *_behind(found)),
    )


def weights_key(rate: WeightRate) -> Hashable:
    """What tells rates of going over weights apart, on one device."""
    return rate.kind, rate.dtype, rate.threads


def merged(of_ranks: list[tuple[T, ...]], key: Callable[[T], Hashable], of: Callable[[list[T]], T]) -> tuple[T, ...]:
    """Rates that every rank has, made one `of`."""
    tables = [{key(rate): rate for rate in rates} for rates in of_ranks]
    return tuple(of([table[where] for table in tables]) for where in tables[0] if all(where in t for t in tables))


def _slowest(rates: list[GemmRate]) -> GemmRate:
    return min(rates, key=lambda rate: rate.flops_per_s)


def median_memory(rates: list[MemoryRate]) -> MemoryRate:
    middle = statistics.median(rate.bytes_per_s for rate in rates)
    return replace(rates[0], bytes_per_s=middle, spread=max(rate.spread for rate in rates))


def median_weights(rates: list[WeightRate]) -> WeightRate:
    return replace(
        rates[0],
        forward=statistics.median(rate.forward for rate in rates),
        input_gradient=statistics.median(rate.input_gradient for rate in rates),
        weight_gradient=statistics.median(rate.weight_gradient for rate in rates),
    )


def _convolutions(rates: list[ConvolutionRate]) -> ConvolutionRate:
    return replace(rates[0], relative=statistics.median(rate.relative for rate in rates))


def _vectors(rates: list[VectorRate]) -> VectorRate:
    return replace(
        rates[0],
        forward=statistics.median(rate.forward for rate in rates),
        backward=statistics.median(rate.backward for rate in rates),
    )


def _codes(rates: list[CompressRate]) -> CompressRate:
    return replace(
        rates[0],
        encode_s=statistics.median(rate.encode_s for rate in rates),
        decode_s=statistics.median(rate.decode_s for rate in rates),
    )


def _behind(found: Mapping[str, DeviceRates]) -> list[str]:
    """A word on each host that is slower than most: its products beside those of the others, size by size."""
    tables = {host: {(r.dtype, r.n, r.threads): r.flops_per_s for r in rates.gemm} for host, rates in found.items()}
    shared = set.intersection(*(set(table) for table in tables.values()))
    if len(tables) < 3 or not shared:  # of two nobody can say which is the usual one
        return []
    usual = {where: statistics.median(table[where] for table in tables.values()) for where in shared}
    paces = {host: statistics.median(table[where] / usual[where] for where in shared) for host, table in tables.items()}
    return [
        f"host {host} multiplies at {pace:.0%} of the usual pace of its kind, and ranks in step wait for it: look what "
        "else it does, or leave it out"
        for host, pace in paces.items()
        if pace < BEHIND
    ]
