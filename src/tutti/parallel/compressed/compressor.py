"""A rank's compressor: one reducer for each bucket, and residuals that follow the parameters.

Sums are compressed over ranks that saw other samples, or other parts of them. Residuals are in the units of those sums:
totals of losses over the samples of the global batch, before they become a mean over tokens, times the loss scale of
float16. When the loss scale changes, residuals change with it.

Between hosts, sums are exact inside each host, through the memory that its ranks share. Each rank then encodes a part
of the host's sum for the same part on the other hosts, and reads the other parts from memory. So H codes are added
instead of p, the loss is that of H codes, and a host sends what one rank of H sends. The residual of each part is kept
by the rank that writes it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.comm.hierarchical import all_gather_slices, inter_host_slice
from tutti.comm.local_group import LocalGroup
from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.rendezvous import HostHierarchy, make_local_group_or_hierarchy
from tutti.comm.shared_memory import SharedMemoryAllReduce
from tutti.comm.traffic import CommHandle
from tutti.comm.world import World
from tutti.compression.codec_state import CodecState, rank_seed, stream_key
from tutti.compression.codecs import make_codec, make_reducer, round_count
from tutti.compression.reducer import (
    CountedCollectives,
    GradientReducer,
    Rounds,
    SharedSpan,
    Span,
    TensorStates,
    load_states_by_tensor,
    states_by_tensor,
)
from tutti.config.compression import (
    Compression,
    all_reduce_sent_nbytes,
    bucket_sent_nbytes,
    flags_sent_nbytes,
    format_compression,
)
from tutti.config.plan import Plan
from tutti.config.vocabulary import DATA_AXES, AxisName
from tutti.errors import PlanError
from tutti.parallel.compressed.comm_thread import ReductionThread
from tutti.parallel.compressed.momentum_compression import (
    MomentumCompression,
    ZeroOneCompression,
    make_momentum_compression,
)
from tutti.parallel.compressed.sharded_reduction import ReductionGroups, ShardedReduction
from tutti.parallel.data.buckets import Bucket, BucketReducer
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.sharding.sharded_gradients import Shards
from tutti.parallel.sharding.sharded_unit import Pack

COMPRESSED_AXES: frozenset[AxisName] = frozenset((*DATA_AXES, "context", "space"))
"""Axes over which sums are compressed: their ranks saw other samples, or parts of them. Other sums are exact."""


Axes = tuple[AxisName, ...]


Make = Callable[[int, int], GradientReducer]
"""(values, part) -> the reducer of a part between hosts."""


class BetweenHostsReducer(GradientReducer):
    """Exact sums inside each host, compressed sums between hosts.

    Args:
        tiers: communicators inside and between hosts. buffer_number: number of the shared buffer that a tensor lies in.
        numel: size of the bucket. parts: into how many parts a bucket is cut, at most `tiers.parts`. turns: rounds of
        the reducer between hosts. A rank without a part takes as many, because reducers in flight take turns
            alike on all ranks.
        make: makes the reducer of this rank's part over `tiers.across`.
    """

    def __init__(
        self,
        hierarchy: HostHierarchy,
        buffer_number: Callable[[Tensor], int],
        numel: int,
        parts: int,
        turns: int,
        make: Make,
    ) -> None:
        self._hierarchy, self._buffer_number, self.numel, self._parts, self._turns = (
            hierarchy,
            buffer_number,
            numel,
            parts,
            turns,
        )
        own = (
            inter_host_slice(torch.arange(numel), parts, hierarchy.local_group.rank)
            if hierarchy.local_group.rank < parts
            else torch.arange(0)
        )
        self._begin = int(own[0]) if own.numel() else 0
        self.inner = make(own.numel(), hierarchy.local_group.rank) if hierarchy.local_group.rank < parts else None
        nothing = CodecState.zeros((), 0, dtype=torch.float32)
        if self.inner is None:
            super().__init__(CountedCollectives(lone=True), {"worker": nothing})
        else:
            super().__init__(self.inner.collectives, self.inner.states, self.inner.shared)

    @property
    def contributors(self) -> int:
        return self._hierarchy.hosts

    @property
    def density(self) -> float | None:
        return None if self.inner is None else self.inner.density

    def sent_nbytes(self, compression: Compression | None, shapes: Sequence[Sequence[int]], itemsize: int) -> int:
        """Bytes this rank sends to other hosts in a step, for a bucket of tensors of `shapes`."""
        if self.inner is None:
            return 0
        mine = shapes if self._parts == 1 else [(self.inner.numel,)]
        return all_reduce_sent_nbytes(compression, mine, self._hierarchy.hosts, itemsize)

    @property
    def spans(self) -> dict[str, list[Span]]:
        if self.inner is None:
            return {"worker": []}
        shift = self._begin
        return {who: [(a + shift, b + shift) for a, b in some] for who, some in self.inner.spans.items()}

    @property
    def shared_spans(self) -> dict[str, list[SharedSpan]]:
        return {} if self.inner is None else self.inner.shared_spans

    def rounds(self, flat: Tensor) -> Rounds:
        yield from self._in_turn(flat, _idle(self._turns) if self.inner is None else self.inner.rounds)

    def exact_rounds(self, flat: Tensor) -> Rounds:
        yield from self._in_turn(flat, _idle(1) if self.inner is None else self.inner.exact_rounds)

    def finish_step(self, finite: bool) -> None:
        if self.inner is None:
            super().finish_step(finite)
        else:
            self.inner.finish_step(finite)

    def revert(self, start: int, stop: int) -> None:
        if self.inner is not None:
            self.inner.revert(start - self._begin, stop - self._begin)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if self.inner is None:
            super().load(tensors)
        else:
            self.inner.load(tensors)

    def _in_turn(self, flat: Tensor, between: Callable[[Tensor], Rounds]) -> Rounds:
        """Reduce inside the host, between hosts, and inside again."""
        if not flat.numel():
            return
        local_group, buffer = self._hierarchy.local_group, self._buffer_number(flat)
        yield [SharedMemoryAllReduce(local_group, buffer, flat.numel(), flat.dtype)]
        yield from between(
            inter_host_slice(flat, self._parts, local_group.rank) if self.inner is not None else flat[:0]
        )
        all_gather_slices(local_group, buffer, flat, self._parts)


def _idle(turns: int) -> Callable[[Tensor], Rounds]:
    """A reducer's rounds that do nothing."""

    def rounds(_: Tensor) -> Rounds:
        for _turn in range(turns):
            yield []

    return rounds


