"""Reductions of gradients that a plan compresses: bytes from the codec's formula, seconds of transfer and of
kernels.

A ModelSpec has the bytes of gradients by module but no shapes. For powersgd, each module's gradient counts as
one square matrix, for which the codec's thin factors are smallest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tutti.config.cluster import CompressRate, DeviceKind, DeviceSpec
from tutti.config.codec_registry import CODECS
from tutti.config.compression import (
    FACTORS,
    STATISTICS_NBYTES,
    STATISTICS_UPDATES,
    ZERO_ONE,
    Compression,
    all_reduce_sent_nbytes,
    flags_sent_nbytes,
    format_compression,
    gathers_messages,
    reduce_scatter_sent_nbytes,
)
from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName
from tutti.cost_model.group_links import RankGroup
from tutti.cost_model.rank_placement import HostGroup
from tutti.cost_model.worker_speed import Array

VALUE_NBYTES: Final = 4
"""Bytes of one value of a gradient. Plans for models in other dtypes are rare."""

KERNEL_S_PER_VALUE: Final[dict[DeviceKind, float]] = {"cpu": 8e-9, "cuda": 1.5e-10}
"""Seconds to encode, add up, encode again and decode one value, where `tutti probe` has not measured the codec on
the device.

Assumed: on one CPU core, one-bit with error feedback took 3.5 to 4.1 ns to encode and 1.4 to 2.2 ns to decode.
The value for CUDA follows from memory passes.
"""

KERNEL_MARGIN: Final = {"measured": 0.5, "assumed": 1.0}
"""Relative half-width of the interval of the kernels' time. Measured times are those of one process alone; in a
run, backward and other ranks take memory bandwidth from the kernels.
"""

_EXACT: Final[tuple[AxisName, ...]] = ("split", "stage")
"""Reductions over these axes are not compressed (parallel/compressed/compressor.py)."""

_SIZE: Final = 2**20
"""Number of values of the message for which a time is assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How the gradients of a group are encoded.

    Attributes:
        holders: number of members that exchange codes: all ranks, or all hosts with `tiers`.
        parts: number of ranks of a host, each of which exchanges one part of the gradients.
        tiers: reductions inside each host are exact, and only those between hosts are encoded.
        sent_nbytes: bytes that the rank that sends most sends in a step.
        share: bytes of the codes over the bytes of an exact reduction; 1 where the reduction is exact.
    """

    holders: int
    parts: int = 1
    tiers: bool = False
    sent_nbytes: float
    share: float = 1.0

    def sum_s(self, plan: Plan, group: RankGroup, host_group: HostGroup, nbytes: float) -> tuple[float, float]:
        """Return (seconds, seconds in kernels among them) in which `group` reduces a bucket of `nbytes`."""
        kernels = host_group.slowdown * kernel_s(plan, host_group.device, self.holders, self.share, nbytes / self.parts)
        return kernels + self.wire_s(group, nbytes), kernels

    def wire_s(self, group: RankGroup, nbytes: float) -> float:
        """Return the seconds in which `group` reduces a bucket of `nbytes`, without the kernels."""
        return group.tiered(nbytes, nbytes * self.share) if self.tiers else group.all_reduce(nbytes * self.share)


def written(
    plan: Plan, group: RankGroup, axes: tuple[AxisName, ...], nbytes: Array, sizes: Sequence[float], updates: int | None
) -> Written | None:
    """Return how a group's gradients are encoded; None where the plan does not compress this reduction.

    Args:
        axes: axes along which the gradients are reduced.
        nbytes: (modules,) bytes of gradients.
        sizes: bytes of each bucket.
        updates: updates made before the step; None: warm-up is over.
    """
    how = plan.sync.compress
    if how is None or any(plan.degree(axis) > 1 for axis in axes if axis in _EXACT) or group.ranks == 1:
        return None
    if how.method == FACTORS:
        return None
    if how.between == "hosts" and group.network is None:
        return None  # a single host has no reduction between hosts
    tiers, span = how.between != "ranks" and group.tiers, group.span
    parts = span.fewest if tiers and not how.entry.whole_tensors else 1  # such codecs are never given a part
    holders = span.hosts if tiers else span.ranks
    now = how if updates is None else how.at(updates)
    codes, gradients = _codes_nbytes(how, now, nbytes, sizes, holders, parts), int((nbytes > 0).sum())
    flag_nbytes = VALUE_NBYTES + (STATISTICS_NBYTES if _sends_statistics(how, updates) else 0)
    return Written(
        holders=holders,
        parts=parts,
        tiers=tiers,
        sent_nbytes=codes + flags_sent_nbytes(gradients, span.ranks, flag_nbytes),
        share=1.0 if now is None else codes / _exact_nbytes(float(nbytes.sum()) / parts, holders),
    )


def phases(plan: Plan) -> tuple[int, ...]:
    """Return the numbers of updates after which the plan sends something else than before."""
    how = plan.sync.compress
    if how is None or plan.world_size == 1:
        return ()
    if how.freeze_step is not None:
        looking = (how.freeze_step - STATISTICS_UPDATES,) if how.method != ZERO_ONE else ()
        return (*(at for at in looking if at > 0), how.freeze_step)
    count = how.warmup_steps or 0
    at = [updates for updates in (math.ceil(quarter * count / 4) for quarter in range(1, 5)) if updates]
    return tuple(updates for updates in dict.fromkeys(at) if how.at(updates) != how.at(updates - 1))


def _sends_statistics(how: Compression, updates: int | None) -> bool:
    """Return whether ranks measure in the next reduction how far their gradients cancel."""
    if how.freeze_step is None or updates is None or how.at(updates) is not None:
        return False
    return how.method == ZERO_ONE or updates >= how.freeze_step - STATISTICS_UPDATES


def changes_written(plan: Plan, group: RankGroup, nbytes: Array) -> Written | None:
    """Return how replicas that diverge encode their changes, as one vector; None where these are not compressed.

    Args:
        nbytes: (modules,) bytes of the changes.
    """
    how, whole = plan.sync.compress, float(nbytes.sum())
    if how is None or group.ranks == 1 or not whole:
        return None
    sent = _codes_nbytes(how, how, nbytes, [whole], group.ranks)
    return Written(holders=group.ranks, sent_nbytes=sent, share=sent / _exact_nbytes(whole, group.ranks))


def _codes_nbytes(
    how: Compression, now: Compression | None, nbytes: Array, sizes: Sequence[float], holders: int, parts: int = 1
) -> float:
    """Return the bytes that one of `holders` members sends to reduce its part of the gradients.

    Args:
        how: the codec of the plan.
        now: the codec in force in this step; None: exact.
        nbytes: (modules,) bytes of gradients.
        sizes: bytes of each bucket.
        parts: number of parts into which each bucket is divided.
    """
    if how.entry.whole_tensors:
        sides = [
            math.isqrt(math.ceil(module_nbytes / VALUE_NBYTES))
            for module_nbytes in nbytes.tolist()
            if module_nbytes > 0
        ]
        messages: list[list[tuple[int, ...]]] = [[(side, side) for side in sides]]
    else:
        messages = [[(math.ceil(math.ceil(size / VALUE_NBYTES) / parts),)] for size in sizes]
    return float(sum(all_reduce_sent_nbytes(now, shapes, holders, VALUE_NBYTES) for shapes in messages))


def _exact_nbytes(nbytes: float, holders: int) -> float:
    """Return the bytes that one of `holders` members sends in an exact reduction."""
    return 2 * (holders - 1) / holders * nbytes


def kernel_s(plan: Plan, device: DeviceSpec, ranks: int, written: float, nbytes: float) -> float:
    """Return the seconds in kernels for a bucket of `nbytes` that `ranks` ranks reduce; 0 for an exact reduction.

    In two phases, a rank encodes the whole bucket, decodes and adds as many values, encodes its part of the sum
    and decodes all parts. Where messages of the whole bucket are gathered, it encodes its own message and
    decodes those of all ranks.

    Args:
        written: bytes of the codes over those of an exact reduction; 1 where the reduction is exact.
    """
    how = plan.sync.compress
    if how is None or written == 1.0:
        return 0.0
    numel = nbytes / VALUE_NBYTES
    there = rates_of(device, how) or _assumed(device.kind, how.method)
    encode, decode = _seconds(there, numel)
    if how.entry.whole_tensors:
        return encode + decode
    if how.entry.short_messages or gathers_messages(how, ranks):
        return encode + ranks * decode
    back = how.entry.kernel_cost.return_codec
    again = rates_of(device, Compression(method=back)) if back is not None else ()
    encode_back, decode_back = _seconds(again or there, numel)
    return encode + decode + encode_back / ranks + decode_back


def rates_of(device: DeviceSpec, how: Compression) -> tuple[CompressRate, ...]:
    """Return the measured rates of a codec on a device, by size.

    Rates measured with the same settings are preferred to those of the same codec with other settings.
    """
    words = format_compression(how)
    exactly = tuple(rate for rate in device.compress_rates if rate.method == words)
    if exactly:
        return exactly
    alike = [rate for rate in device.compress_rates if rate.method.partition(",")[0] == how.method]
    return tuple(rate for rate in alike if rate.method == alike[-1].method)


def kernel_margin(device: DeviceSpec, plan: Plan) -> float:
    """Return the relative half-width of the interval of the kernels' time; 0 where a plan compresses nothing."""
    how = plan.sync.compress
    if how is None or how.method == FACTORS:  # factors need matrix products only, no kernels of a codec
        return 0.0
    return KERNEL_MARGIN["measured" if rates_of(device, how) else "assumed"]


