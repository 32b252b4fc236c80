"""The compressor of a rank: an exchange for each bucket, and what is kept back, which follows the parameters.

Compressed are the sums over ranks that saw other samples, or other parts of them. What is kept back is in the units of
those sums: totals of losses over the samples of the global batch, before they become a mean over tokens, and times the
loss scale of float16: where that changes, so does what is kept.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tutti.comm.local_group import LocalGroup
from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.rendezvous import HostHierarchy, make_local_group_or_hierarchy
from tutti.comm.traffic import CommHandle
from tutti.comm.world import World
from tutti.compression.by_tensor import Kept, keep, kept_of
from tutti.compression.draw import key_of
from tutti.compression.exchange import Exchange, Rounds
from tutti.compression.state import rank_seed
from tutti.config.compression import FACTORS, Compression, bucket_sent_nbytes, compression_in_words, flags_sent_nbytes
from tutti.config.plan import Plan
from tutti.config.vocabulary import DATA_AXES, AxisName
from tutti.errors import PlanError
from tutti.parallel.compressed.between import BetweenHosts
from tutti.parallel.compressed.courier import Courier
from tutti.parallel.compressed.methods import make_exchange, turns_of
from tutti.parallel.compressed.momenta import Momenta, ZeroOneMomenta, make_momenta
from tutti.parallel.compressed.parts import PartSum, Route
from tutti.parallel.data.buckets import Bucket, Summing
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.sharding.sharded_gradients import Shards
from tutti.parallel.sharding.sharded_unit import Pack

COMPRESSED: frozenset[AxisName] = frozenset((*DATA_AXES, "context", "space"))
"""Axes over which sums are compressed: their ranks saw other samples, or parts of them. Other sums are exact."""

Axes = tuple[AxisName, ...]


class CompressedSum(Summing):
    """Sums the buckets of one group of ranks by the compressor's exchanges; gradients' flags travel as they are."""

    def __init__(self, compressor: "Compressor", number: int, group: Any, hierarchy: HostHierarchy | None) -> None:
        self._compressor, self.number, self.group, self.hierarchy = compressor, number, group, hierarchy
        self._rooms: dict[int, int] = {}
        if hierarchy is not None:
            self.way = "shared memory inside hosts, process group between them"

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that the other ranks of this host reach, where they are to sum in it."""
        if self.hierarchy is None:
            return super().room(numel, dtype, device)
        number, room = self.hierarchy.local_group.new_segment(numel * dtype.itemsize)
        flat = room.tensor(dtype, numel)
        self._rooms[flat.data_ptr()] = number
        return flat

    def room_of(self, flat: torch.Tensor) -> int:
        """The number of the room that a tensor is the beginning of."""
        return self._rooms[flat.data_ptr()]

    def start(self, bucket: Bucket) -> CommHandle:
        rounds = self._compressor.rounds(bucket)
        works = [dist.all_reduce(bucket.flags, group=bucket.group.handle, async_op=True)]
        look, sent = self._compressor.look(bucket), bucket.sent_nbytes
        if look is not None:
            works.append(dist.all_reduce(look, group=bucket.group.handle, async_op=True))
            sent += ring_all_reduce_nbytes(look, bucket.group.size)
        works.append(self._compressor.courier.start(self.number, rounds))
        return bucket.group.channel.start(works, sent)


