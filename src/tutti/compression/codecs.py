"""From a plan's `sync.compress` to what reduces one bucket: the codec's factories, and the reducer that fits."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tutti.compression.codec import Codec
from tutti.compression.dense_reducers import AllGatherReducer, ReduceScatterReducer, TwoPhaseReducer
from tutti.compression.reducer import CountedCollectives, GradientReducer
from tutti.config.compression import Compression, gathers_messages
from tutti.config.registry import load_factory
from tutti.errors import PlanError


def make_codec(compression: Compression) -> Codec:
    """The codec of messages of flat values."""
    if compression.entry.make_codec is None:
        raise PlanError(f"{compression.method} has no codec of flat values; use another codec")
    codec: Codec = load_factory(compression.entry.make_codec)(compression)
    return codec


def make_reducer(
    compression: Compression,
    shapes: Sequence[Sequence[int]],
    *,
    group: Any,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> GradientReducer:
    """The all-reduce of a flat gradient by `compression`. All ranks make it with the same arguments.

    Args:
        how: the compression of the messages (`Compression.code`).
        shapes: of the tensors, as they lie in memory one after another.
        group: process group, None for all ranks.
        dtype: of the gradient.
        device: of the gradient.
        seed: of the codec's random numbers.
    """
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    where: dict[str, Any] = {"group": group, "dtype": dtype, "device": device, "seed": seed}
    entry = compression.entry
    if entry.make_reducer is not None:
        reducer: GradientReducer | None = load_factory(entry.make_reducer)(compression, shapes, **where)
        if reducer is not None:
            return reducer
    codec = make_codec(compression)
    if gathers_messages(compression, CountedCollectives(group).size):
        return AllGatherReducer(codec, numel, **where)
    back = None if entry.make_return_codec is None else load_factory(entry.make_return_codec)(compression)
    return TwoPhaseReducer(codec, numel, back=back, **where)


def make_scatter_reducer(
    compression: Compression,
    lengths: Sequence[int],
    *,
    group: Any,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> ReduceScatterReducer | None:
    """The reduce-scatter to parts of `lengths` values; None: the codec compresses whole tensors."""
    if compression.entry.whole_tensors:
        return None
    return ReduceScatterReducer(make_codec(compression), lengths, group=group, dtype=dtype, device=device, seed=seed)


def round_count(compression: Compression, ranks: int) -> int:
    """Rounds of collectives of the reducer that `make_reducer` makes for a group of this size."""
    if compression.settings.get("sparse"):
        return 4
    return 1 if gathers_messages(compression, ranks) else compression.code.entry.rounds


def uses_pair_messages(compression: Compression, group: Any, devices: Iterable[torch.device]) -> bool:
    """Whether all rounds of the reducer are messages between pairs of ranks (`tutti.comm.point_to_point`).

    These are in order whatever else the group is used for meanwhile, so a thread of its own may send and receive them.
    """
    on_cpu = compression.pairwise and all(device.type == "cpu" for device in devices)
    return on_cpu and CountedCollectives(group).size > 1 and dist.get_backend(group) == "gloo"
