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
    """Peak bytes on the fullest rank, by what holds them."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    communication: float
    buffers: float
    reserve: float  # allocator, libraries, the interpreter

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
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One plan's estimated cost. `phases`: seconds of a step by phase on the slowest rank.

    `fits`: whether `memory` is within the smallest device's memory. `notes` say in words what limits the step and
    which constants are assumptions.
    """

    plan_digest: str
    step_time_s: Estimate
    phases: dict[Phase, float]
    memory_nbytes: Estimate
    memory: RankMemory
    fits: bool
    sent_nbytes_per_rank: float  # gradients, per step
    throughput_per_s: float  # samples or tokens (the plan's unit) a second
    model_flops_per_s: float
    devices: int
    notes: tuple[str, ...] = ()
    version: int = 1