class Compressor:
    """`groups`: by the mesh's axes, a process group that nothing else uses, and its tiers where inside a host sums are
    exact; `places`: of each parameter among the
    model's, which seeds its bucket's random numbers; `momenta`: what is summed in place of gradients. `exchanges`: of
    the buckets there are now.
    """

    def __init__(
        self,
        how: Compression,
        mesh: Mesh,
        groups: dict[Axes, tuple[Any, HostHierarchy | None]],
        places: dict[nn.Parameter, int],
        seed: int,
        momenta: Momenta | ZeroOneMomenta | None = None,
    ) -> None:
        self.momenta = momenta
        self.how, self.seed, self._axes = how, seed, tuple(mesh.degrees)
        self.courier = Courier()
        self.exchanges: dict[Bucket, Exchange] = {}
        self.parts: list[PartSum] = []
        self._places = places
        self._counted: dict[Bucket, int] = {}
        self._sums = {axes: CompressedSum(self, number, *one) for number, (axes, one) in enumerate(groups.items())}

    def summing(self, axes: Iterable[AxisName]) -> Summing | None:
        """How gradients are summed over `axes`; None: exactly, as without compression."""
        return self._sums.get(tuple(axis for axis in self._axes if axis in axes))

    def rebuild(self, buckets: Iterable[Bucket]) -> None:
        """These are the buckets from now on. What was kept of their parameters is kept; of others it is dropped."""
        before = {tuple(bucket.parameters): exchange for bucket, exchange in self.exchanges.items()}
        mine = [bucket for bucket in buckets if isinstance(bucket.group.summing, CompressedSum)]
        new = [bucket for bucket in mine if tuple(bucket.parameters) not in before]
        kept: dict[nn.Parameter, tuple[Kept, int]] = {}
        for bucket, exchange in self.exchanges.items() if new else ():
            count = max(state.count for state in exchange.states.values())
            found = kept_of(exchange, sizes_of(bucket))
            if isinstance(exchange, BetweenHosts):  # another rank may write it from now on
                self._spread(found, bucket, exchange)
            kept.update({p: (one, count) for p, one in zip(bucket.parameters, found, strict=True)})
        self.exchanges, self._counted = {}, {}
        for bucket in mine:
            shapes = [memory_shape(p) for p in bucket.parameters]
            self.exchanges[bucket] = before.get(tuple(bucket.parameters)) or self._exchange(bucket, shapes)
        for bucket in new:
            known = [kept.get(p, ({}, 0)) for p in bucket.parameters]
            count = max(count for _, count in known)
            keep(self.exchanges[bucket], sizes_of(bucket), [one for one, _ in known], count)
        for bucket in mine:
            bucket.sent_nbytes = self._sent_nbytes(bucket)

    def rounds(self, bucket: Bucket) -> Rounds:
        """How the bucket's sum is made now. Says in it how many bytes that sends."""
        exchange, values = self.exchanges[bucket], values_of(bucket)
        bucket.sent_nbytes = self._sent_nbytes(bucket)
        self._counted[bucket] = exchange.wire.sent_nbytes
        if self.momenta is None:
            return exchange.rounds(values)
        if not self.momenta.stand_in:
            return exchange.exactly(values)
        self.momenta.mark(bucket)
        return self.momenta.rounds(bucket, exchange)

    def look(self, bucket: Bucket) -> torch.Tensor | None:
        """What is summed exactly beside a bucket's exact sum, where the rule of momenta wants to know it."""
        return None if self.momenta is None or self.momenta.stand_in else self.momenta.looks.begin(bucket)

    def settle(self, finite: bool) -> None:
        """After all sums of a step. `finite`: loss and sums are, the same on all ranks; else nothing was sent."""
        coded = self.momenta is None or self.momenta.stand_in
        for bucket, exchange in self.exchanges.items():
            if self.how.settings.get("sparse"):  # how many, the values say
                flags = flags_sent_nbytes(len(bucket.parameters), bucket.group.size, bucket.flat.element_size())
                sent = flags + exchange.wire.sent_nbytes - self._counted[bucket]
                bucket.group.channel.correct_nbytes(sent - bucket.sent_nbytes)
            if finite:
                if self.momenta is not None:
                    self.momenta.check(bucket)
                for start, size, used in zip(starts_of(bucket), sizes_of(bucket), self._used(bucket), strict=True):
                    if not used:
                        exchange.undo(start, start + size)
            exchange.settle(finite and coded)  # an exact sum leaves what is kept as it was
        if self.momenta is not None:
            self.momenta.looks.finish(finite=finite)
        for part in self.parts:
            part.settle(finite)

    def rescale(self, factor: float) -> None:
        """The loss scale is `factor` times what it was. Scales are powers of two, so this rounds nothing."""
        for exchange in self.exchanges.values():
            exchange.rescale(factor)
        for part in self.parts:
            part.rescale(factor)

    def _used(self, bucket: Bucket) -> list[bool]:
        """By parameter: whether what came out is used; one that no rank has used keeps no gradient."""
        sends = [self.momenta is None or self.momenta.sends(p) for p in bucket.parameters]
        return [flag > 0 and sent for flag, sent in zip(bucket.flags.tolist(), sends, strict=True)]

    def _sent_nbytes(self, bucket: Bucket) -> int:
        """Of the next sum, by the formula."""
        exchange = self.exchanges[bucket]
        if self.momenta is None:
            how = self.how.at(max(state.count for state in exchange.states.values()))
        else:
            how = self.how if self.momenta.stand_in else None
        if how is not None and exchange.density is not None:
            how = replace(how, density=exchange.density)
        shapes, itemsize = [memory_shape(p) for p in bucket.parameters], bucket.flat.element_size()
        if isinstance(exchange, BetweenHosts):
            flags = flags_sent_nbytes(len(shapes), bucket.group.size, itemsize)
            return flags + exchange.sent_nbytes(how, shapes, itemsize)
        return bucket_sent_nbytes(how, shapes, bucket.group.size, itemsize)

    def _exchange(self, bucket: Bucket, shapes: Sequence[Sequence[int]]) -> Exchange:
        summing = bucket.group.summing
        assert isinstance(summing, CompressedSum)
        low, high = key_of(self.seed, self._places[bucket.parameters[0]])
        seed, hierarchy = low | high << 32, summing.hierarchy
        make = partial(make_exchange, self.how.code, dtype=bucket.flat.dtype, device=bucket.flat.device)
        if hierarchy is None:
            return make(shapes, group=summing.group, seed=seed)

        def of_part(numel: int, part: int) -> Exchange:
            mine = shapes if parts == 1 else [(numel,)]
            return make(mine, group=hierarchy.inter_host_group, seed=rank_seed(seed, part))

        parts = 1 if self.how.method == "powersgd" else hierarchy.parts  # matrices stay whole
        numel = sum(sizes_of(bucket))
        return BetweenHosts(hierarchy, summing.room_of, numel, parts, turns_of(self.how.code, hierarchy.hosts), of_part)

    def _spread(self, found: list[Kept], bucket: Bucket, exchange: BetweenHosts) -> None:
        """Give each rank of a group an equal share of what all keep of each tensor. Collective."""
        assert isinstance(bucket.group.summing, CompressedSum)
        for one, p in zip(found, bucket.parameters, strict=True) if self.how.keeps else ():
            for name in ("residual", "momentum") if self.how.method == "dgc" else ("residual",):
                dtype = torch.float64 if p.dtype is torch.float64 else torch.float32
                total = one.get(name, torch.zeros(p.numel(), dtype=dtype, device=p.device))
                dist.all_reduce(total, group=bucket.group.summing.group)
                one[name] = total / exchange.holders


