"""From a plan's `sync.compress` to codecs, and to the reducer that suits one bucket."""

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
    """Make the codec of a compression.

    Raises:
        PlanError: for a method without a codec of flat values, such as powersgd.
    """
    if compression.entry.make_codec is None:
        raise PlanError(f"{compression.method} has no codec of flat values; use another method")
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
    """Make the all-reduce of a flat gradient. All ranks make it with the same arguments.

    Args:
        compression: the compression of the messages (`Compression.code`).
        shapes: shapes of the tensors, in the order in which they lie in the flat gradient.
        group: process group, None for all ranks.
        dtype: dtype of the gradient.
        device: device of the gradient.
        seed: seed of the codec's random numbers.
    """
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    options: dict[str, Any] = {"group": group, "dtype": dtype, "device": device, "seed": seed}
    entry = compression.entry
    if entry.make_reducer is not None:
        reducer: GradientReducer | None = load_factory(entry.make_reducer)(compression, shapes, **options)
        if reducer is not None:
            return reducer
    codec = make_codec(compression)
    if gathers_messages(compression, CountedCollectives(group).size):
        return AllGatherReducer(codec, numel, **options)
    return_codec = None if entry.make_return_codec is None else load_factory(entry.make_return_codec)(compression)
    return TwoPhaseReducer(codec, numel, return_codec=return_codec, **options)


def make_scatter_reducer(
    compression: Compression,
    lengths: Sequence[int],
    *,
    group: Any,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> ReduceScatterReducer | None:
    """Make the reduce-scatter of a flat gradient; None where the codec compresses whole tensors.

    Args:
        compression: the compression of the messages (`Compression.code`).
        lengths: number of values of each rank's part.
        group: process group, None for all ranks.
        dtype: dtype of the gradient.
        device: device of the gradient.
        seed: seed of the codec's random numbers.
    """
    if compression.entry.whole_tensors:
        return None
    return ReduceScatterReducer(make_codec(compression), lengths, group=group, dtype=dtype, device=device, seed=seed)


def round_count(compression: Compression, ranks: int) -> int:
    """Return the number of rounds of the reducer that `make_reducer` makes for a group of `ranks`."""
    if compression.settings.get("sparse"):
        return 4
    return 1 if gathers_messages(compression, ranks) else compression.code.entry.rounds


def uses_pair_messages(compression: Compression, group: Any, devices: Iterable[torch.device]) -> bool:
    """Return whether all rounds of the reducer are messages between pairs of ranks (`tutti.comm.point_to_point`).

    These messages stay in order whatever else uses the group at the same time, so a separate thread may send and
    receive them.
    """
    on_cpu = compression.pairwise and all(device.type == "cpu" for device in devices)
    return on_cpu and CountedCollectives(group).size > 1 and dist.get_backend(group) == "gloo"
