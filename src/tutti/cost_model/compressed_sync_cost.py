"""Sums of gradients that a plan compresses: bytes by the formula, time on the wire and in the kernels.

A ModelSpec knows bytes of gradients by module and no shapes: powersgd takes each module's for one square matrix, which
is the least that its thin matrices can be.
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
"""Bytes of a gradient's value: models in other dtypes are rare, and their plans rarer."""

KERNEL_S_PER_VALUE: Final[dict[DeviceKind, float]] = {"cpu": 8e-9, "cuda": 1.5e-10}
"""Seconds to encode, add up, encode again and decode a value, where `tutti probe` has not measured the method on the
device. Assumed: one-bit with error feedback was timed at 3.5 to 4.1 ns and decoding at 1.4 to 2.2 on one CPU core; CUDA
from memory passes."""

KERNEL_MARGIN: Final = {"measured": 0.5, "assumed": 1.0}
"""Half-width of the interval of time in the kernels, relative. Measured ones are of a process alone: backward and other
ranks take bandwidth from them."""

_EXACT: Final[tuple[AxisName, ...]] = ("split", "stage")
"""Sums over these axes are exact (runtime.compressed)."""

_SIZE: Final = 2**20
"""Values of a message whose time is assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How the gradients of a group are written. `holders`: that exchange codes: all ranks, or hosts, inside which sums
    are exact (`tiers`) and whose ranks have a part of `parts` each; `sent_nbytes`: of the rank that sends most, in a
    step; `share`: what the codes are of the bytes of an exact sum, 1 where it is exact.
    """

    holders: int
    parts: int = 1
    tiers: bool = False
    sent_nbytes: float
    share: float = 1.0

    def sum_s(self, plan: Plan, group: RankGroup, host_group: HostGroup, nbytes: float) -> tuple[float, float]:
        """(seconds, those of them in kernels) in which `group` sums a bucket of `nbytes`."""
        kernels = host_group.slowdown * kernel_s(plan, host_group.device, self.holders, self.share, nbytes / self.parts)
        return kernels + self.wire_s(group, nbytes), kernels

    def wire_s(self, group: RankGroup, nbytes: float) -> float:
        """The same without the kernels."""
        return group.tiered(nbytes, nbytes * self.share) if self.tiers else group.all_reduce(nbytes * self.share)


def written(
    plan: Plan, group: RankGroup, axes: tuple[AxisName, ...], nbytes: Array, sizes: Sequence[float], updates: int | None
) -> Written | None:
    """How gradients of `nbytes` by module, in buckets of `sizes`, are written after so many updates (None: once no
    warm-up is left); None where the plan leaves these sums as they are."""
    how = plan.sync.compress
    if how is None or any(plan.degree(axis) > 1 for axis in axes if axis in _EXACT) or group.ranks == 1:
        return None
    if how.method == FACTORS:
        return None
    if how.between == "hosts" and group.network is None:
        return None  # on one host nothing is between hosts
    tiers, span = how.between != "ranks" and group.tiers, group.span
    parts = span.fewest if tiers and not how.entry.whole_tensors else 1  # matrices stay whole
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
    """After how many updates what a plan sends is no longer what it was."""
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
    """Whether ranks see in the next sum how far their parts cancel."""
    if how.freeze_step is None or updates is None or how.at(updates) is not None:
        return False
    return how.method == ZERO_ONE or updates >= how.freeze_step - STATISTICS_UPDATES


def changes_written(plan: Plan, group: RankGroup, nbytes: Array) -> Written | None:
    """How replicas that differ write their changes of `nbytes` by module, one vector; None: as they are."""
    how, whole = plan.sync.compress, float(nbytes.sum())
    if how is None or group.ranks == 1 or not whole:
        return None
    sent = _codes_nbytes(how, how, nbytes, [whole], group.ranks)
    return Written(holders=group.ranks, sent_nbytes=sent, share=sent / _exact_nbytes(whole, group.ranks))


