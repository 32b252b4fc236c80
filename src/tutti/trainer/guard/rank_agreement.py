"""Checks that ranks agree on what each of them has made by itself: data order, samples, hyperparameters, weights."""

import hashlib
import zlib
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from tutti.data.microbatches import leaves
from tutti.data.samples import SeededSamples
from tutti.errors import RankMismatchError
from tutti.parallel.sharding.parameter_sharding import Parameters
from tutti.trainer.run_state import Run
from tutti.trainer.state_check import describe_module, summary_of


def check_order(run: Run) -> None:
    """Check that all ranks have the same order of the epoch's samples. Collective.

    Raises:
        RankMismatchError: on every rank, with the first samples.
    """
    loader = run.state.loader
    if loader.source.is_stream:
        return
    order = loader.epoch_batches(loader.epoch)[0]
    mine = len(order), zlib.crc32(np.ascontiguousarray(order).tobytes()), order[:5].tolist()
    orders = run.parallel.world.gather(mine)
    other = _first_other(orders)
    if other is not None:
        count, _, first = orders[other]
        raise RankMismatchError(
            f"epoch {loader.epoch}: ranks have different orders of the samples: rank 0 has {orders[0][0]} samples that "
            f"begin with {orders[0][2]}, rank {other} has {count} that begin with {first}, so that some are trained "
            "twice and others never; give data set and sampler the same length and the same seed on all ranks"
        )


def check_samples(run: Run) -> None:
    """Check that the first sample has the same values on all ranks, if it can be read here without side effects.

    Collective. A data set that draws random numbers of its own is not judged, nor one that is read by workers, which
    may open files of their own.

    Raises:
        RankMismatchError: on every rank.
    """
    loader = run.state.loader
    if loader.source.is_stream or loader.source.options.get("num_workers"):
        return
    index = int(loader.epoch_batches(loader.epoch)[0][0])
    digests = run.parallel.world.gather(_sample_digest(loader.source.dataset, run.settings.seed, index))
    other = _first_other([digest or digests[0] for digest in digests])
    if digests[0] and other is not None:
        raise RankMismatchError(
            f"sample {index} of the data set has other values on rank {other} than on rank 0; build the data set from "
            "the same data in the same order on all ranks, and seed whatever it draws or shuffles"
        )


def _sample_digest(dataset: Any, seed: int, index: int) -> str | None:
    """The digest of a sample's numbers and strings; None if reading it twice gives different values, or fails."""
    samples = SeededSamples(dataset, seed, "sample", gather=False)
    try:
        first, second = (_digest(samples[0, index]) for _ in range(2))
    except Exception:  # the script's own code; the loader reports it where it matters
        return None
    return first if first == second else None


def _digest(sample: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves(sample):
        if isinstance(leaf, torch.Tensor):
            digest.update(repr((leaf.shape, leaf.dtype)).encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            digest.update(repr((leaf.shape, leaf.dtype)).encode() + leaf.tobytes())
        elif isinstance(leaf, str | bytes | bool | int | float | complex | np.generic):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def check_hyperparameters(run: Run) -> None:
    """Check that all ranks have the same optimizers with the same options in every parameter group. Collective.

    Raises:
        RankMismatchError: on every rank, with the option's name and values.
    """
    mine = {
        f"{key} of group {number} of {type(optimizer).__name__} ({position + 1})": value
        for position, optimizer in enumerate(run.parallel.optimizers)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in _options(optimizer, group).items()
    }
    options = run.parallel.world.gather(mine)
    for name in {**options[0], **{key: None for theirs in options for key in theirs}}:
        values = [theirs.get(name, "nothing") for theirs in options]
        other = _first_other(values)
        if other is not None:
            raise RankMismatchError(
                f"step {run.state.progress.step + 1}: {name} is {values[0]} on rank 0 and {values[other]} on rank "
                f"{other}, so that replicas would drift apart; set it on all ranks alike (what only one rank knows, "
                "such as an evaluation's result, comes from job.evaluate on every rank)"
            )


def _options(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, str]:
    """A group's options that are numbers, strings or tuples of them, in words."""
    values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    values = {
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in values.items()
    }
    kinds = bool | int | float | str | complex | None
    return {
        key: repr(value)
        for key, value in values.items()
        if isinstance(value, kinds) or (isinstance(value, tuple | list) and all(isinstance(v, kinds) for v in value))
    }


def check_weights(run: Run) -> None:
    """Check that replicas have equal weights. Collective.

    Raises:
        RankMismatchError: on every rank, with the parameter's name.
    """
    mesh = run.parallel.mesh
    divided = isinstance(run.parallel.replica.shards, Parameters)
    alike = tuple(axis for axis in ("replicate", "shard") if axis in mesh.degrees and not (divided and axis == "shard"))
    compressor = run.parallel.replica.compressor
    if not alike or (compressor is not None and compressor.momentum_compression is not None):
        return  # with compressed momentum, replicas are equal only where they have exchanged it
    others = tuple(axis for axis in mesh.degrees if axis not in alike)
    held = {name: p.detach() for name, p in run.parallel.model.named_parameters() if not p.is_meta and p.numel()}
    mine = mesh.index(*others), dict(zip(held, _checksums(list(held.values())), strict=True))
    everyone = run.parallel.world.gather(mine)
    suspects = [
        (rank, first, name)
        for rank, (place, sums) in enumerate(everyone)
        for first in [next(at for at, (other, _) in enumerate(everyone) if other == place)]
        for name, value in sums.items()
        if everyone[first][1].get(name, value) != value
    ][:5]
    if not suspects:
        return
    names = {name for _, _, name in suspects}
    summaries = run.parallel.world.gather({name: summary_of(held[name]) for name in names if name in held})
    for rank, first, name in suspects:
        if not summaries[first][name].agrees(summaries[rank][name]):  # more than rounding
            module, _, leaf = name.rpartition(".")
            raise RankMismatchError(
                f"step {run.state.progress.step + 1}: {leaf!r} of {describe_module(run.parallel.model, module)} has "
                f"other values on rank {rank} than on rank {first}, and replicas must be equal; change weights on all "
                "ranks alike, or before job.prepare, which gives all ranks those of rank 0"
            )


def _checksums(tensors: list[torch.Tensor]) -> list[int]:
    """A sum over the bits of each tensor, which any changed value changes."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    flat = [tensor.contiguous().reshape(-1) for tensor in real]
    sums = [tensor.view(kinds[tensor.element_size()]).sum(dtype=torch.int64) for tensor in flat]
    return torch.stack([total.cpu() for total in sums]).tolist() if sums else []


def _first_other(values: list[Any]) -> int | None:
    """The first rank whose value is not rank 0's."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)
