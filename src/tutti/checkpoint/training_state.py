"""The training state: everything that a checkpoint saves and a resumed run restores."""

from dataclasses import dataclass, field
from typing import Any

import torch

from tutti.data.share_loader import ShareLoader
from tutti.local_sgd.consistency import Consistency
from tutti.parallel.data.noise_meter import NoiseMeter
from tutti.parallel.parallel_model import ParallelModel


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters of a run.

    Attributes:
        step: updates made, skipped ones included.
        epoch: the epoch that the script is in, from 0.
        samples_seen: samples of all ranks.
        tokens_seen: tokens of all ranks, if the data says how many a sample has.
        base_steps: updates in steps of AdaScale's base batch; equal to the updates under other learning-rate rules.
        total_epochs: epochs that the script asked for; None if it did not say.
    """

    step: int = 0
    epoch: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    base_steps: float = 0.0
    total_epochs: int | None = None


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """Everything that training resumes from: the model with its optimizers, the loader's position, and the counters.

    Attributes:
        consistency: how replicas are kept together; holds the state of replicas that have diverged.
        scheduler: the user's learning-rate scheduler, or None.
        scaler: loss scaling; disabled except for float16.
        noise: the meter of the gradient noise scale, with its averages.
    """

    parallel: ParallelModel
    consistency: Consistency
    loader: ShareLoader
    scheduler: Any
    scaler: torch.amp.GradScaler
    noise: NoiseMeter
    progress: Progress = field(default_factory=Progress)
