"""What ranks on devices of one name on several hosts measured at once, as one, or as several kinds.

Steps wait for the slowest, and matrix products, of which there are many samples, say which that is. What else is
measured in fewer samples scatters more than hosts do: there the middle counts. A host far behind the others is no such
device, whatever its name: processors of virtual machines are all called alike, others are throttled or shared.
"""

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from tutti.config.cluster import CompressRate, ConvolutionRate, GemmRate, ImageRate, MemoryRate, VectorRate, WeightRate
from tutti.profile.probe.findings import DeviceRates

BEHIND = 0.85
"""A host whose products run at less than this part of the hosts' median pace is named."""

APART = 0.7
"""A host all of whose products in float32 run at less than this part of the quickest host's pace has another kind of
device. Other dtypes may be emulated, as slowly on both."""

T = TypeVar("T")
R = TypeVar("R", ConvolutionRate, ImageRate)


def in_kinds(found: Mapping[str, DeviceRates]) -> list[dict[str, DeviceRates]]:
    """`found`, by host, in groups of hosts of about one pace, the quickest first."""
    if len(found) < 2:
        return [dict(found)]
    plain = {host: replace(rates, gemm=tuple(rate for rate in rates.gemm if rate.dtype == "float32"))
             for host, rates in found.items()}  # fmt: skip
    paces = {host: max(sizes, default=1.0) for host, sizes in _paces(plain, max).items()}
    groups: list[dict[str, DeviceRates]] = []
    least = 0.0
    for host in sorted(found, key=lambda host: -paces[host]):
        if not groups or paces[host] < least:
            groups.append({})
            least = APART * paces[host]
        groups[-1][host] = found[host]
    return [{host: group[host] for host in found if host in group} for group in groups]


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
        convolutions=merged([one.convolutions for one in all_found], lambda rate: rate.weight_nbytes, _relative),
        images=merged([one.images for one in all_found], lambda rate: rate.pixels, _relative),
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


def _relative(rates: list[R]) -> R:
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
    """A word on each host that is slower than most."""
    if len(found) < 3:  # of two nobody can say which is the usual one
        return []
    return [
        f"host {host} multiplies at {pace:.0%} of the usual pace of its kind, and ranks in step wait for it: look what "
        "else it does, or leave it out"
        for host, sizes in _paces(found, statistics.median).items()
        if sizes and (pace := statistics.median(sizes)) < BEHIND
    ]


def _paces(found: Mapping[str, DeviceRates], usual: Callable[[Iterable[float]], float]) -> dict[str, list[float]]:
    """By host, each product that all have timed, beside the `usual` one of its size and dtype."""
    tables = {host: {(r.dtype, r.n, r.threads): r.flops_per_s for r in rates.gemm} for host, rates in found.items()}
    shared = set.intersection(*(set(table) for table in tables.values()))
    of_all = {where: usual([table[where] for table in tables.values()]) for where in shared}
    return {host: [table[where] / of_all[where] for where in shared] for host, table in tables.items()}
