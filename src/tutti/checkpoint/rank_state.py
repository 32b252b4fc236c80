"""Checkpoint state that belongs to one rank: residuals of compression, and replicas that have diverged.

Every rank writes its own. The same number of ranks under the same plan resumes it bit for bit. Otherwise, the residuals
of all ranks are added up for each parameter and divided equally, and replicas start equal, from the averaged model.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tutti.checkpoint.contribution import Collected
from tutti.checkpoint.index import RANK_STATE
from tutti.checkpoint.sources import LoadTarget, Source, transfer
from tutti.checkpoint.training_state import TrainingState
from tutti.compression.reducer import load_states_by_tensor, split_by_tensor
from tutti.config.compression import (
    FACTORS,
    MOMENTUM_CODECS,
    ZERO_ONE,
    Compression,
    format_compression,
    parse_compression,
)
from tutti.local_sgd.consistency import ReplicaState
from tutti.parallel.compressed.compressor import Compressor
from tutti.parallel.compressed.sharded_reduction import FlatTensorRow, ReducerContents
from tutti.parallel.layout import Cut, TensorShard
from tutti.parallel.saved_values import parse_dtype

Residuals = dict[str, torch.Tensor]
"""Residuals of one tensor or bucket by name; names that begin with "shared." are equal on all ranks."""


def collect_residuals(training: TrainingState, collected: Collected) -> None:
    """Add this rank's residuals to what it writes.

    Args:
        training: the state to save.
        collected: what this rank writes; changed in place.
    """
    compressor = training.parallel.replica.compressor
    exactly = training.parallel.replica.factored.exactly()
    if exactly:
        collected.contribution.residuals = {"method": FACTORS, "exactly": sorted(_names(training)[p] for p in exactly)}
    if compressor is None:
        return
    collected.contribution.residuals = _describe(training, compressor)
    for number, bucket in enumerate(_buckets(training, compressor)):
        for name, tensor in bucket.exchange.tensors().items():
            if tensor.dim():
                _add_whole(collected, f"{training.parallel.world.rank}/{number}", name, tensor)


def collect_replica_state(training: TrainingState, state: ReplicaState, collected: Collected) -> None:
    """Add the tensors and values of this rank's diverged replica to what it writes.

    Args:
        training: the state to save.
        state: the replica's state.
        collected: what this rank writes; changed in place.
    """
    collected.contribution.replica = state.values
    for name, tensor in state.tensors.items():
        _add_whole(collected, f"{training.parallel.world.rank}/replica", name, tensor)


def _add_whole(collected: Collected, owner: str, name: str, tensor: torch.Tensor) -> None:
    collected.add((RANK_STATE, owner, name), TensorShard(shape=tuple(tensor.shape)), tensor)


def load_replica_state(training: TrainingState, source: Source, say: Callable[[str], None]) -> None:
    """Begin the plan's consistency mode; restore this rank's replica if the same ranks and mode saved it. Collective.

    Args:
        training: the prepared state, with the checkpoint's model.
        source: the checkpoint.
        say: called with a sentence if replicas cannot be restored.
    """
    training.consistency.begin(training.parallel, training.progress.step)
    saved = source.run_state.get("replicas", [])
    if not any(saved):
        return
    same = (
        source.run_state["mode"] == training.parallel.plan.sync.mode
        and len(saved) == training.parallel.world.world_size
    )
    wanted = training.consistency.resume(training.parallel, saved[training.parallel.world.rank]) if same else {}
    if not all(training.parallel.world.gather(bool(wanted))):
        say(
            "all replicas start from the model that was saved: the checkpoint's replicas had another mode or codec, "
            "another number of ranks, or other trained parameters"
        )
        return
    owner = f"{training.parallel.world.rank}/replica"
    transfer(
        training.parallel.world,
        source,
        [LoadTarget(key=(RANK_STATE, owner, name), out=out) for name, out in wanted.items()],
    )
    training.consistency.on_resumed(training.parallel, wanted)


def load_residuals(training: TrainingState, source: Source, say: Callable[[str], None]) -> None:
    """Restore the residuals of the checkpoint's ranks, at this run's loss scale. Collective.

    Args:
        training: the prepared state.
        source: the checkpoint.
        say: called with a sentence if residuals are dropped.
    """
    saved: list[dict[str, Any] | None] = source.run_state.get("residuals") or []
    if any(description["method"] == FACTORS for description in saved if description):
        _restore_unfactored(training, saved)
        saved = []
    compressor = training.parallel.replica.compressor
    if compressor is not None and compressor.momentum_compression is not None:
        compressor.momentum_compression.loaded()
    if not any(saved):
        return
    compression = training.parallel.plan.sync.gradient_code
    if compressor is not None and compression is not None and _in_other_units(compression, saved):
        say(
            "the checkpoint's residuals of compression are dropped: one of the two runs compresses gradients, the "
            "other momentum"
        )
        return
    if compressor is None or compression is None or not compression.keeps:
        if any(key for key in source.tensors if key[0] == RANK_STATE and not key[2].startswith("shared.")):
            say("the checkpoint's residuals of compression are dropped: this run keeps no residuals")
        if compressor is None:
            return
    fits = len(saved) == training.parallel.world.world_size and _rebuild_buckets(
        training, compressor, saved[training.parallel.world.rank]
    )
    if all(training.parallel.world.gather(fits)):
        _load_same_buckets(training, compressor, source, saved[training.parallel.world.rank])
    else:
        training.parallel.replica.rebuild_buckets(None, [])
        _load_equal_shares(training, compressor, source, saved)
    scale, before = training.scaler.get_scale(), source.run_state["scaler"].get("scale", 1.0)
    if scale != before:
        compressor.rescale(scale / before)


def _restore_unfactored(training: TrainingState, saved: list[dict[str, Any] | None]) -> None:
    """Send as gradients the weights that the saved run did not send as factors, because factors took more bytes."""
    names = {name for description in saved if description for name in description["exactly"]}
    training.parallel.replica.factored.leave([p for p, name in _names(training).items() if name in names])
    training.parallel.replica.rebuild_buckets(None, [])


def _in_other_units(compression: Compression, saved: list[dict[str, Any] | None]) -> bool:
    """Whether one of the two runs compresses gradients and the other momentum."""
    before = next(description["method"] for description in saved if description)
    momentum_compression = {*MOMENTUM_CODECS} - {ZERO_ONE}
    return (parse_compression(before).method in momentum_compression) != (compression.method in momentum_compression)


def _describe(training: TrainingState, compressor: Compressor) -> dict[str, Any]:
    """Describe in plain values how this rank's buckets are made up."""
    name_of = _names(training)
    return {
        "method": format_compression(compressor.compression),
        "order": [name_of[p] for p in training.parallel.replica.order],
        "arrived": None
        if training.parallel.replica.arrived is None
        else [name_of[p] for p in training.parallel.replica.arrived],
        "buckets": [_describe_bucket(bucket) for bucket in _buckets(training, compressor)],
    }