def make_compressor(
    plan: Plan,
    layout: Layout,
    world: World,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    seed: int,
    clip_norm: float | None,
    shards: Shards,
) -> Compressor | None:
    """The compressor of the plan, if it has one and there is something to sum. Collective.

    Raises PlanError, on all ranks alike, for gradients and optimizers that the method does not go with.
    """
    how, mesh = plan.sync.gradient_code, layout.mesh
    if how is None or how.method == FACTORS:
        return None
    momenta = make_momenta(how, layout, world, model, optimizers, clip_norm, shards)
    if mesh.world_size == 1:
        return None
    _check(how, model, optimizers, clip_norm)
    order = {name: place for place, name in enumerate(layout.names)}
    live = {tuple(a for a in mesh.degrees if a in layout.shard_of(name).sums) for name, _ in model.named_parameters()}
    everyone: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(everyone, {axes for axes in live if axes and COMPRESSED.issuperset(axes)})
    groups = {}
    for axes in sorted(set().union(*everyone)):
        group = mesh.new_group(*axes)
        found = None if how.between == "ranks" else make_local_group_or_hierarchy(group)
        if not (isinstance(found, LocalGroup) and how.between == "hosts"):  # on one host nothing is between hosts
            groups[axes] = group, found if isinstance(found, HostHierarchy) else None
    places = {p: order[name] for name, p in model.named_parameters()}
    compressor = Compressor(how, mesh, groups, places, seed, momenta)
    compressor.parts = _parts(how, layout, shards.packs(), compressor.courier, len(groups), seed)
    shards.sum_by({one.pack: one for one in compressor.parts})
    return compressor


