"""Plan: what is intended. A readable JSON file that says how the work is spread; nothing in it is measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise

from tutti.config.compression import Compression
from tutti.config.relaxed import Relaxed, check_mode
from tutti.config.words import (
    DATA_AXES,
    AxisName,
    BucketSizes,
    ContextKind,
    LastBatch,
    Offload,
    Placement,
    Precision,
    Recompute,
    ScheduleName,
    ShardLevel,
    SyncMode,
    Unit,
)
from tutti.errors import PlanError


def _positive(value: int, name: str) -> None:
    if value < 1:
        raise PlanError(f"{name} = {value}; give a number of 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRule:
    """Where the modules whose dotted names match a glob are placed; the last matching rule with an opinion wins.

    `modules`: a glob over dotted module names ("*" is all of them); `placement`: auto is no opinion; `recompute`:
    whether their activations are dropped after forward and computed again in backward, None for no opinion;
    "selective" keeps the outputs of what is dear to compute. `chunks`: a module is run on so many parts of its batch,
    one after another, and recomputed part by part.
    """

    modules: str = "*"
    placement: Placement = "auto"
    recompute: bool | Recompute | None = None
    chunks: int | None = None

    def __post_init__(self) -> None:
        if not self.modules:
            raise PlanError("modules is empty; write '*' for all modules, or a glob over their dotted names")
        if self.chunks is not None:
            _positive(self.chunks, "chunks")


def placement_of(layout: Sequence[LayoutRule], name: str) -> Placement:
    """What the layout says of the module `name`; auto where no rule has an opinion."""
    said = [rule.placement for rule in layout if rule.placement != "auto" and fnmatchcase(name, rule.modules)]
    return said[-1] if said else "auto"


def by_columns(placement: Placement, inputs: float, outputs: float) -> bool:
    """Whether a linear layer divided over `table` is cut by its outputs: as it says, or so that less is sent.

    With P ranks, a sample sends (P - 1)(inputs + outputs / P) values each way by columns, (P - 1)(inputs / P + outputs)
    by rows.
    """
    return placement == "column" or (placement == "split" and inputs <= outputs)


def recomputes(layout: Sequence[LayoutRule], name: str) -> bool | Recompute:
    """Whether the layout says that the module `name` recomputes, and how."""
    said = [rule.recompute for rule in layout if rule.recompute is not None and fnmatchcase(name, rule.modules)]
    return said[-1] if said else False


def chunks_of(layout: Sequence[LayoutRule], name: str) -> int:
    """Into how many parts the layout says the module `name` cuts its batch."""
    said = [rule.chunks for rule in layout if rule.chunks is not None and fnmatchcase(name, rule.modules)]
    return said[-1] if said else 1


def _check_ramp(ramp: Sequence[tuple[int, int]], last: int) -> None:
    steps, sizes = [0, *(until for until, _ in ramp)], [0, *(size for _, size in ramp), last]
    if any(a >= b for some in (steps, sizes) for a, b in pairwise(some)):
        raise PlanError(
            f"ramp = {[list(pair) for pair in ramp]} with global_batch_size = {last}; give (until, size) pairs whose "
            "steps and sizes both grow, from above 0 to below the global batch"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The batch that a step means, and how it is cut.

    The global batch is cut into `num_microbatches` slices in order; each slice is shared among the data-parallel
    ranks. `last_batch`: an epoch's short last batch is kept or dropped. `ramp`: (until, size) pairs by which the batch
    grows to `global_batch_size`: batches numbered below `until`, over all epochs from 0, have `size`; the samples come
    in the same order.
    """

    global_batch_size: int
    unit: Unit = "samples"
    num_microbatches: int = 1
    last_batch: LastBatch = "keep"
    ramp: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        _positive(self.global_batch_size, "global_batch_size")
        _check_ramp(self.ramp, self.global_batch_size)
        _positive(self.num_microbatches, "num_microbatches")
        if self.unit == "samples" and self.num_microbatches > self.global_batch_size:
            raise PlanError(
                f"num_microbatches = {self.num_microbatches} exceeds global_batch_size = {self.global_batch_size} "
                f"samples; set num_microbatches to at most {self.global_batch_size}"
            )

    def size_at(self, number: int) -> int:
        """The size of the global batch with this number, counted over all epochs from 0."""
        return next((size for until, size in self.ramp if number < until), self.global_batch_size)

    @property
    def smallest(self) -> int:
        """The smallest size it ever has: the first."""
        return self.size_at(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """How replicas stay equal. Gradients are fused into buckets of about `bucket_nbytes` before they are summed, and
    written by `compress`, where it is given; in a mode in which replicas differ, what these tell each other is written
    so. `bucket_sizes`: whether that size stays, or the first steps try others. `relaxed`: parameters of the mode.
    """

    mode: SyncMode = "synchronous"
    bucket_nbytes: int = 25 * 2**20
    bucket_sizes: BucketSizes = "stated"
    compress: Compression | None = None
    relaxed: Relaxed = field(default_factory=Relaxed)

    def __post_init__(self) -> None:
        _positive(self.bucket_nbytes, "bucket_nbytes")
        check_mode(self.mode, self.relaxed)

    @property
    def gradient_code(self) -> Compression | None:
        """How sums of gradients are written; None: exactly. Before replicas differ, they are where the code keeps
        something back: what it left out would be lost when replicas part."""
        if self.mode == "synchronous":
            return self.compress
        keeps = self.compress is not None and self.compress.keeps
        return self.compress if self.relaxed.after and not keeps else None

    @property
    def at_first(self) -> "Sync":
        """How the first `relaxed.after` updates are made, of a mode that begins with synchronous ones."""
        return replace(self, mode="synchronous", relaxed=Relaxed(), compress=self.gradient_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What the `shard` axis divides among its ranks, and what is kept in the host's memory."""

    level: ShardLevel = 3
    offload: Offload = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How the `stage` axis runs. `cuts`: names of the modules at which a new stage begins (none: cut by cost);
    `stages_per_rank`: stages that each rank owns, above 1 for interleaved schedules.
    """

    schedule: ScheduleName = "1f1b"
    stages_per_rank: int = 1
    cuts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _positive(self.stages_per_rank, "stages_per_rank")
        if self.stages_per_rank > 1 and self.schedule != "interleaved":
            raise PlanError(
                f'stages_per_rank = {self.stages_per_rank} with schedule = "{self.schedule}"; use "interleaved", or 1'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a job is spread over ranks.

    `mesh`: degree of each axis in order, outermost first; their product is the world size.
    `shares`: relative loads of the data-parallel ranks (empty: equal); 3, 1 gives the first three quarters of every
    slice. The weights of the means follow from the samples each rank really gets.
    `split_shares`: relative parts of layers along the split axis (empty: equal); heads, rows and units stay whole.
    `space_grid`: into how many parts each spatial dim is cut (empty: the first one into all); `context`: how
    attention is computed over the context axis. `made_for`: modules of the model it was made for, with kind and number
    of parameters (numbered siblings as one, layers.0-11.query); empty where nobody wrote it down.
    """

    batch: BatchPlan
    mesh: dict[AxisName, int] = field(default_factory=lambda: {"replicate": 1})
    layout: tuple[LayoutRule, ...] = (LayoutRule(),)
    shares: tuple[float, ...] = ()
    split_shares: tuple[float, ...] = ()
    precision: Precision = "full"
    sync: Sync = Sync()
    sharding: Sharding = Sharding()
    pipeline: Pipeline = Pipeline()
    space_grid: tuple[int, ...] = ()
    context: ContextKind = "ring"
    made_for: dict[str, str] = field(default_factory=dict)
    version: int = 1

    def __post_init__(self) -> None:
        if not self.mesh:
            raise PlanError('mesh is empty; write {"replicate": 1} for one device')
        for axis, degree in self.mesh.items():
            _positive(degree, f"mesh.{axis}")
        degree = self.data_parallel_degree
        if self.shares and len(self.shares) != degree:
            raise PlanError(
                f"shares has {len(self.shares)} entries, but the mesh has {degree} data-parallel ranks "
                f"({' x '.join(DATA_AXES)}); give one share for each, or none for equal shares"
            )
        space = self.degree("space")
        if self.space_grid and math.prod(self.space_grid) != space:
            raise PlanError(
                f"space_grid = {list(self.space_grid)} makes {math.prod(self.space_grid)} parts, but mesh.space = "
                f"{space}; make them agree"
            )
        if any(not math.isfinite(share) or share < 0 for share in self.shares):
            raise PlanError(f"shares = {list(self.shares)}; every share must be a number of 0 or more")
        if self.shares and sum(self.shares) <= 0:
            raise PlanError("shares are all 0; give at least one rank a share above 0")
        self._check_split_shares()

    def _check_split_shares(self) -> None:
        if self.split_shares and len(self.split_shares) != self.degree("split"):
            raise PlanError(
                f"split_shares has {len(self.split_shares)} entries, but mesh.split = {self.degree('split')}; give one "
                "share for each place along the split axis, or none for equal parts"
            )
        if any(not math.isfinite(share) or share <= 0 for share in self.split_shares):
            raise PlanError(
                f"split_shares = {list(self.split_shares)}; every share must be a number above 0: each split rank "
                "computes a part of every divided layer"
            )

    def compressed(self, how: Compression | None) -> "Plan":
        """The same plan with its gradients summed so; as it is for None."""
        return self if how is None else replace(self, sync=replace(self.sync, compress=how))

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh.values())

    def degree(self, *axes: AxisName) -> int:
        """Ranks of the joint group of `axes`; 1 for axes the mesh does not have."""
        return math.prod(self.mesh.get(axis, 1) for axis in axes)

    @property
    def split_weights(self) -> tuple[float, ...]:
        """The shares by which layers are cut over the split axis; empty where parts are equal, said or not."""
        return self.split_shares if len(set(self.split_shares)) > 1 else ()

    @property
    def data_parallel_degree(self) -> int:
        """Ranks that share every slice of the global batch."""
        return self.degree(*DATA_AXES)
