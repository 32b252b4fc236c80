"""What a verified run leaves on disk, rank by rank and step by step, and how it is read back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tutti.data.share import Part
from tutti.parallel.layout import Held
from tutti.verify.parts import Holding

Values = dict[str, torch.Tensor]
"""Tensors by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one module in forward; `number` counts the calls of this module within the microbatch.

    `parts`: by kind ("inputs" or "outputs") and position, tensors that are parts of a whole one.
    """

    module: str
    number: int
    kind: str  # class name
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    parts: Mapping[tuple[str, int], Held] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        return self.module, self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRecord:
    """A microbatch's loss as the user's function returned it: a mean with count None, or a Weighted's parts."""

    total: float
    count: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """One microbatch on one rank.

    `foreign`: sources of random numbers, other than torch's own, that forward drew from. `unaligned`: random
    operators whose draws could not be made to agree. `backward_ops`: operators of gradient clipping seen in backward.
    """

    part: Part
    calls: tuple[Call, ...]
    loss: LossRecord | None
    foreign: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()
    backward_ops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Parameters, buffers and optimizer state ("0.<parameter>.<entry>" of optimizer 0), large ones in part."""

    parameters: Values = field(default_factory=dict)
    buffers: Values = field(default_factory=dict)
    optimizer: Values = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step on one rank. `indices`: of the whole global batch; `gradients`: averaged, None where there is none.

    `hyper_parameters`: "0.1.lr" is the rate of group 1 of optimizer 0. `used_norms`: norms of the gradients as the
    optimizer found them. `between`: what the script changed after the last update; `after`: the state after this one.
    """

    step: int
    batch_size: int
    indices: tuple[int, ...]
    inputs: Values
    parts: tuple[PartRecord, ...]
    loss: float
    gradients: dict[str, torch.Tensor | None]
    hyper_parameters: dict[str, float]
    learning_rate: float
    used_norms: dict[str, float]
    between: State
    after: State


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank recorded, except the steps themselves, which have files of their own.

    `initial`: its model before ranks were made equal. `dtype`: lowest float precision computed in. `hooked`: parameters
    with hooks of the script's own on their gradients. `losses`: of every microbatch of every step. `shapes`: of
    whole parameters and buffers. `drew`: whether forward drew random numbers. `holding`: which part of the model it
    holds.
    """

    rank: int
    world_size: int
    seed: int
    global_batch_size: int
    model: str
    owners: dict[str, str]  # parameter or buffer -> module
    initial: Values
    dtype: str
    hooked: tuple[str, ...]
    notes: tuple[str, ...]
    losses: tuple[tuple[tuple[Part, LossRecord | None], ...], ...]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    drew: bool = False
    holding: Holding = field(default_factory=Holding)

    @property
    def steps(self) -> int:
        return len(self.losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """What the ranks need to know of one device's step: shapes of its random draws by seed, and the calls it kept."""

    draws: Mapping[int, tuple[int, ...]]
    calls: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Folder:
    """Where the files of one recording are."""

    path: Path

    def rank(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.pt"

    def step(self, rank: int, step: int) -> Path:
        return self.path / f"rank-{rank}-step-{step}.pt"

    def guide(self, step: int, part: int) -> Path:
        return self.path / f"guide-{step}-{part}.pt"

    def state(self, step: int) -> Path:
        return self.path / f"state-{step}.pt"


def write(path: Path, value: Any) -> None:
    """Write one file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(value, partial)
    partial.replace(path)


def read(path: Path) -> Any:
    """Read one file back; only ever files that this program's own ranks wrote."""
    return torch.load(path, map_location="cpu", weights_only=False)


def read_ranks(path: Path, world_size: int) -> tuple[RankRecord, ...]:
    """The records of all ranks of a run, in order of rank; empty if a rank recorded no step."""
    folder = Folder(path)
    if not all(folder.rank(rank).exists() for rank in range(world_size)):
        return ()
    return tuple(read(folder.rank(rank)) for rank in range(world_size))


def read_steps(path: Path, world_size: int, step: int) -> tuple[StepRecord, ...]:
    """One step of all ranks, in order of rank."""
    return tuple(read(Folder(path).step(rank, step)) for rank in range(world_size))
