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
from tutti.config.run_folder import RunFolder
from tutti.data.share_loader import ShareLoader
from tutti.errors import PlanError
from tutti.local_sgd.consistency import Consistency
from tutti.optim.learning_rate import LRRule
from tutti.parallel.context import Sequences
from tutti.parallel.data.batchnorm import BatchScope
from tutti.parallel.data.bucket_size_tuner import BucketSizeTuner
from tutti.parallel.data.replicate import Replica
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.trainer.metrics import MetricsLog, ProgressDisplay, Throughput
from tutti.trainer.noise_meter import NoiseMeter
from tutti.trainer.observer import Observer

if TYPE_CHECKING:
    from tutti.checkpoint.tensor_files import PendingCheckpoint

if TYPE_CHECKING:
    from tutti.parallel.pipeline.pipeline_runner import Pipeline
from torch.nn.modules.batchnorm import _NormBase

Unpack = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any], Any]]
"""batch -> (positional arguments, keyword arguments, target)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """The settings passed to Job."""

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


class RunningStatistics:
    """Running statistics of the model's norm layers, saved before each step so that a skipped step can restore them."""

    def __init__(self, model: nn.Module) -> None:
        self._norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        self._live: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []

    def keep(self) -> None:
        """Save the statistics at the start of a step."""
        found = [one for norm in self._norms if norm.training for one in norm._buffers.values() if one is not None]
        live = [one for one in found if not one.is_meta]  # on another stage's ranks
        if [*map(id, live)] != [*map(id, self._live)]:
            self._live, self._kept = live, [torch.empty_like(one) for one in live]
        if live:
            torch._foreach_copy_(self._kept, live)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the statistics saved by `keep`."""
        if self._live:
            torch._foreach_copy_(self._live, self._kept)


@dataclass(slots=True, kw_only=True)
class Run:
    """One prepared model on its way through training. Parts are set once, by `prepare`; `progress` moves. `mixtures`:
    names of the whole model's mixtures of experts.
    """

    settings: JobSettings
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
    screen: ProgressDisplay
    folder: RunFolder
    observer: Observer
    noise: NoiseMeter
    consistency: Consistency
    sizes: BucketSizeTuner
    progress: Progress = field(default_factory=Progress)
    throughput: Throughput = field(default_factory=Throughput)
    data_facts: dict[str, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    pending: "PendingCheckpoint | None" = None
    mixtures: tuple[str, ...] = ()
    statistics: RunningStatistics = field(init=False)

    def __post_init__(self) -> None:
        self.statistics = RunningStatistics(self.model)

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
