"""A rank's compressor: one reducer per bucket, and residuals that follow the parameters.

Gradients are compressed only over ranks that saw different samples, or different parts of the same samples. Residuals
have the unit of the reduced gradients: gradients of the loss summed over the global batch, before the mean over tokens
is taken, times the loss scale of float16. When the loss scale changes, the residuals are rescaled with it.

Where gradients are compressed between hosts, they are summed exactly inside each host, through the memory that its
ranks share. Each rank then encodes one slice of the host's sum, exchanges it with the ranks of the other hosts that own
the same slice, and reads the remaining slices from memory. With H hosts and p ranks, H messages are added instead of p,
the error is that of H messages, and a host sends as much as one rank of a group of H would. The residual of each slice
is kept by the rank that encodes it.
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
from tutti.comm.object_collectives import gather_values
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
"""Axes over which gradients are compressed: their ranks saw different samples, or parts of them. Reductions over other
axes are exact.
"""


Axes = tuple[AxisName, ...]


Make = Callable[[int, int], GradientReducer]
"""(values, part) -> the reducer that reduces slice `part`, of that many values, between hosts."""


class BetweenHostsReducer(GradientReducer):
    """Sums gradients exactly inside each host and compressed between hosts.

    Args:
        hierarchy: communicators inside and between hosts.
        buffer_number: returns the number of the shared buffer in which a tensor lies.
        numel: size of the bucket in values.
        parts: number of slices into which the bucket is cut, at most `hierarchy.parts`.
        turns: rounds of the reducer between hosts. A rank without a slice takes the same number of rounds, because all
            ranks interleave their reducers in the same order.
        make: makes the reducer of this rank's slice between hosts.
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
        local_slice = (
            inter_host_slice(torch.arange(numel), parts, hierarchy.local_group.rank)
            if hierarchy.local_group.rank < parts
            else torch.arange(0)
        )
        self._begin = int(local_slice[0]) if local_slice.numel() else 0
        self.inner = (
            make(local_slice.numel(), hierarchy.local_group.rank) if hierarchy.local_group.rank < parts else None
        )
        empty = CodecState.zeros((), 0, dtype=torch.float32)
        if self.inner is None:
            super().__init__(CountedCollectives(lone=True), {"worker": empty})
        else:
            super().__init__(self.inner.collectives, self.inner.states, self.inner.shared)

    @property
    def contributors(self) -> int:
        return self._hierarchy.hosts

    @property
    def density(self) -> float | None:
        return None if self.inner is None else self.inner.density

    def sent_nbytes(self, compression: Compression | None, shapes: Sequence[Sequence[int]], itemsize: int) -> int:
        """Return the bytes that this rank sends to other hosts in a step.

        Args:
            compression: how the messages are compressed; None for an exact reduction.
            shapes: shapes of the bucket's tensors.
            itemsize: bytes per value of an exact reduction.
        """
        if self.inner is None:
            return 0
        slice_shapes = shapes if self._parts == 1 else [(self.inner.numel,)]
        return all_reduce_sent_nbytes(compression, slice_shapes, self._hierarchy.hosts, itemsize)

    @property
    def spans(self) -> dict[str, list[Span]]:
        if self.inner is None:
            return {"worker": []}
        shift = self._begin
        return {
            name: [(a + shift, b + shift) for a, b in state_spans] for name, state_spans in self.inner.spans.items()
        }

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
        """Reduce inside the host, then this rank's slice between hosts, and gather the slices inside the host."""
        if not flat.numel():
            return
        local_group, buffer = self._hierarchy.local_group, self._buffer_number(flat)
        yield [SharedMemoryAllReduce(local_group, buffer, flat.numel(), flat.dtype)]
        yield from between(
            inter_host_slice(flat, self._parts, local_group.rank) if self.inner is not None else flat[:0]
        )
        all_gather_slices(local_group, buffer, flat, self._parts)