def _describe_bucket(bucket: ReducerContents) -> dict[str, Any]:
    exchange = bucket.exchange
    return {
        "names": [row.name for row in bucket.rows],
        "shapes": [list(row.shape) for row in bucket.rows],
        "strides": [list(row.strides) for row in bucket.rows],
        "cuts": [[[cut.dim, [list(r) for r in cut.ranges]] for cut in row.held.cuts] for row in bucket.rows],
        "spans": {side: [list(span) for span in spans] for side, spans in exchange.spans.items()},
        "places": {
            name: [list(place) for place in shared_spans] for name, shared_spans in exchange.shared_spans.items()
        },
        "counts": {side: state.count for side, state in exchange.states.items()},
    }


def _buckets(training: TrainingState, compressor: Compressor) -> list[ReducerContents]:
    """Return this rank's buckets with the tensors in them: first those of whole gradients, then of sharded ones."""
    name_of, buckets = _names(training), []
    for bucket, exchange in compressor.exchanges.items():
        named = zip((name_of[p] for p in bucket.parameters), bucket.views, strict=True)
        rows = [
            FlatTensorRow(name, tuple(view.shape), view.stride(), training.parallel.layout.shard_of(name))
            for name, view in named
        ]
        buckets.append(ReducerContents(exchange, rows, exchange.contributors))
    return buckets + [bucket for part in compressor.parts for bucket in part.keeping()]


def _names(training: TrainingState) -> dict[nn.Parameter, str]:
    """Return the first name of every parameter."""
    return {p: training.parallel.layout.first_name(name) for name, p in training.parallel.model.named_parameters()}


def _rebuild_buckets(training: TrainingState, compressor: Compressor, saved: dict[str, Any] | None) -> bool:
    """Try to make this rank's buckets as they were when it saved; return whether they are."""
    by_name = {name: p for p, name in _names(training).items()}
    if saved is None or not by_name.keys() >= {*saved["order"], *(saved["arrived"] or ())}:
        return False
    arrived = saved["arrived"]
    order = [by_name[name] for name in saved["order"]]
    if {*map(id, order)} == {*map(id, training.parallel.replica.order)}:
        training.parallel.replica.rebuild_buckets(
            order, None if arrived is None else [by_name[name] for name in arrived]
        )
    return _without_counts(_describe(training, compressor)) == _without_counts(saved)


