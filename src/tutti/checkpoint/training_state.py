"""The training state: everything a checkpoint saves and a resumed run restores."""

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
        tokens_seen: tokens of all ranks, where the data says how many a sample has.
        base_steps: updates, each counted by AdaScale's gain where that is the learning-rate rule.
        total_epochs: epochs that the script asked for; None where it did not say.
    """

    step: int = 0
    epoch: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    base_steps: float = 0.0
    total_epochs: int | None = None


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """What training resumes from: the model with its optimizers, the loader's position, and the counters."""

    parallel: ParallelModel
    consistency: Consistency
    loader: ShareLoader
    scheduler: Any
    scaler: torch.amp.GradScaler
    noise: NoiseMeter
    progress: Progress = field(default_factory=Progress)
