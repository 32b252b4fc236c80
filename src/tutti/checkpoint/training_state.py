"""The training state: everything that a checkpoint saves and a resumed run restores."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tutti.checkpoint.sources import Source
from tutti.data.share_loader import ShareLoader
from tutti.local_sgd.consistency import Consistency
from tutti.optim.schedules import Schedules
from tutti.parallel.data.noise_meter import NoiseMeter
from tutti.parallel.parallel_model import ParallelModel


class StatefulParts(Protocol):
    """Parts with a state of plain values; false if there is none."""

    def __bool__(self) -> bool: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class OptimizerClock:
    """Counters of one optimizer.

    Attributes:
        updates: updates of this optimizer, skipped ones included.
        base_steps: its updates in steps of AdaScale's base batch; under other learning-rate rules, the updates made.
    """

    updates: int = 0
    base_steps: float = 0.0


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters of a run.

    Attributes:
        step: updates made, skipped ones included; an update of one of several optimizers counts as one.
        epoch: the epoch that the script is in, from 0.
        samples_seen: samples of all ranks.
        tokens_seen: tokens of all ranks, if the data says how many a sample has.
        clocks: the updates of each optimizer.
        total_epochs: epochs that the script asked for; None if it did not say.
        recent_losses: the last losses of each loss function, if the Job has a limit for them.
    """

    step: int = 0
    epoch: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    clocks: list[OptimizerClock] = field(default_factory=list)
    total_epochs: int | None = None
    recent_losses: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Average:
    """An average of the weights over updates.

    Attributes:
        updates: the updates that are in it.
        tensors: this rank's parts of the averaged parameters, by name.
        buffers: the same of buffers, where they are not the model's.
    """

    updates: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """Everything that training resumes from: the model with its optimizers, the loader's position, and the counters.

    Attributes:
        consistency: how replicas are kept together; holds the state of replicas that have diverged.
        schedules: the user's learning-rate schedulers.
        scaler: loss scaling; disabled except for float16.
        noise: the meter of the gradient noise scale, with its averages.
        callbacks: the script's callbacks, whose state on rank 0 is saved.
        averages: averages of the weights that the script keeps, by name.
        raised_microbatches: the number of microbatches that a lack of memory has raised the plan's to; None: none.
        resumed_from: the checkpoint that the run was resumed from, in words; empty for none.
        reopen: opens it again, for what is restored later. Collective.
    """

    parallel: ParallelModel
    consistency: Consistency
    loader: ShareLoader
    schedules: Schedules
    scaler: torch.amp.GradScaler
    noise: NoiseMeter
    progress: Progress = field(default_factory=Progress)
    callbacks: StatefulParts | None = None
    averages: dict[str, Average] = field(default_factory=dict)
    raised_microbatches: int | None = None
    resumed_from: str = ""
    reopen: Callable[[], Source] | None = None

    def __post_init__(self) -> None:
        if not self.progress.clocks:
            self.progress.clocks = [OptimizerClock() for _ in self.parallel.optimizers]