def _idle(turns: int) -> Callable[[Tensor], Rounds]:
    """Return a reducer's `rounds` that does nothing for this number of rounds."""

    def rounds(_: Tensor) -> Rounds:
        for _turn in range(turns):
            yield []

    return rounds


class CompressedBucketReducer(BucketReducer):
    """Reduces the buckets of one group with the compressor's reducers. The buckets' flags are reduced exactly."""

    def __init__(self, compressor: "Compressor", number: int, group: Any, hierarchy: HostHierarchy | None) -> None:
        self._compressor, self.number, self.group, self.hierarchy = compressor, number, group, hierarchy
        self._buffer_numbers: dict[int, int] = {}
        if hierarchy is not None:
            self.transport = "shared memory inside hosts, process group between them"

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a bucket. Where ranks reduce inside their host, the memory is shared with them."""
        if self.hierarchy is None:
            return super().allocate(numel, dtype, device)
        number, segment = self.hierarchy.local_group.new_segment(numel * dtype.itemsize)
        flat = segment.tensor(dtype, numel)
        self._buffer_numbers[flat.data_ptr()] = number
        return flat

    def buffer_number(self, flat: torch.Tensor) -> int:
        """Return the number of the shared buffer that begins with this tensor."""
        return self._buffer_numbers[flat.data_ptr()]

    def start(self, bucket: Bucket) -> CommHandle:
        rounds = self._compressor.rounds(bucket)
        works = [dist.all_reduce(bucket.flags, group=bucket.group.handle, async_op=True)]
        statistics, sent = self._compressor.look(bucket), bucket.sent_nbytes
        if statistics is not None:
            works.append(dist.all_reduce(statistics, group=bucket.group.handle, async_op=True))
            sent += ring_all_reduce_nbytes(statistics, bucket.group.size)
        works.append(self._compressor.comm_thread.start(self.number, rounds))
        return bucket.group.channel.start(works, sent)


class Compressor:
    """All compressed gradient reductions of one rank.

    Args:
        compression: the plan's compression.
        mesh: the run's mesh.
        groups: by axes of the mesh, a process group that nothing else uses, and its hierarchy of hosts where gradients
            are summed exactly inside a host.
        positions: position of each parameter among the model's parameters; it seeds its bucket's random numbers.
        seed: seed of the codec's random numbers.
        momentum_compression: sends momentum in place of gradients; None sends gradients.

    Attributes:
        exchanges: the reducer of each present bucket.
        parts: the compressed reduce-scatters of sharded parameters.
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
            axes: CompressedBucketReducer(self, number, *pair) for number, (axes, pair) in enumerate(groups.items())
        }

    def bucket_reducer(self, axes: Iterable[AxisName]) -> BucketReducer | None:
        """Return the reducer of gradients over `axes`; None where they are reduced exactly, as without compression."""
        return self._sums.get(tuple(axis for axis in self._axes if axis in axes))

    def rebuild(self, buckets: Iterable[Bucket]) -> None:
        """Replace the buckets: residuals of parameters that are still present are kept, all others are dropped."""
        before = {tuple(bucket.parameters): exchange for bucket, exchange in self.exchanges.items()}
        compressed = [bucket for bucket in buckets if isinstance(bucket.group.bucket_reducer, CompressedBucketReducer)]
        new = [bucket for bucket in compressed if tuple(bucket.parameters) not in before]
        kept: dict[nn.Parameter, tuple[TensorStates, int]] = {}
        for bucket, exchange in self.exchanges.items() if new else ():
            count = max(state.count for state in exchange.states.values())
            states = states_by_tensor(exchange, sizes_of(bucket))
            if isinstance(exchange, BetweenHostsReducer):  # another rank may own the slice from now on
                self._spread(states, bucket, exchange)
            kept.update({p: (entry, count) for p, entry in zip(bucket.parameters, states, strict=True)})
        self.exchanges, self._counted = {}, {}
        for bucket in compressed:
            shapes = [memory_shape(p) for p in bucket.parameters]
            self.exchanges[bucket] = before.get(tuple(bucket.parameters)) or self._exchange(bucket, shapes)
        for bucket in new:
            states_before = [kept.get(p, ({}, 0)) for p in bucket.parameters]
            count = max(count for _, count in states_before)
            load_states_by_tensor(
                self.exchanges[bucket], sizes_of(bucket), [entry for entry, _ in states_before], count
            )
        for bucket in compressed:
            bucket.sent_nbytes = self._sent_nbytes(bucket)

    def rounds(self, bucket: Bucket) -> Rounds:
        """Return the rounds of the bucket's next reduction, and set `bucket.sent_nbytes`."""
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
        """Return statistics to all-reduce exactly beside the bucket; None where the momentum rule asks for none."""
        return (
            None
            if self.momentum_compression is None or self.momentum_compression.compresses_next
            else self.momentum_compression.gradient_statistics.begin(bucket)
        )

    def finish_step(self, finite: bool) -> None:
        """End a step after all its reductions.

        Args:
            finite: whether the loss and all reduced gradients are finite, the same on all ranks. Otherwise nothing
                counts as sent and residuals stay as they were before the step.
        """
        coded = self.momentum_compression is None or self.momentum_compression.compresses_next
        for bucket, exchange in self.exchanges.items():
            if self.compression.settings.get("sparse"):  # the number of bytes depends on the values
                flags = flags_sent_nbytes(len(bucket.parameters), bucket.group.size, bucket.flat.element_size())
                sent = flags + exchange.collectives.sent_nbytes - self._counted[bucket]
                bucket.group.channel.correct_nbytes(sent - bucket.sent_nbytes)
            if finite:
                if self.momentum_compression is not None:
                    self.momentum_compression.check(bucket)
                for start, size, used in zip(starts_of(bucket), sizes_of(bucket), self._used(bucket), strict=True):
                    if not used:
                        exchange.revert(start, start + size)
            exchange.finish_step(finite and coded)  # an exact reduction leaves the residuals as they were
        if self.momentum_compression is not None:
            self.momentum_compression.gradient_statistics.finish(finite=finite)
        for part in self.parts:
            part.finish_step(finite)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by `factor`, by which the loss scale changes.

        The factor is a power of two, so nothing is rounded.
        """
        for exchange in self.exchanges.values():
            exchange.rescale(factor)
        for part in self.parts:
            part.rescale(factor)

    def _used(self, bucket: Bucket) -> list[bool]:
        """Return for each parameter whether its sum is used. A parameter without a gradient on any rank gets none."""
        sends = [self.momentum_compression is None or self.momentum_compression.sends(p) for p in bucket.parameters]
        return [flag > 0 and sent for flag, sent in zip(bucket.flags.tolist(), sends, strict=True)]

    def _sent_nbytes(self, bucket: Bucket) -> int:
        """Return the bytes of the bucket's next reduction, from the codec's size formula."""
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
            slice_shapes = shapes if parts == 1 else [(numel,)]
            return make(slice_shapes, group=hierarchy.inter_host_group, seed=rank_seed(seed, part))

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
        """Give each rank an equal share of the residuals that the whole group keeps of each tensor. Collective."""
        assert isinstance(bucket.group.bucket_reducer, CompressedBucketReducer)
        for states, p in zip(found, bucket.parameters, strict=True) if self.compression.keeps else ():
            for name in (
                make_codec(self.compression.code).state_names
                if self.compression.code.entry.make_codec
                else ("residual",)
            ):
                dtype = torch.float64 if p.dtype is torch.float64 else torch.float32
                total = states.get(name, torch.zeros(p.numel(), dtype=dtype, device=p.device))
                dist.all_reduce(total, group=bucket.group.bucket_reducer.group)
                states[name] = total / exchange.contributors


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
    """Make the plan's compressor. Collective.

    Args:
        plan: the plan; its `sync` names the compression.
        layout: the placement of every parameter.
        world: all ranks of the run.
        model: the model whose gradients are reduced.
        optimizers: the optimizers that get the reduced gradients.
        seed: seed of the codec's random numbers.
        clip_norm: largest norm of the gradient; None where it is not clipped.
        shards: the sharded parameters, whose packs the compressor then reduces too.

    Returns:
        The compressor; None where the plan compresses nothing or there is one rank.

    Raises:
        PlanError: on all ranks alike, if the codec does not support the model, an optimizer or clipping.
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
    everyone = gather_values({axes for axes in live if axes and COMPRESSED_AXES.issuperset(axes)})
    groups = {}
    for axes in sorted(set().union(*everyone)):
        group = mesh.new_group(*axes)
        hierarchy = None if compression.between == "ranks" else make_local_group_or_hierarchy(group)
        if not (
            isinstance(hierarchy, LocalGroup) and compression.between == "hosts"
        ):  # on a single host, "hosts" leaves nothing to compress
            groups[axes] = group, hierarchy if isinstance(hierarchy, HostHierarchy) else None
    positions = {p: order[name] for name, p in model.named_parameters()}
    compressor = Compressor(compression, mesh, groups, positions, seed, momentum_compression)
    compressor.parts = _parts(compression, layout, shards.packs(), compressor.comm_thread, len(groups), seed)
    shards.sum_by({reduction.pack: reduction for reduction in compressor.parts})
    return compressor