def _without_counts(description: dict[str, Any]) -> dict[str, Any]:
    return {**description, "buckets": [{**bucket, "counts": None} for bucket in description["buckets"]]}


def _load_same_buckets(
    training: TrainingState, compressor: Compressor, source: Source, saved: dict[str, Any] | None
) -> None:
    """Load the residuals of this rank into the buckets that saved them. Collective."""
    assert saved is not None
    buckets = _buckets(training, compressor)
    tensors = _read(training, source, training.parallel.world.rank, range(len(buckets)))
    for number, (bucket, description) in enumerate(zip(buckets, saved["buckets"], strict=True)):
        counts = {f"{side}.count": torch.tensor(count) for side, count in description["counts"].items()}
        bucket.exchange.load({**tensors[number], **counts})


def _load_equal_shares(
    training: TrainingState, compressor: Compressor, source: Source, saved: list[dict[str, Any] | None]
) -> None:
    """Take an equal share of the sum of all saved ranks' residuals for each parameter. Collective."""
    here = {name: p for p, name in _names(training).items()}
    totals: dict[str, Residuals] = {}
    for rank, description in enumerate(saved):
        buckets = description["buckets"] if description is not None else []
        wanted = [number for number, bucket in enumerate(buckets) if any(name in here for name in bucket["names"])]
        for number, tensors in _read(training, source, rank, wanted).items():
            _add_bucket(training, totals, buckets[number], tensors, here)
    counts = [
        max(bucket["counts"].values())
        for rank_description in saved
        if rank_description is not None
        for bucket in rank_description["buckets"]
    ]
    for bucket in _buckets(training, compressor):
        shares = [_share(row, totals.get(row.name, {}), bucket.contributors) for row in bucket.rows]
        sizes = [torch.Size(row.shape).numel() for row in bucket.rows]
        load_states_by_tensor(bucket.exchange, sizes, shares, max(counts, default=0))


def _add_bucket(
    training: TrainingState,
    totals: dict[str, Residuals],
    bucket: dict[str, Any],
    tensors: Residuals,
    here: Iterable[str],
) -> None:
    """Add a saved bucket's residuals to `totals`, by parameter; state that ranks share is taken once."""
    shapes = bucket["shapes"]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    by_tensor = split_by_tensor(tensors, bucket["spans"], bucket["places"], sizes)
    rows = zip(bucket["names"], shapes, bucket["strides"], bucket["cuts"], by_tensor, strict=True)
    for name, shape, strides, cuts, residuals in rows:
        if name not in here:
            continue
        shard = TensorShard(
            shape=training.parallel.layout.names[name],
            cuts=tuple(Cut(dim=dim, ranges=tuple((a, b) for a, b in ranges)) for dim, ranges in cuts),
        )
        total = totals.setdefault(name, {})
        for kind, part in residuals.items():
            if kind.startswith("shared."):
                total.setdefault(kind, part)
                continue
            into = total.setdefault(kind, part.new_zeros(shard.shape))
            addend = torch.zeros_like(into)
            shard.put(addend, torch.as_strided(part, shape, strides))
            into += addend


def _share(row: FlatTensorRow, total: Residuals, contributors: int) -> Residuals:
    """Return this rank's share of one tensor's residuals, flat, in memory order."""
    share: Residuals = {}
    for kind, values in total.items():
        if kind.startswith("shared."):
            share[kind] = values
        elif contributors:
            flat = values.new_empty(torch.Size(row.shape).numel())
            torch.as_strided(flat, row.shape, row.strides).copy_(row.held.take(values))
            share[kind] = flat / contributors
    return share


def _read(training: TrainingState, source: Source, rank: int, numbers: Iterable[int]) -> dict[int, Residuals]:
    """Read the tensors of some buckets of a saved rank, by number of the bucket. Collective."""
    buckets: dict[int, Residuals] = {}
    targets = []
    for number in numbers:
        buckets[number] = {}
        for key in source.state_keys(RANK_STATE, f"{rank}/{number}"):
            stored = source.tensors[key]
            out = buckets[number][key[2]] = torch.empty(stored.shape, dtype=parse_dtype(stored.dtype))
            targets.append(LoadTarget(key=key, out=out))
    transfer(training.parallel.world, source, targets)
    return buckets