def slowed(device: DeviceSpec, factor: float) -> DeviceSpec:
    """Return the device with kernels that take `factor` times as long, assumed kernels included."""
    known = {rate.method.partition(",")[0] for rate in device.compress_rates}
    assumed = [rate for method in CODECS if method not in known for rate in _assumed(device.kind, method)]
    rates = tuple(
        replace(rate, encode_s=rate.encode_s * factor, decode_s=rate.decode_s * factor)
        for rate in (*device.compress_rates, *assumed)
    )
    return replace(device, compress_rates=rates)


def kernel_notes(plan: Plan, device: DeviceSpec) -> tuple[str, ...]:
    """Describe where the kernels' time comes from, and what is sent before the plan's steady state."""
    how = plan.sync.compress
    if how is None or plan.world_size == 1:
        return ()
    if how.method == FACTORS:
        return (
            "weights of linear layers are reduced by factors where that takes fewer bytes; assumed: their products are "
            "as fast as other float32 products",
        )
    changes = phases(plan)
    clause = "are not compressed" if how.freeze_step is not None and how.method != ZERO_ONE else "send more"
    first = (f"the first {changes[-1]} updates {clause}, and these numbers leave them out",) if changes else ()
    if rates_of(device, how):
        return (*first, f"kernels of {how.method}: as measured by tutti probe on {device.name}")
    return (
        *first,
        f"assumed: kernels of {how.method} take about {_assumed_s(device.kind, how.method) * 1e9:g} ns per value; "
        "tutti probe measures them",
    )


