"""Define the files that a recorded run leaves on disk, by rank and step, and read them back."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tutti.comm.value_codec import decode, encode
from tutti.data.batches import MicrobatchShare
from tutti.data.collate_record import CollateRecord
from tutti.parallel.layout import TensorShard
from tutti.verification.alignment import RankShard

Values = dict[str, torch.Tensor]
"""Tensors by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of one module in forward.

    Attributes:
        module: its dotted name; "" is the model.
        number: counts the calls of this module within the microbatch.
        kind: class name of the module.
        inputs, outputs: sampled copies of its tensors, of the first few.
        counts: number of all its tensors, by kind ("inputs" or "outputs").
        shards: for tensors of which the rank has a part: which part, by kind ("inputs" or "outputs") and position.
    """

    module: str
    number: int
    kind: str  # class name
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    shards: Mapping[tuple[str, int], TensorShard] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        return self.module, self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRecord:
    """A microbatch's loss as the script's function returned it.

    Attributes:
        total: the mean, or the total of a `Weighted`.
        count: the count of a `Weighted`; None for a mean.
        stated: whether the script itself has returned the `Weighted`.
    """

    total: float
    count: float | None
    stated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchRecord:
    """One microbatch on one rank.

    Attributes:
        share: the samples that the rank computes.
        calls: module calls in order of their end.
        loss: None if the script's loss is not one number.
        foreign: sources of random numbers, other than torch's own, that forward drew from.
        unaligned: random operators whose draws could not be made equal.
        backward_ops: operators of gradient clipping that ran within backward.
        draw_at: number of calls that had ended before the first of the `foreign` or `unaligned` draws; None without.
    """

    share: MicrobatchShare
    calls: tuple[ModuleCall, ...]
    loss: LossRecord | None
    foreign: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()
    backward_ops: tuple[str, ...] = ()
    draw_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """Parameters, buffers and optimizer state; large tensors are sampled.

    Entries of the optimizer state are named "0.<parameter>.<entry>" for optimizer 0.
    """

    parameters: Values = field(default_factory=dict)
    buffers: Values = field(default_factory=dict)
    optimizer: Values = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step on one rank.

    Attributes:
        indices: samples of the whole global batch.
        inputs: tensors of the batch by name.
        gradients: the mean over the global batch; None for a parameter without one.
        hyper_parameters: settings of the optimizers; "0.1.lr" is the rate of group 1 of optimizer 0.
        loss: of this call of forward_backward.
        learning_rate: rate of the update.
        used_norms: norms of the gradients that the optimizer used.
        between: what the script changed after the last update.
        after: the state after this update.
        update_loss: of all calls whose gradients the update used.
        updated: whether an update followed; another call of forward_backward did otherwise.
        collated: what the batch was collated from; None where that is not recorded.
        draws: generators that the script drew from between the loader and the step.
    """

    step: int
    batch_size: int
    indices: tuple[int, ...]
    inputs: Values
    microbatches: tuple[MicrobatchRecord, ...]
    loss: float
    gradients: dict[str, torch.Tensor | None]
    hyper_parameters: dict[str, float]
    learning_rate: float
    used_norms: dict[str, float]
    between: ModelState
    after: ModelState
    update_loss: float | None = None
    updated: bool = True
    collated: CollateRecord | None = None
    draws: tuple[str, ...] = ()

    @property
    def digests(self) -> dict[int, bytes | None]:
        """The digest of each sample that the rank loaded, by its position in the global batch."""
        parts = [microbatch.share for microbatch in self.microbatches]
        positions = [part.start + offset for part in parts for offset in range(part.loaded)]
        digests = self.collated.digests if self.collated is not None else ()
        return dict(zip(positions, digests, strict=True)) if len(digests) == len(positions) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The results of one evaluation, after `step` updates, on the data called `name`."""

    step: int
    name: str
    values: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank recorded of the whole run; steps have files of their own.

    Attributes:
        owners: module of each parameter and buffer.
        initial: parameters and buffers before ranks were made equal.
        dtype: the least precise floating-point dtype of the computation.
        hooked: parameters on whose gradients the script has hooks.
        notes: what was not compared, and why.
        losses: loss of every microbatch of every step.
        shapes: shapes of the whole parameters and buffers.
        drew: whether forward drew random numbers.
        rank_shard: which part of the model the rank holds.
        updates: number of updates.
        evaluations: results of evaluations, in order.
        precision: the number format that the script and the plan ask for.
        own_step: why one device ran tutti's own step; None if it ran the plain program, or on several ranks.
        used_counts: whether the plain program weighed losses of several batches by counts that tutti reads off them.
    """

    rank: int
    world_size: int
    seed: int
    global_batch_size: int
    model: str
    owners: dict[str, str]
    initial: Values
    dtype: str
    hooked: tuple[str, ...]
    notes: tuple[str, ...]
    losses: tuple[tuple[tuple[MicrobatchShare, LossRecord | None], ...], ...]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    drew: bool = False
    rank_shard: RankShard = field(default_factory=RankShard)
    updates: int = 0
    evaluations: tuple[Evaluation, ...] = ()
    precision: str = "float32"
    own_step: str | None = None
    used_counts: bool = False

    @property
    def steps(self) -> int:
        """Number of step records: of calls of forward_backward, and of updates without one before them."""
        return len(self.losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceGuide:
    """What ranks need to know of one device's microbatch.

    Attributes:
        draws: shapes of its random draws by seed.
        calls: (module, number) of the calls that it recorded.
    """

    draws: Mapping[int, tuple[int, ...]]
    calls: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class RecordingFolder:
    """Paths of the files of one recording."""

    path: Path

    def rank(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.pt"

    def step(self, rank: int, step: int) -> Path:
        return self.path / f"rank-{rank}-step-{step}.pt"

    def guide(self, step: int, call: int, microbatch: int) -> Path:
        return self.path / f"guide-{step}-{call}-{microbatch}.pt"

    def state(self, step: int) -> Path:
        return self.path / f"state-{step}.pt"


def write_record(path: Path, value: Any) -> None:
    """Write one file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(encode(value, limit=sys.maxsize))
    partial.replace(path)


def read_record(path: Path) -> Any:
    """Read one file back. It runs no code of the file's."""
    return decode(path.read_bytes(), limit=sys.maxsize)


def read_ranks(path: Path, world_size: int) -> tuple[RankRecord, ...]:
    """Return the records of all ranks, in order; empty if a rank recorded no step."""
    folder = RecordingFolder(path)
    if not all(folder.rank(rank).exists() for rank in range(world_size)):
        return ()
    return tuple(read_record(folder.rank(rank)) for rank in range(world_size))


def read_steps(path: Path, world_size: int, step: int) -> tuple[StepRecord, ...]:
    """Return the records of one step of all ranks, in order."""
    return tuple(read_record(RecordingFolder(path).step(rank, step)) for rank in range(world_size))