class CompressedBucketReducer(BucketReducer):
    """Reduces the buckets of one group by the compressor's reducers; flags of gradients are sent as they are."""

    def __init__(self, compressor: "Compressor", number: int, group: Any, hierarchy: HostHierarchy | None) -> None:
        self._compressor, self.number, self.group, self.hierarchy = compressor, number, group, hierarchy
        self._buffer_numbers: dict[int, int] = {}
        if hierarchy is not None:
            self.transport = "shared memory inside hosts, process group between them"

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that the other ranks of this host can reach, where they reduce in it."""
        if self.hierarchy is None:
            return super().allocate(numel, dtype, device)
        number, segment = self.hierarchy.local_group.new_segment(numel * dtype.itemsize)
        flat = segment.tensor(dtype, numel)
        self._buffer_numbers[flat.data_ptr()] = number
        return flat

    def buffer_number(self, flat: torch.Tensor) -> int:
        """Number of the shared buffer that begins with this tensor."""
        return self._buffer_numbers[flat.data_ptr()]

    def start(self, bucket: Bucket) -> CommHandle:
        rounds = self._compressor.rounds(bucket)
        works = [dist.all_reduce(bucket.flags, group=bucket.group.handle, async_op=True)]
        look, sent = self._compressor.look(bucket), bucket.sent_nbytes
        if look is not None:
            works.append(dist.all_reduce(look, group=bucket.group.handle, async_op=True))
            sent += ring_all_reduce_nbytes(look, bucket.group.size)
        works.append(self._compressor.comm_thread.start(self.number, rounds))
        return bucket.group.channel.start(works, sent)


class Compressor:
    """The compressed reductions of a rank.

    Args:
        compression: the plan's. mesh: the run's. groups: by the mesh's axes, a process group that nothing else uses,
        and its tiers where sums inside a host are exact. positions: of each parameter among the model's, which seeds
        its bucket's random numbers. seed: of the codec's random numbers. momentum_compression: what is summed in place
        of gradients.

    Attributes:
        exchanges: the reducers of the present buckets.
    """

    def __init__(
        self,
        compression: Compression,
        mesh: Mesh,
        groups: dict[Axes, tuple[Any, HostHierarchy | None]],
        positions: dict[nn.Parameter, int],
        seed: int,
        momentum_compression: MomentumCompression | ZeroOneCompression | None = None,
    ) -> None:
        self.momentum_compression = momentum_compression
        self.compression, self.seed, self._axes = compression, seed, tuple(mesh.degrees)
        self.comm_thread = ReductionThread()
        self.exchanges: dict[Bucket, GradientReducer] = {}
        self.parts: list[ShardedReduction] = []
        self._positions = positions
        self._counted: dict[Bucket, int] = {}
        self._sums = {
            axes: CompressedBucketReducer(self, number, *one) for number, (axes, one) in enumerate(groups.items())
        }

    def bucket_reducer(self, axes: Iterable[AxisName]) -> BucketReducer | None:
        """The reducer of gradients over `axes`; None: exact sums, as without compression."""
        return self._sums.get(tuple(axis for axis in self._axes if axis in axes))

    def rebuild(self, buckets: Iterable[Bucket]) -> None:
        """Use these buckets from now on. Residuals of their parameters are kept, those of others dropped."""
        before = {tuple(bucket.parameters): exchange for bucket, exchange in self.exchanges.items()}
        mine = [bucket for bucket in buckets if isinstance(bucket.group.bucket_reducer, CompressedBucketReducer)]
        new = [bucket for bucket in mine if tuple(bucket.parameters) not in before]
        kept: dict[nn.Parameter, tuple[TensorStates, int]] = {}
        for bucket, exchange in self.exchanges.items() if new else ():
            count = max(state.count for state in exchange.states.values())
            found = states_by_tensor(exchange, sizes_of(bucket))
            if isinstance(exchange, BetweenHostsReducer):  # another rank may write it from now on
                self._spread(found, bucket, exchange)
            kept.update({p: (one, count) for p, one in zip(bucket.parameters, found, strict=True)})
        self.exchanges, self._counted = {}, {}
        for bucket in mine:
            shapes = [memory_shape(p) for p in bucket.parameters]
            self.exchanges[bucket] = before.get(tuple(bucket.parameters)) or self._exchange(bucket, shapes)
        for bucket in new:
            known = [kept.get(p, ({}, 0)) for p in bucket.parameters]
            count = max(count for _, count in known)
            load_states_by_tensor(self.exchanges[bucket], sizes_of(bucket), [one for one, _ in known], count)
        for bucket in mine:
            bucket.sent_nbytes = self._sent_nbytes(bucket)

    def rounds(self, bucket: Bucket) -> Rounds:
        """The rounds of the bucket's next sum. Sets the bucket's number of sent bytes."""
        exchange, values = self.exchanges[bucket], values_of(bucket)
        bucket.sent_nbytes = self._sent_nbytes(bucket)
        self._counted[bucket] = exchange.collectives.sent_nbytes
        if self.momentum_compression is None:
            return exchange.rounds(values)
        if not self.momentum_compression.compresses_next:
            return exchange.exact_rounds(values)
        self.momentum_compression.mark(bucket)
        return self.momentum_compression.rounds(bucket, exchange)

    def look(self, bucket: Bucket) -> torch.Tensor | None:
        """Statistics to be summed exactly beside a bucket's exact sum, if the momentum rule wants them."""
        return (
            None
            if self.momentum_compression is None or self.momentum_compression.compresses_next
            else self.momentum_compression.gradient_statistics.begin(bucket)
        )

    def finish_step(self, finite: bool) -> None:
        """End a step after all its sums.

        Args:
            finite: whether loss and sums are finite, the same on all ranks; if not, nothing counts as sent.
        """
        coded = self.momentum_compression is None or self.momentum_compression.compresses_next
        for bucket, exchange in self.exchanges.items():
            if self.compression.settings.get("sparse"):  # how many, the values say
                flags = flags_sent_nbytes(len(bucket.parameters), bucket.group.size, bucket.flat.element_size())
                sent = flags + exchange.collectives.sent_nbytes - self._counted[bucket]
                bucket.group.channel.correct_nbytes(sent - bucket.sent_nbytes)
            if finite:
                if self.momentum_compression is not None:
                    self.momentum_compression.check(bucket)
                for start, size, used in zip(starts_of(bucket), sizes_of(bucket), self._used(bucket), strict=True):
                    if not used:
                        exchange.revert(start, start + size)
            exchange.finish_step(finite and coded)  # an exact sum leaves what is kept as it was
        if self.momentum_compression is not None:
            self.momentum_compression.gradient_statistics.finish(finite=finite)
        for part in self.parts:
            part.finish_step(finite)

    def rescale(self, factor: float) -> None:
        """The loss scale is `factor` times what it was. Scales are powers of two, so this rounds nothing."""
        for exchange in self.exchanges.values():
            exchange.rescale(factor)
        for part in self.parts:
            part.rescale(factor)

    def _used(self, bucket: Bucket) -> list[bool]:
        """By parameter: whether the sum is used; a parameter that no rank has used keeps no gradient."""
        sends = [self.momentum_compression is None or self.momentum_compression.sends(p) for p in bucket.parameters]
        return [flag > 0 and sent for flag, sent in zip(bucket.flags.tolist(), sends, strict=True)]

    def _sent_nbytes(self, bucket: Bucket) -> int:
        """Bytes of the next sum, by the formula."""
        exchange = self.exchanges[bucket]
        if self.momentum_compression is None:
            compression = self.compression.at(max(state.count for state in exchange.states.values()))
        else:
            compression = self.compression if self.momentum_compression.compresses_next else None
        if compression is not None and exchange.density is not None:
            compression = replace(compression, density=exchange.density)
        shapes, itemsize = [memory_shape(p) for p in bucket.parameters], bucket.flat.element_size()
        if isinstance(exchange, BetweenHostsReducer):
            flags = flags_sent_nbytes(len(shapes), bucket.group.size, itemsize)
            return flags + exchange.sent_nbytes(compression, shapes, itemsize)
        return bucket_sent_nbytes(compression, shapes, bucket.group.size, itemsize)

    def _exchange(self, bucket: Bucket, shapes: Sequence[Sequence[int]]) -> GradientReducer:
        bucket_reducer = bucket.group.bucket_reducer
        assert isinstance(bucket_reducer, CompressedBucketReducer)
        low, high = stream_key(self.seed, self._positions[bucket.parameters[0]])
        seed, hierarchy = low | high << 32, bucket_reducer.hierarchy
        make = partial(make_reducer, self.compression.code, dtype=bucket.flat.dtype, device=bucket.flat.device)
        if hierarchy is None:
            return make(shapes, group=bucket_reducer.group, seed=seed)

        def of_part(numel: int, part: int) -> GradientReducer:
            mine = shapes if parts == 1 else [(numel,)]
            return make(mine, group=hierarchy.inter_host_group, seed=rank_seed(seed, part))

        parts = 1 if self.compression.entry.whole_tensors else hierarchy.parts
        numel = sum(sizes_of(bucket))
        return BetweenHostsReducer(
            hierarchy,
            bucket_reducer.buffer_number,
            numel,
            parts,
            round_count(self.compression.code, hierarchy.hosts),
            of_part,
        )

    def _spread(self, found: list[TensorStates], bucket: Bucket, exchange: BetweenHostsReducer) -> None:
        """Give each rank of a group an equal share of what all ranks keep of each tensor. Collective."""
        assert isinstance(bucket.group.bucket_reducer, CompressedBucketReducer)
        for one, p in zip(found, bucket.parameters, strict=True) if self.compression.keeps else ():
            for name in (
                make_codec(self.compression.code).state_names
                if self.compression.code.entry.make_codec
                else ("residual",)
            ):
                dtype = torch.float64 if p.dtype is torch.float64 else torch.float32
                total = one.get(name, torch.zeros(p.numel(), dtype=dtype, device=p.device))
                dist.all_reduce(total, group=bucket.group.bucket_reducer.group)
                one[name] = total / exchange.contributors


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
    """The plan's compressor; None if it has none or there is nothing to sum. Collective.

    Raises:
        PlanError: on all ranks alike, for gradients and optimizers that the codec does not go with.
    """
    compression, mesh = plan.sync.gradient_code, layout.mesh
    if compression is None or compression.entry.exact:
        return None
    momentum_compression = make_momentum_compression(compression, layout, world, model, optimizers, clip_norm, shards)
    if mesh.world_size == 1:
        return None
    _check(compression, model, optimizers, clip_norm)
    order = {name: place for place, name in enumerate(layout.names)}
    live = {tuple(a for a in mesh.degrees if a in layout.shard_of(name).sums) for name, _ in model.named_parameters()}
    everyone: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(everyone, {axes for axes in live if axes and COMPRESSED_AXES.issuperset(axes)})
    groups = {}
    for axes in sorted(set().union(*everyone)):
        group = mesh.new_group(*axes)
        found = None if compression.between == "ranks" else make_local_group_or_hierarchy(group)
        if not (
            isinstance(found, LocalGroup) and compression.between == "hosts"
        ):  # on one host nothing is between hosts
            groups[axes] = group, found if isinstance(found, HostHierarchy) else None
    positions = {p: order[name] for name, p in model.named_parameters()}
    compressor = Compressor(compression, mesh, groups, positions, seed, momentum_compression)
    compressor.parts = _parts(compression, layout, shards.packs(), compressor.comm_thread, len(groups), seed)
    shards.sum_by({one.pack: one for one in compressor.parts})
    return compressor