def kept_nbytes(plan: Plan, how: Written | None, nbytes: float) -> float:
    """Return the bytes of a bucket that compression keeps between steps.

    Residuals count twice, so that a step can be reverted. Codecs of momentum send the momentum divided by d, the
    root of the frozen second moment, which a rank keeps. Where optimizer state is sharded, the rank also has a
    copy of the momentum.
    """
    compress = plan.sync.compress
    if how is None or compress is None or not compress.keeps:
        return 0.0
    kept = 2 * compress.entry.residuals * nbytes / how.parts
    return kept + (nbytes * (2 if plan.degree("shard") > 1 else 1) if compress.sends_momentum else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsWritten:
    """How gradients are encoded where each rank of the shard axis gets its part of their sum.

    Attributes:
        there: bytes over those of an exact reduce-scatter over the shard axis.
        across: bytes over those of an exact all-reduce over the other axes.
        ranks: ranks of the shard axis.
        others: ranks of the other axes.
    """

    there: float = 1.0
    across: float = 1.0
    ranks: int
    others: int

    def kernels_s(self, plan: Plan, device: DeviceSpec, nbytes: float) -> float:
        """Return the seconds in kernels for gradients of `nbytes`.

        A rank encodes all of them, decodes and adds as many values, and then reduces its part over the other
        axes.
        """
        how = plan.sync.compress
        if how is None:
            return 0.0
        encode, decode = _seconds(rates_of(device, how) or _assumed(device.kind, how.method), nbytes / VALUE_NBYTES)
        across = kernel_s(plan, device, self.others, self.across, nbytes / self.ranks) if self.others > 1 else 0.0
        return encode + decode + across


def parts_written(plan: Plan, ranks: int, others: int, nbytes: float) -> PartsWritten:
    """Return how gradients of `nbytes` are encoded that `ranks` ranks divide and `others` ranks reduce further."""
    how, numel = plan.sync.compress, math.ceil(nbytes / VALUE_NBYTES)
    if how is None or not numel:
        return PartsWritten(ranks=ranks, others=others)
    longest, side = -(-numel // ranks), math.isqrt(numel)
    if how.entry.whole_tensors:
        there, shape = all_reduce_sent_nbytes(how, [(side, side)], ranks, VALUE_NBYTES), (-(-side // ranks), side)
    else:
        there, shape = reduce_scatter_sent_nbytes(how, longest, ranks), (longest,)  # type: ignore[assignment]
    across = all_reduce_sent_nbytes(how, [shape], others, VALUE_NBYTES) / (
        2 * (others - 1) / others * nbytes / ranks or 1.0
    )
    return PartsWritten(
        there=there / ((ranks - 1) / ranks * nbytes), across=across if others > 1 else 1.0, ranks=ranks, others=others
    )


def parts_kept_nbytes(plan: Plan, gradients: float, others: int) -> float:
    """Return the bytes of residuals where each rank gets its part of the sums.

    They cover all gradients, and the rank's part where it is reduced over `others` ranks, both old and new.
    """
    how, ranks = plan.sync.compress, plan.degree("shard")
    if how is None or not how.keeps or ranks == 1 or plan.sharding.level == 1:
        return 0.0
    return 2 * how.entry.residuals * gradients * (1 + (1 / ranks if others > 1 else 0))


def _assumed_s(kind: DeviceKind, method: str) -> float:
    """Return the assumed seconds of a codec's kernels for one value."""
    return KERNEL_S_PER_VALUE[kind] * (CODECS[method].kernel_cost.cpu_factor if kind == "cpu" else 1.0)


def _assumed(kind: DeviceKind, method: str) -> tuple[CompressRate, ...]:
    """Return the assumed seconds of a codec as rates: its registry entry says how they divide into encoding and
    decoding.
    """
    whole = _assumed_s(kind, method) * _SIZE
    cost = CODECS[method].kernel_cost
    encode_s, decode_s = cost.encode_share * whole, cost.decode_share * whole
    return (CompressRate(method=method, numel=_SIZE, encode_s=encode_s, decode_s=decode_s),)


def _seconds(rates: tuple[CompressRate, ...], numel: float) -> tuple[float, float]:
    """Return (encode, decode) seconds of `numel` values.

    Between measured sizes the time is interpolated linearly; beyond them the rate of the nearest size holds.
    """
    known = sorted(rates, key=lambda rate: rate.numel)
    sizes = np.array([rate.numel for rate in known], dtype=float)
    inside = float(np.clip(numel, sizes[0], sizes[-1]))
    beyond = numel / inside
    return tuple(  # type: ignore[return-value]
        float(np.interp(inside, sizes, [getattr(rate, name) for rate in known])) * beyond
        for name in ("encode_s", "decode_s")
    )