def _codes_nbytes(
    how: Compression, now: Compression | None, nbytes: Array, sizes: Sequence[float], holders: int, parts: int = 1
) -> float:
    """What one of `holders` sends to sum its part of `nbytes` by module, in buckets of `sizes`: by `how`, which is
    `now` in force."""
    if how.entry.whole_tensors:
        sides = [math.isqrt(math.ceil(one / VALUE_NBYTES)) for one in nbytes.tolist() if one > 0]
        messages: list[list[tuple[int, ...]]] = [[(side, side) for side in sides]]
    else:
        messages = [[(math.ceil(math.ceil(size / VALUE_NBYTES) / parts),)] for size in sizes]
    return float(sum(all_reduce_sent_nbytes(now, shapes, holders, VALUE_NBYTES) for shapes in messages))


def _exact_nbytes(nbytes: float, holders: int) -> float:
    return 2 * (holders - 1) / holders * nbytes


def kernel_s(plan: Plan, device: DeviceSpec, ranks: int, written: float, nbytes: float) -> float:
    """Seconds in the kernels for a bucket of `nbytes` that `ranks` sum; 0 where its `ratio`, `written`, is that of an
    exact sum. In two phases a rank writes all of it, adds up as much, writes its part of the sum and reads all parts;
    of codes of the whole it writes its own and reads all.
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
    """What is known of a method on a device, by size: of its very settings, else of the method with others."""
    words = format_compression(how)
    exactly = tuple(rate for rate in device.compress_rates if rate.method == words)
    if exactly:
        return exactly
    alike = [rate for rate in device.compress_rates if rate.method.partition(",")[0] == how.method]
    return tuple(rate for rate in alike if rate.method == alike[-1].method)


def kernel_margin(device: DeviceSpec, plan: Plan) -> float:
    """Half-width of the interval of the kernels' time under a plan, relative; 0 where nothing is compressed."""
    how = plan.sync.compress
    if how is None or how.method == FACTORS:  # matrix products, which doubt about kernels does not concern
        return 0.0
    return KERNEL_MARGIN["measured" if rates_of(device, how) else "assumed"]


def slowed(device: DeviceSpec, factor: float) -> DeviceSpec:
    """The device with kernels that take `factor` times as long, what is assumed of them too."""
    known = {rate.method.partition(",")[0] for rate in device.compress_rates}
    assumed = [rate for method in CODECS if method not in known for rate in _assumed(device.kind, method)]
    rates = tuple(
        replace(rate, encode_s=rate.encode_s * factor, decode_s=rate.decode_s * factor)
        for rate in (*device.compress_rates, *assumed)
    )
    return replace(device, compress_rates=rates)


def kernel_notes(plan: Plan, device: DeviceSpec) -> tuple[str, ...]:
    """Where the time in the kernels comes from, and what comes before."""
    how = plan.sync.compress
    if how is None or plan.world_size == 1:
        return ()
    if how.method == FACTORS:
        return (
            "linear layers' weights go by factors where that is fewer bytes; products as quick as others of float32",
        )
    changes = phases(plan)
    exactly = "sum exactly" if how.freeze_step is not None and how.method != ZERO_ONE else "send more"
    first = (f"the first {changes[-1]} updates {exactly}, and are not in these numbers",) if changes else ()
    if rates_of(device, how):
        return (*first, f"kernels of {how.method}: as measured by tutti probe on {device.name}")
    return (
        *first,
        f"assumed: kernels of {how.method} take about {_assumed_s(device.kind, how.method) * 1e9:g} ns a value; tutti "
        "probe measures them",
    )


