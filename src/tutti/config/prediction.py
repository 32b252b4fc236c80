"""Prediction: what a plan is estimated to cost on a cluster, before it runs."""

from dataclasses import dataclass
from typing import Literal

Phase = Literal["data", "forward", "backward", "exposed_communication", "optimizer", "evaluation", "other"]
"""The parts of a run's wall time; they add up to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with the interval it is expected in."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Peak bytes on the fullest rank, by what holds them. `script`: the script's own libraries and data."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    communication: float
    buffers: float
    reserve: float  # allocator, libraries, the interpreter
    script: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.communication
            + self.buffers
            + self.reserve
            + self.script
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The steps of a warm-up until so many updates, from the end of the stretch before: their time and bytes."""

    until: int
    step_time_s: float
    sent_nbytes_per_rank: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One plan's estimated cost. `phases`: seconds of a step by phase on the slowest rank.

    `fits`: whether `memory` is within the smallest device's memory. `notes` say in words what limits the step and
    which constants are assumptions. `first`: the steps before those that the rest is of, where plans begin with others
    (sums that are exact until a second moment stands, that grow thin, replicas that differ only later).

    `sent_nbytes_per_rank`: bytes that the rank which sends most sends in a step, forward and backward of all
    microbatches and what is recomputed. Counted are gradients, divided parameters and activations: a sum over n ranks
    as a ring sends it, 2 (n - 1) / n of the tensor; a sum of which each rank keeps a part (n - 1) / n; a gather
    (n - 1) times the rank's part; halos, rows for experts and tables, keys and values on a ring, and messages between
    stages as they are, without what stays on the rank. Not counted are losses, norms, batch statistics, and how many
    rows or which indices are asked for. A run's step row counts alike: `sent_nbytes` + `exchanged_nbytes`.
    """

    plan_digest: str
    step_time_s: Estimate
    phases: dict[Phase, float]
    memory_nbytes: Estimate
    memory: RankMemory
    fits: bool
    sent_nbytes_per_rank: float
    throughput_per_s: float  # samples or tokens (the plan's unit) a second
    model_flops_per_s: float
    devices: int
    first: tuple[Stretch, ...] = ()
    notes: tuple[str, ...] = ()
    version: int = 1
