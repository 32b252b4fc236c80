"""Run: the parts that stand once a Job is prepared, and the few counters that move."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.comm.clock import PhaseClock
from tutti.comm.world import World
from tutti.config.plan import Plan
from tutti.config.run import RunFolder
from tutti.data.loader import ShareLoader
from tutti.errors import PlanError
from tutti.local_sgd.mode import Consistency
from tutti.optim.lr_rule import LRRule
from tutti.parallel.context import Sequences
from tutti.parallel.data.batchnorm import BatchScope
from tutti.parallel.data.bucket_sizes import BucketSizes
from tutti.parallel.data.replicate import Replica
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.trainer.metrics import MetricsLog
from tutti.trainer.noise import NoiseMeter
from tutti.trainer.observe import Observer
from tutti.trainer.screen import Screen, Throughput
from tutti.trainer.statistics import Statistics

if TYPE_CHECKING:
    from tutti.checkpoint.save import Pending

if TYPE_CHECKING:
    from tutti.parallel.pipeline.pipeline import Pipeline

Unpack = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any], Any]]
"""batch -> (positional arguments, keyword arguments, target)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user said to Job, as said."""

    seed: int
    clip_norm: float | None
    lr_rule: LRRule | None
    on_nonfinite: Literal["stop", "skip"]
    checkpoint_every: int | None
    keep_checkpoints: int
    noise_every: int | None = None

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise PlanError(f"clip_norm = {self.clip_norm}; give a number above 0, or None for no clipping")
        if self.on_nonfinite not in ("stop", "skip"):
            raise PlanError(f"on_nonfinite = {self.on_nonfinite!r}; use 'stop' or 'skip'")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise PlanError(f"checkpoint_every = {self.checkpoint_every}; give a number of steps of 1 or more, or None")
        if self.noise_every is not None and self.noise_every < 1:
            raise PlanError(f"noise_every = {self.noise_every}; give a number of steps of 1 or more, or None")
        if self.keep_checkpoints < 0:
            raise PlanError(f"keep_checkpoints = {self.keep_checkpoints}; give 0 or more")


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters of a run; with the loader's epoch and position they are what a checkpoint resumes from. `base_steps`:
    updates, each by AdaScale's gain where that is the rule.
    """

    step: int = 0
    epoch: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    base_steps: float = 0.0
    total_epochs: int | None = None


@dataclass(slots=True, kw_only=True)
class Run:
    """One prepared model on its way through training. Parts are set once, by `prepare`; `progress` moves. `mixtures`:
    names of the whole model's mixtures of experts.
    """

    settings: Settings
    plan: Plan
    world: World
    layout: Layout
    model: nn.Module
    replica: Replica
    pipeline: "Pipeline | None"
    optimizers: tuple[Optimizer, ...]
    sequences: Sequences
    loss_fn: Callable[[Any, Any], Any] | None
    unpack: Unpack
    scheduler: Any
    scheduler_clock: Literal["step", "epoch"]
    initial_rates: tuple[float, ...]
    loader: ShareLoader
    scaler: torch.amp.GradScaler
    scope: BatchScope
    clock: PhaseClock
    log: MetricsLog
    screen: Screen
    folder: RunFolder
    observer: Observer
    noise: NoiseMeter
    consistency: Consistency
    sizes: BucketSizes
    progress: Progress = field(default_factory=Progress)
    throughput: Throughput = field(default_factory=Throughput)
    data_facts: dict[str, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    pending: "Pending | None" = None
    mixtures: tuple[str, ...] = ()
    statistics: Statistics = field(init=False)

    def __post_init__(self) -> None:
        self.statistics = Statistics(self.model)

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, on ranks where `gives_output`."""
        return self.model(*args, **kwargs) if self.pipeline is None else self.pipeline.forward(self.model, args, kwargs)

    @property
    def gives_output(self) -> bool:
        """Whether outputs and losses appear on this rank: on those of a pipeline's last stage, or on all."""
        return self.pipeline is None or self.pipeline.is_last

    @property
    def copies(self) -> int:
        """Ranks that compute one and the same loss, of which one counts."""
        return self.mesh.degree("split", "space")

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None for a stream, and where the batch grows, for epochs then differ."""
        return None if self.loader.source.is_stream or self.plan.batch.ramp else len(self.loader)