def kept_nbytes(plan: Plan, how: Written | None, nbytes: float) -> float:
    """What is kept back between steps of a bucket: twice, so that a step may be taken back. Momenta are sent divided by
    d, which a rank holds, and where states are divided it has a copy of m as well.
    """
    compress = plan.sync.compress
    if how is None or compress is None or not compress.keeps:
        return 0.0
    kept = 2 * compress.entry.residuals * nbytes / how.parts
    return kept + (nbytes * (2 if plan.degree("shard") > 1 else 1) if compress.sends_momentum else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsWritten:
    """How gradients are written of whose sums each rank of `shard` gets its part: bytes over those of exact sums, over
    `shard` (`there`) and over the other axes (`across`)."""

    there: float = 1.0
    across: float = 1.0
    ranks: int
    others: int

    def kernels_s(self, plan: Plan, device: DeviceSpec, nbytes: float) -> float:
        """Seconds in the kernels for gradients of `nbytes`: all of them written, as much added up, then the part."""
        how = plan.sync.compress
        if how is None:
            return 0.0
        encode, decode = _seconds(rates_of(device, how) or _assumed(device.kind, how.method), nbytes / VALUE_NBYTES)
        across = kernel_s(plan, device, self.others, self.across, nbytes / self.ranks) if self.others > 1 else 0.0
        return encode + decode + across


def parts_written(plan: Plan, ranks: int, others: int, nbytes: float) -> PartsWritten:
    """Of gradients of `nbytes` that `ranks` divide, and `others` sum besides."""
    how, numel = plan.sync.compress, math.ceil(nbytes / VALUE_NBYTES)
    if how is None or not numel:
        return PartsWritten(ranks=ranks, others=others)
    longest, side = -(-numel // ranks), math.isqrt(numel)
    if how.entry.whole_tensors:
        there, mine = all_reduce_sent_nbytes(how, [(side, side)], ranks, VALUE_NBYTES), (-(-side // ranks), side)
    else:
        there, mine = reduce_scatter_sent_nbytes(how, longest, ranks), (longest,)  # type: ignore[assignment]
    across = all_reduce_sent_nbytes(how, [mine], others, VALUE_NBYTES) / (
        2 * (others - 1) / others * nbytes / ranks or 1.0
    )
    return PartsWritten(
        there=there / ((ranks - 1) / ranks * nbytes), across=across if others > 1 else 1.0, ranks=ranks, others=others
    )


def parts_kept_nbytes(plan: Plan, gradients: float, others: int) -> float:
    """What is kept back of sums of which each rank gets its part: of all gradients, and of the part's sum over the
    other axes, as of a bucket."""
    how, ranks = plan.sync.compress, plan.degree("shard")
    if how is None or not how.keeps or ranks == 1 or plan.sharding.level == 1:
        return 0.0
    return 2 * how.entry.residuals * gradients * (1 + (1 / ranks if others > 1 else 0))


def _assumed_s(kind: DeviceKind, method: str) -> float:
    """Seconds a value that nobody measured."""
    return KERNEL_S_PER_VALUE[kind] * (CODECS[method].kernel_cost.cpu_factor if kind == "cpu" else 1.0)


def _assumed(kind: DeviceKind, method: str) -> tuple[CompressRate, ...]:
    """The same as rates: a method's time goes half into writing, or nearly all where messages are short."""
    whole = _assumed_s(kind, method) * _SIZE
    cost = CODECS[method].kernel_cost
    encode_s, decode_s = cost.encode_share * whole, cost.decode_share * whole
    return (CompressRate(method=method, numel=_SIZE, encode_s=encode_s, decode_s=decode_s),)


def _seconds(rates: tuple[CompressRate, ...], numel: float) -> tuple[float, float]:
    """(encode, decode) of so many values: between measured sizes straight lines, beyond them the nearest rate."""
    known = sorted(rates, key=lambda rate: rate.numel)
    sizes = np.array([rate.numel for rate in known], dtype=float)
    inside = float(np.clip(numel, sizes[0], sizes[-1]))
    beyond = numel / inside
    return tuple(  # type: ignore[return-value]
        float(np.interp(inside, sizes, [getattr(rate, name) for rate in known])) * beyond
        for name in ("encode_s", "decode_s")
    )
