"""Many plans as columns of numbers: a row of a `MeshTable` for each mesh, a row of `Variants` for each plan on it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.config.vocabulary import ContextKind, Offload, OffloadDevice, ScheduleName

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "zero-bubble", "gpipe")
RECOMPUTE = ("none", "selective", "full")
CONTEXTS: tuple[ContextKind, ...] = ("ring", "all-to-all")
OFFLOADS: tuple[tuple[Offload, OffloadDevice], ...] = (
    ("none", "cpu"),
    ("optimizer", "cpu"),
    ("parameters", "cpu"),
    ("optimizer", "nvme"),
    ("parameters", "nvme"),
)
OFFLOAD_TIERS = ((0,), (1, 2), (3, 4))
"""Indices into OFFLOADS: state on the device, in the host's memory, and the optimizer's state on its disk."""

RESIDENT = tuple(index for index, (what, _) in enumerate(OFFLOADS) if what == "optimizer")
"""Indices into OFFLOADS: the device keeps a copy of the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshTable:
    """Degrees and microbatches of meshes, (meshes,) each. `copies` is replicate times shard."""

    split: Ints
    stage: Ints
    context: Ints
    expert: Ints
    table: Ints
    space: Ints
    copies: Ints
    microbatches: Ints

    def __len__(self) -> int:
        return len(self.split)

    @property
    def data(self) -> Ints:
        """The data-parallel degree."""
        return self.copies * self.expert * self.table

    @property
    def world(self) -> Ints:
        """The number of ranks."""
        return self.data * self.split * self.stage * self.context * self.space

    def take(self, rows: NDArray[np.intp]) -> "MeshTable":
        """Return these rows."""
        return MeshTable(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """How the plans on each mesh are sharded, scheduled and recomputed, (plans,) each.

    Attributes:
        shape: row in the `MeshTable`.
        shard: degree of the shard axis.
        level: level of sharding, 0 without.
        schedule: index into SCHEDULES.
        chunks: stages per rank.
        recompute: index into RECOMPUTE.
        context_kind: index into CONTEXTS.
        offload: index into OFFLOADS.
    """

    shape: NDArray[np.intp]
    shard: Ints
    level: Ints
    schedule: Ints
    chunks: Ints
    recompute: Ints
    context_kind: Ints
    offload: Ints

    def __len__(self) -> int:
        return len(self.shape)

    def take(self, rows: NDArray[np.intp]) -> "Variants":
        """Return these rows."""
        return Variants(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})


def by_kind(columns: tuple[Ints, ...], function: Callable[..., tuple[float, ...]]) -> tuple[Array, ...]:
    """Call `function(*row)` once for each different row of `columns`, and return its values as columns."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        known, place = np.unique(column, return_inverse=True)
        key = key * len(known) + place.reshape(-1)
    _, first, where = np.unique(key, return_index=True, return_inverse=True)
    kinds = zip(*(column[first].tolist() for column in columns), strict=True)
    values = np.array([function(*kind) for kind in kinds], dtype=np.float64)
    return tuple(np.ascontiguousarray(column) for column in values[where.reshape(-1)].T)
