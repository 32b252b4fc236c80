"""What a planner is asked and what it answers: Request, Alternative, Choice. Plain data, as all specs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tutti.config.mesh_axes import format_mesh
from tutti.config.plan import BatchPlan, Plan
from tutti.config.prediction import Prediction
from tutti.config.sync_notation import format_relaxation
from tutti.config.vocabulary import AxisName, Evidence, Precision, Relaxation
from tutti.errors import PlanError

PrecisionPolicy = Literal["script", "auto"] | Precision
"""script: keep what the script asks for; auto: choose by predicted time; else exactly this one."""

Scope = Literal["data", "prefer-data", "all"]
"""data: data parallelism only; prefer-data: other meshes only where nothing of it fits; all: every mesh."""

Objective = Literal["throughput", "device-hours", "cost", "energy", "memory", "time-to-quality"]
"""What the best plan has least of: time of a step, devices times time, price, energy, memory of the fullest rank, or
time until a quality is reached, for which the global batch may change."""


_NUMBERS = {
    "train_samples": "the length of the whole training, in what the batch counts",
    "memory_nbytes": "the bytes that a rank may take",
    "budget": "what the whole training may cost",
    "deadline_s": "the seconds that the whole training may take",
}
"""Numbers of a Request and what they mean."""


def _finite(value: float, name: str, meaning: str) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise PlanError(f"{name} = {value}, {meaning}; give a finite number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """How many samples a quality takes at each global batch, in the plan's unit.

    `critical_batch`: at which twice the least samples are needed; `least_samples`: needed at very small batches.
    """

    critical_batch: float
    least_samples: float
    evidence: Evidence = "assumed"

    def __post_init__(self) -> None:
        _finite(self.critical_batch, "critical_batch", "the batch at which a quality takes twice the least samples")
        _finite(self.least_samples, "least_samples", "the samples that a quality takes with very small batches")
        if not math.isfinite(self.least_samples / self.critical_batch * 2.0**63):
            raise PlanError(
                f"critical_batch = {self.critical_batch} with least_samples = {self.least_samples}: no number of steps "
                "could be counted; give numbers such as training has"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What may vary. `script`: the plan the script's Job implies on one device: its batch, precision, layout, sync.

    `max_devices`: ranks to use at most; `degree`: exactly so many. `allow_microbatches`: num_microbatches may
    change even where that changes results (a model with batch statistics). `keep_microbatches`: it may not change
    at all. `scope`: which meshes are tried; `mesh`: exactly this one; `demanded`: degrees that the script's annotations
    ask for as soon as there are two ranks, 0 for any above one. `train_samples`: of the whole training, in the plan's
    unit. Limits: `memory_nbytes` of a rank, `budget` in the cluster's currency, `deadline_s` of the whole training.
    `relax`: whether ways to send less are tried that change what is computed. `samples`: by such a way (as in
    plan.ways: powersgd,rank=1; local:period=8) how many times the samples of exact runs it takes to the same quality,
    where past runs measured it; None where they did not get there, or the model cannot go that way.
    """

    script: Plan
    max_devices: int | None = None
    degree: int | None = None
    precision: PrecisionPolicy = "script"
    allow_microbatches: bool = False
    keep_microbatches: bool = False
    scope: Scope = "data"
    mesh: dict[AxisName, int] | None = None
    demanded: dict[AxisName, int] = field(default_factory=dict)
    objective: Objective = "throughput"
    train_samples: float | None = None
    noise: NoiseScale | None = None
    memory_nbytes: float | None = None
    budget: float | None = None
    deadline_s: float | None = None
    relax: Relaxation = "exact"
    samples: dict[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, count in (("max_devices", self.max_devices), ("degree", self.degree)):
            if count is not None and count < 1:
                raise PlanError(f"{name} = {count}; give a number of 1 or more")
        for name, meaning in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None:
                _finite(value, name, meaning)
        self._check_ranks()
        self._check_relax()
        if self.objective == "time-to-quality" and self.noise is None:
            raise PlanError(
                "the objective time-to-quality needs to know how many samples a quality takes at each batch; give the "
                "critical batch and the least samples (measured by a run, or assumed)"
            )

    def _check_ranks(self) -> None:
        """Refuse numbers of ranks that contradict each other, rather than let one of them win unseen."""
        asked = {"degree": self.degree, "mesh": None if self.mesh is None else math.prod(self.mesh.values())}
        said = {name: many for name, many in asked.items() if many is not None}
        if len(set(said.values())) > 1:
            raise PlanError(
                f"degree (--nproc) asks for exactly {self.degree} ranks, but mesh = {format_mesh(self.mesh or {})} "
                f"has {said['mesh']}; make them agree, or leave one out"
            )
        for name, many in said.items():
            if self.max_devices is not None and many > self.max_devices:
                raise PlanError(
                    f"{name} asks for exactly {many} ranks, but max_devices = {self.max_devices} allows no more than "
                    f"{self.max_devices}; raise it, ask for fewer ranks, or leave one out"
                )
        beyond = [axis for axis, degree in (self.mesh or {}).items() if degree > 1 and axis != "replicate"]
        if self.scope == "data" and beyond:
            raise PlanError(
                f"only data parallelism is to be considered, but mesh = {format_mesh(self.mesh or {})} divides the "
                f"model along {beyond[0]}; leave one out, or ask for replicate alone"
            )

    def _check_relax(self) -> None:
        sync = self.script.sync
        if self.relax != "exact" and (sync.mode != "synchronous" or sync.compress is not None):
            raise PlanError(
                f"--relax is {self.relax}, which chooses how gradients and replicas are kept together, and "
                f"{format_relaxation(sync)} says how; leave one out"
            )
        for words, factor in self.samples.items():
            if factor is not None and not factor > 0:
                raise PlanError(f"samples of {words} = {factor}; give a number above 0, such as 1.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a whole training costs by a plan, or one step of it where `steps` is unknown.

    `cost` and `energy_kwh` are None where the cluster has no prices or powers. `evidence`: of the number of steps.
    """

    steps: int | None
    time_s: float
    device_hours: float
    cost: float | None = None
    energy_kwh: float | None = None
    evidence: Evidence = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that was not chosen, and why, in words. No prediction where it cannot be costed."""

    plan: Plan
    prediction: Prediction | None
    reason: str
    totals: Totals | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How far the search went, in plans. `too_large` and `too_slow` were ruled out by bounds that no prediction is
    below; `refused` cannot be costed; `left` were not looked at. `gap`: by which part of the best plan's value one of
    those left could be better at most; 0 where none is left.
    """

    considered: int
    too_large: int
    too_slow: int
    costed: int
    refused: int
    left: int
    gap: float


def step_s(prediction: Prediction, size: int, whole: int) -> float:
    """Seconds of a step of `size`, where one of `whole` was predicted: work on samples and their loading in proportion,
    the rest, which is of parameters and calls, as it is. Exchanges that were hidden are taken to stay hidden."""
    passes = prediction.phases["data"] + prediction.phases["forward"] + prediction.phases["backward"]
    return prediction.step_time_s.value - passes * (1.0 - size / whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxationGain:
    """What opening the dial brought. `strategy`: the best one found, as a user types it; empty where none is better.

    `exact_step_s`, `step_s`: of the best exact plan and of the best that goes this way; `samples`: how many times the
    samples of exact training it is counted with, and the `evidence` of that. It is `chosen` where it takes less with
    them, also if links are `links` times as fast as predicted and its kernels `kernels` times as slow.
    """

    relax: Relaxation
    chosen: bool = False
    strategy: str = ""
    exact_step_s: float
    step_s: float
    samples: float = 1.0
    evidence: Evidence = "assumed"
    links: float = 1.0
    kernels: float = 1.0
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan chosen, its prediction, and the others, the fastest first. `remarks`: the choice in plain words.

    `changes`: what would have to change for another plan to win. `nodes`: the cluster's kinds of nodes in the order in
    which ranks are seated; the cluster's own order where it is empty. `relaxation`: what ways to send less would bring,
    where the request allows any.
    """

    model: str
    cluster: str
    request: PlanRequest
    best: Plan
    prediction: Prediction
    alternatives: tuple[Alternative, ...]
    remarks: tuple[str, ...] = ()
    totals: Totals | None = None
    changes: tuple[str, ...] = ()
    coverage: Coverage | None = None
    nodes: tuple[str, ...] = ()
    relaxation: RelaxationGain | None = None
    version: int = 1


MOST_DOUBLINGS = 16
"""Sizes of the global batch above the script's own that are tried at most."""


def samples_to_quality(batch: float, noise: NoiseScale) -> float:
    """Samples needed with a global batch: E = E_min (1 + B / B_crit), B in the unit of the noise scale.

    McCandlish, Kaplan, Amodei and others 2018, arXiv 1812.06162, equations 2.11 and 2.12: steps S and samples E = S B
    obey (S / S_min - 1) (E / E_min - 1) = 1. As good as the noise scale's evidence, which goes with every use.
    """
    return noise.least_samples * (1.0 + batch / noise.critical_batch)


def steps_to_quality(batch: float, noise: NoiseScale) -> float:
    """Steps needed: S = S_min (1 + B_crit / B)."""
    return samples_to_quality(batch, noise) / batch


def batches_to_try(own: int, noise: NoiseScale, ranks: int) -> tuple[int, ...]:
    """Global batches worth a search: the script's own, times and by powers of two, up to 4 times the critical one,
    and no batch of more samples than the quality takes at least.

    Beyond that the steps fall by less than a fifth with any batch, while samples grow in proportion.
    """
    most = max(float(own), min(4 * noise.critical_batch, noise.least_samples))
    least = max(1.0, min(own, noise.critical_batch) / 4, min(float(own), float(ranks)) / 4)
    found = {own}
    batch = own
    while batch * 2 <= most and len(found) <= MOST_DOUBLINGS:
        batch *= 2
        found.add(batch)
    batch = own
    while batch // 2 >= least and batch % 2 == 0:
        batch //= 2
        found.add(batch)
    return tuple(sorted(found))


def sizes_of(batch: BatchPlan, samples: float) -> list[tuple[int, int]]:
    """(size, steps) in order, of a training over so many samples in the batch's unit."""
    return _walk(batch, samples, float)


def sizes_to_quality(batch: BatchPlan, noise: NoiseScale) -> list[tuple[int, int]]:
    """The same of a training to a quality: a step of the batch B counts B / (1 + B / critical batch) of the least
    samples (plan.quality, for a batch that does not stay)."""
    return _walk(batch, noise.least_samples, lambda size: size / (1.0 + size / noise.critical_batch))


def _walk(batch: BatchPlan, needed: float, worth: Callable[[int], float]) -> list[tuple[int, int]]:
    found, left, done = list[tuple[int, int]](), needed, 0
    for until, size in (*batch.ramp, (None, batch.global_batch_size)):
        steps = math.ceil(left / worth(size))
        if until is not None:
            steps = min(steps, until - done)
            done = until
        if steps > 0:
            found.append((size, steps))
        left -= steps * worth(size)
        if left <= 0:
            break
    return found