def _parts(
    how: Compression, layout: Layout, packs: Sequence[Pack], courier: Courier, first: int, seed: int
) -> list[PartSum]:
    """Sums of which each rank gets its part; the courier's numbers go on from `first`. Collective."""
    mesh, routes = layout.mesh, {}
    for number, others in enumerate(sorted({pack.others for pack in packs}), first):
        routes[others] = Route(
            number=number,
            shard=mesh.new_group("shard"),
            others=mesh.new_group(*others) if mesh.degree(*others) > 1 else None,
            everyone=mesh.new_group("shard", *others),
            exactly=not COMPRESSED.issuperset(others),
            channel=layout.channel("gradients", "shard", *others),
        )
    return [
        PartSum(pack, how, routes[pack.others], courier, rank_seed(seed, number)) for number, pack in enumerate(packs)
    ]


def _check(how: Compression, model: nn.Module, optimizers: Iterable[Optimizer], clip_norm: float | None) -> None:
    words = f"sync.compress = {compression_in_words(how)!r}"
    if clip_norm is not None and how.method == "dgc":
        raise PlanError(
            f"{words} with clip_norm = {clip_norm}: what comes out is a few values of a velocity that has gathered for "
            "steps, and no gradient; a rank's gradient would have to be clipped before it is gathered, and its norm is "
            "not known when the first bucket leaves; leave clip_norm out, or use top-k, or a loop of your own with "
            "tutti.compression.dgc.clip_locally"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise PlanError(
                f"{words}: the gradient of {name or 'the model'} is sparse, a few rows that are sent as they are; make "
                "the embedding with sparse=False, or leave compress out"
            )
    for optimizer in optimizers if how.method == "dgc" else ():
        for group in optimizer.param_groups:
            if group.get("momentum") or "betas" in group:
                raise PlanError(
                    f"{words} has the momentum in itself, and {type(optimizer).__name__} has one of its own; use SGD "
                    "with momentum=0, or top-k"
                )


def compressed_words(plan: Plan, axes: Iterable[AxisName]) -> str:
    """How sums over `axes`, which have several ranks each, are written; empty where they are exact."""
    how = plan.sync.gradient_code
    return f" as {compression_in_words(how)}" if how is not None and COMPRESSED.issuperset(axes) else ""


def values_of(bucket: Bucket) -> torch.Tensor:
    """The gradients of a bucket, flat, without the flags."""
    return bucket.flat[: bucket.flat.numel() - len(bucket.parameters)]


def sizes_of(bucket: Bucket) -> list[int]:
    return [p.numel() for p in bucket.parameters]


def starts_of(bucket: Bucket) -> list[int]:
    starts, at = [], 0
    for size in sizes_of(bucket):
        starts.append(at)
        at += size
    return starts


def memory_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape in the order in which the elements lie in memory: a matrix that is transposed is none of its rows."""
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return tuple(parameter.shape)
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: (-strides[dim], dim))
    return tuple(parameter.shape[dim] for dim in order)
