"""The plan: how a job is spread over ranks, as readable JSON. Nothing in it is measured."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BeforeValidator

from tutti.config.compression import Compression
from tutti.config.consistency_modes import Relaxed, check_mode_parameters
from tutti.config.mesh_axes import without_aliases
from tutti.config.vocabulary import (
    DATA_AXES,
    AxisName,
    BucketSizes,
    ContextKind,
    LastBatch,
    Offload,
    OffloadDevice,
    Placement,
    Precision,
    Recompute,
    ScheduleName,
    ShardEngine,
    ShardLevel,
    Unit,
)
from tutti.errors import PlanError


def _positive(value: int, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise PlanError(f"{name} = {value!r} is not a whole number; give a number of 1 or more")
    if value < 1:
        raise PlanError(f"{name} = {value}; give a number of 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRule:
    """How modules whose dotted names match a glob are placed.

    Where several rules match, each attribute is taken from the last of them that sets it.

    Attributes:
        modules: glob over dotted module names; "*" matches all of them.
        placement: what is done with the module; auto sets nothing.
        recompute: whether activations are dropped after forward and computed again in backward. "selective" saves the
            outputs of expensive operators. None sets nothing.
        chunks: the module runs on this many parts of its batch, one after another, and recomputes part by part.
        offload: whether what the module saves for backward is in the host's memory until then. None sets nothing.
    """

    modules: str = "*"
    placement: Placement = "auto"
    recompute: bool | Recompute | None = None
    chunks: int | None = None
    offload: bool | None = None

    def __post_init__(self) -> None:
        if not self.modules:
            raise PlanError("modules is empty; write '*' for all modules, or a glob over their dotted names")
        if self.chunks is not None:
            _positive(self.chunks, "chunks")


def find_placement(layout: Sequence[LayoutRule], name: str) -> Placement:
    """Return the placement that the layout gives the module `name`; auto where no rule sets it."""
    placements = [rule.placement for rule in layout if rule.placement != "auto" and fnmatchcase(name, rule.modules)]
    return placements[-1] if placements else "auto"


def by_columns(placement: Placement, inputs: float, outputs: float) -> bool:
    """Return whether a linear layer divided over the table axis is cut by its outputs.

    The placement decides; "split" chooses what sends less. With P ranks, each sample sends this many values in each
    direction: (P - 1)(inputs + outputs / P) if the layer is cut by its outputs (columns), and (P - 1)(inputs / P +
    outputs) if it is cut by its inputs (rows).
    """
    return placement == "column" or (placement == "split" and inputs <= outputs)


def find_recompute(layout: Sequence[LayoutRule], name: str) -> bool | Recompute:
    """Return whether and how the layout recomputes the module `name`."""
    recompute: bool | Recompute | None = _setting(layout, name, "recompute")
    return recompute or False


def find_chunks(layout: Sequence[LayoutRule], name: str) -> int:
    """Return the number of parts into which the layout cuts the batch of the module `name`."""
    chunks: int | None = _setting(layout, name, "chunks")
    return chunks or 1


def find_offload(layout: Sequence[LayoutRule], name: str) -> bool:
    """Return whether the layout keeps what the module `name` saves for backward on the host."""
    return bool(_setting(layout, name, "offload"))


def _setting(layout: Sequence[LayoutRule], name: str, option: str) -> Any:
    """Return what the last rule that states an option for the module says; None where none does."""
    for rule in reversed(layout):
        setting = getattr(rule, option)
        if setting is not None and fnmatchcase(name, rule.modules):
            return setting
    return None


def _check_ramp(ramp: Sequence[tuple[int, int]], last: int) -> None:
    steps, sizes = [0, *(until for until, _ in ramp)], [0, *(size for _, size in ramp), last]
    if any(a >= b for numbers in (steps, sizes) for a, b in pairwise(numbers)):
        raise PlanError(
            f"ramp = {[list(pair) for pair in ramp]} with global_batch_size = {last}; give (until, size) pairs whose "
            "steps and sizes both grow, from above 0 to below the global batch"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The global batch, and how it is cut into microbatches.

    The global batch is cut in order into `num_microbatches` slices. The data-parallel ranks share each slice.

    Attributes:
        global_batch_size: samples or tokens per step.
        unit: what `global_batch_size` counts.
        num_microbatches: slices per step.
        last_batch: whether the short last batch of an epoch is kept or dropped.
        ramp: (until, size) pairs by which the batch grows to `global_batch_size`. Batches numbered below `until`,
            counted from 0 over all epochs, have `size` samples. The order of the samples does not change.
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
        """Return the size of the global batch with this number, counted from 0 over all epochs."""
        return next((size for until, size in self.ramp if number < until), self.global_batch_size)

    @property
    def smallest(self) -> int:
        """The size of the first batch, which is the smallest."""
        return self.size_at(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """How replicas are kept equal, or how far they may diverge.

    Attributes:
        mode: the consistency mode.
        bucket_nbytes: gradients are packed into buckets of about this size before they are reduced.
        bucket_sizes: whether that size is fixed, or the first steps try others.
        compress: the codec of gradients; in a mode whose replicas diverge, the codec of what they exchange.
        relaxed: parameters of the mode.
    """

    mode: str = "synchronous"
    bucket_nbytes: int = 25 * 2**20
    bucket_sizes: BucketSizes = "stated"
    compress: Compression | None = None
    relaxed: Relaxed = field(default_factory=Relaxed)

    def __post_init__(self) -> None:
        _positive(self.bucket_nbytes, "bucket_nbytes")
        check_mode_parameters(self.mode, self.relaxed)

    @property
    def gradient_code(self) -> Compression | None:
        """The codec of gradient reductions; None for exact ones.

        A mode that starts with synchronous updates uses no codec with error feedback for them: its residual would be
        lost when the replicas diverge.
        """
        if self.mode == "synchronous":
            return self.compress
        keeps = self.compress is not None and self.compress.keeps
        return self.compress if self.relaxed.after and not keeps else None

    @property
    def at_first(self) -> "SyncPlan":
        """The synchronisation of the first `relaxed.after` updates, for a mode that starts with synchronous ones."""
        return replace(self, mode="synchronous", relaxed=Relaxed(), compress=self.gradient_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """What the `shard` axis divides among its ranks, what is kept in host memory, and what runs it.

    Attributes:
        level: what is divided.
        offload: what is kept in host memory.
        engine: what gathers parameters and reduces gradients at levels 2 and 3.
        offload_device: where the optimizer's state lies then.
        nvme_path: folder of its files; empty for the run folder.
    """

    level: ShardLevel = 3
    offload: Offload = "none"
    engine: ShardEngine = "auto"
    offload_device: OffloadDevice = "cpu"
    nvme_path: str = ""

    @property
    def on_disk(self) -> bool:
        """Whether the optimizer's state lies in files."""
        return self.offload != "none" and self.offload_device == "nvme"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """How the `stage` axis runs.

    Attributes:
        schedule: order of the microbatches on each stage.
        stages_per_rank: stages that each rank owns; above 1 only for the interleaved schedule.
        cuts: names of the modules at which a new stage begins; none to cut by cost.
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

    Attributes:
        batch: the global batch and its microbatches.
        mesh: degree of each axis, outermost first. The product is the world size.
        layout: rules for the placement of modules.
        shares: relative loads of the data-parallel ranks; empty for equal loads. (3, 1) gives the first rank three
            quarters of every microbatch. Means are weighted by the samples that each rank really gets.
        split_shares: relative parts of layers along the split axis; empty for equal parts. Heads, rows and units stay
            whole.
        precision: number format of the computation.
        sync: how replicas are kept equal.
        sharding: what the shard axis divides.
        pipeline: how the stage axis runs.
        space_grid: number of parts of each spatial dim; empty to cut the first dim only.
        context: how attention is computed over the context axis.
        share_device: ranks may compute on the same accelerator, which is for proving a plan, not for speed.
        made_for: modules of the model the plan was made for, with class and number of parameters; empty where unknown.

    Examples:
        >>> plan = Plan(batch=BatchPlan(global_batch_size=64), mesh={"replicate": 2, "split": 4}, precision="bfloat16")
        >>> plan.world_size, plan.degree("split")
        (8, 4)
    """

    batch: BatchPlan
    mesh: Annotated[dict[AxisName, int], BeforeValidator(without_aliases)] = field(
        default_factory=lambda: {"replicate": 1}
    )
    layout: tuple[LayoutRule, ...] = (LayoutRule(),)
    shares: tuple[float, ...] = ()
    split_shares: tuple[float, ...] = ()
    precision: Precision = "full"
    sync: SyncPlan = SyncPlan()
    sharding: ShardingPlan = ShardingPlan()
    pipeline: PipelinePlan = PipelinePlan()
    space_grid: tuple[int, ...] = ()
    context: ContextKind = "ring"
    share_device: bool = False
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
                "share for each rank along the split axis, or none for equal parts"
            )
        if any(not math.isfinite(share) or share <= 0 for share in self.split_shares):
            raise PlanError(
                f"split_shares = {list(self.split_shares)}; every share must be a number above 0: each split rank "
                "computes a part of every divided layer"
            )

    def on(self, mesh: dict[AxisName, int]) -> "Plan":
        """Return the plan on another mesh. A sharding level that was left open is one that the mesh allows."""
        stages = mesh.get("stage", 1) > 1 and mesh.get("shard", 1) > 1
        unstated = replace(self.sharding, engine="auto") == ShardingPlan()
        sharding = replace(self.sharding, level=1) if stages and unstated else self.sharding
        return replace(self, mesh=mesh, sharding=sharding)

    def compressed(self, how: Compression | None) -> "Plan":
        """Return the plan with gradients compressed by `how`; unchanged for None."""
        return self if how is None else replace(self, sync=replace(self.sync, compress=how))

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh.values())

    def degree(self, *axes: AxisName) -> int:
        """Return the size of the joint group of `axes`; axes that the mesh does not have count as 1."""
        return math.prod(self.mesh.get(axis, 1) for axis in axes)

    @property
    def split_weights(self) -> tuple[float, ...]:
        """The shares by which layers are cut over the split axis; empty where the parts are equal."""
        return self.split_shares if len(set(self.split_shares)) > 1 else ()

    @property
    def data_parallel_degree(self) -> int:
        """Number of ranks that share every microbatch."""
        return self.degree(*DATA_AXES)