def _parts(
    compression: Compression, layout: Layout, packs: Sequence[Pack], comm_thread: ReductionThread, first: int, seed: int
) -> list[ShardedReduction]:
    """Make the reduce-scatters of all packs of parameters. Collective.

    Their groups are numbered from `first` in the communication thread.
    """
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
            f"{words} with clip_norm = {clip_norm}: it sends a few values of a velocity accumulated over many steps, "
            "and a rank would have to clip its gradient before accumulating it, when the norm is not known yet; leave "
            "clip_norm out, or use top-k, or call tutti.compression.dgc.clip_locally in a loop of your own"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise PlanError(
                f"{words}: the gradient of {name or 'the model'} is sparse, and sparse gradients cannot be compressed; "
                "make the embedding with sparse=False, or leave compress out"
            )
    for optimizer in optimizers if compression.entry.own_momentum else ():
        for group in optimizer.param_groups:
            if group.get("momentum") or "betas" in group:
                raise PlanError(
                    f"{words} applies momentum itself, and {type(optimizer).__name__} would apply it a second time; "
                    "use SGD with momentum=0, or top-k"
                )


def compressed_words(plan: Plan, axes: Iterable[AxisName]) -> str:
    """Describe how reductions over `axes`, each of several ranks, are compressed; empty where they are exact."""
    compression = plan.sync.gradient_code
    return (
        f" as {format_compression(compression)}" if compression is not None and COMPRESSED_AXES.issuperset(axes) else ""
    )


def values_of(bucket: Bucket) -> torch.Tensor:
    """Return the bucket's gradients, flat, without its flags."""
    return bucket.flat[: bucket.flat.numel() - len(bucket.parameters)]


def sizes_of(bucket: Bucket) -> list[int]:
    """Return the number of values of each gradient in the bucket."""
    return [p.numel() for p in bucket.parameters]


def starts_of(bucket: Bucket) -> list[int]:
    """Return the start of each gradient in the flat bucket."""
    starts, at = [], 0
    for size in sizes_of(bucket):
        starts.append(at)
        at += size
    return starts


def memory_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the parameter's shape with dims in memory order, so that a transposed matrix has its stored rows."""
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return tuple(parameter.shape)
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: (-strides[dim], dim))
    return tuple(parameter.shape[dim] for dim in order)