def _parts(
    compression: Compression, layout: Layout, packs: Sequence[Pack], comm_thread: ReductionThread, first: int, seed: int
) -> list[ShardedReduction]:
    """The reduce-scatters of packs of parameters; group numbers of the communication thread go on from `first`.
    Collective."""
    mesh, routes = layout.mesh, {}
    for number, others in enumerate(sorted({pack.others for pack in packs}), first):
        routes[others] = ReductionGroups(
            number=number,
            shard=mesh.new_group("shard"),
            others=mesh.new_group(*others) if mesh.degree(*others) > 1 else None,
            everyone=mesh.new_group("shard", *others),
            exactly=not COMPRESSED_AXES.issuperset(others),
            channel=layout.channel("gradients", "shard", *others),
        )
    return [
        ShardedReduction(pack, compression, routes[pack.others], comm_thread, rank_seed(seed, number))
        for number, pack in enumerate(packs)
    ]


def _check(
    compression: Compression, model: nn.Module, optimizers: Iterable[Optimizer], clip_norm: float | None
) -> None:
    words = f"sync.compress = {format_compression(compression)!r}"
    if clip_norm is not None and compression.entry.own_momentum:
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
    for optimizer in optimizers if compression.entry.own_momentum else ():
        for group in optimizer.param_groups:
            if group.get("momentum") or "betas" in group:
                raise PlanError(
                    f"{words} has the momentum in itself, and {type(optimizer).__name__} has one of its own; use SGD "
                    "with momentum=0, or top-k"
                )


def compressed_words(plan: Plan, axes: Iterable[AxisName]) -> str:
    """How sums over `axes`, which have several ranks each, are written; empty where they are exact."""
    compression = plan.sync.gradient_code
    return (
        f" as {format_compression(compression)}" if compression is not None and COMPRESSED_AXES.issuperset(axes) else ""
    )


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
    """The shape in the order in which the elements lie in memory, so that a transposed matrix has its stored rows."""
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return tuple(parameter.shape)
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: (-strides[dim], dim))
    return tuple(parameter.shape[dim] for dim in order)
