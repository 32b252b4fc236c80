"""What the planner is asked and what it answers: PlanRequest, Alternative and Choice, as frozen data."""

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
"""How a precision is chosen.

"script" keeps the script's own, "auto" takes the one that is predicted to be fastest, and anything else is the
precision to use.
"""

Scope = Literal["data", "prefer-data", "all"]
"""data: data parallelism only; prefer-data: other meshes only where no data-parallel plan fits; all: every mesh."""

Objective = Literal["throughput", "device-hours", "cost", "energy", "memory", "time-to-quality"]
"""The quantity that the best plan minimises.

It is the step time, device-hours, the price, the energy, the memory of the fullest rank, or the time until a quality is
reached. Only for the last may the global batch size change.
"""


_NUMBERS = {
    "train_samples": "the length of the whole training, in the batch's unit",
    "memory_nbytes": "the bytes that a rank may take",
    "budget": "what the whole training may cost",
    "deadline_s": "the seconds that the whole training may take",
}
"""Numeric fields of a PlanRequest and their meaning."""


def _finite(value: float, name: str, meaning: str) -> None:
    """Refuse a value that is not a finite number above 0."""
    if not (value > 0 and math.isfinite(value)):
        raise PlanError(f"{name} = {value} ({meaning}); give a finite number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """How many samples a quality takes with each global batch size, in the plan's unit.

    Attributes:
        critical_batch: batch size with which twice `least_samples` are needed.
        least_samples: samples needed with very small batches.
        evidence: where the two numbers come from.
    """

    critical_batch: float
    least_samples: float
    evidence: Evidence = "assumed"

    def __post_init__(self) -> None:
        _finite(self.critical_batch, "critical_batch", "the batch at which a quality takes twice the least samples")
        _finite(self.least_samples, "least_samples", "the samples that a quality takes with very small batches")
        if not math.isfinite(self.least_samples / self.critical_batch * 2.0**63):
            raise PlanError(
                f"critical_batch = {self.critical_batch} with least_samples = {self.least_samples} gives a number of "
                "steps that is too large to count; give the values of a real training"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the planner may vary, what it minimises, and which limits hold.

    Attributes:
        script: the plan that the script's Job implies on one device: its batch, precision, layout and synchronisation.
        max_devices: largest number of ranks.
        degree: exact number of ranks.
        precision: the script's precision, a given one, or the fastest.
        allow_microbatches: the number of microbatches may change even where that changes results (models with batch
            statistics).
        keep_microbatches: the number of microbatches may not change at all.
        scope: which meshes are tried.
        mesh: exactly this mesh.
        demanded: degrees that the script's annotations require from two ranks on; 0 means any degree above 1.
        objective: what the best plan minimises.
        train_samples: length of the whole training, in the plan's unit.
        noise: samples to a quality by batch size; needed for the objective time-to-quality.
        memory_nbytes: limit on the memory of a rank.
        budget: limit on the price of the whole training, in the cluster's currency.
        deadline_s: limit on the seconds of the whole training.
        relax: how far strategies that send less may change what is computed.
        samples: measured samples to the same quality, as a multiple of exact training. The keys are strategies as a
            user types them ("powersgd,rank=1", "local:period=8"). None: the runs did not reach the quality, or the
            model cannot use the strategy.
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
                "the objective time-to-quality needs a noise scale: how many samples a quality takes at each batch "
                "size; give the critical batch and the least samples (measured by a run, or assumed)"
            )

    def _check_ranks(self) -> None:
        """Refuse numbers of ranks that contradict each other, rather than silently preferring one of them."""
        asked = {"degree": self.degree, "mesh": None if self.mesh is None else math.prod(self.mesh.values())}
        given = {name: ranks for name, ranks in asked.items() if ranks is not None}
        if len(set(given.values())) > 1:
            raise PlanError(
                f"degree (--nproc) asks for exactly {self.degree} ranks, but mesh = {format_mesh(self.mesh or {})} "
                f"has {given['mesh']}; make them agree, or leave one out"
            )
        for name, ranks in given.items():
            if self.max_devices is not None and ranks > self.max_devices:
                raise PlanError(
                    f"{name} asks for exactly {ranks} ranks, but max_devices = {self.max_devices} allows no more than "
                    f"{self.max_devices}; raise it, ask for fewer ranks, or leave one out"
                )
        beyond = [axis for axis, degree in (self.mesh or {}).items() if degree > 1 and axis != "replicate"]
        if self.scope == "data" and beyond:
            raise PlanError(
                f"only data parallelism is allowed, but mesh = {format_mesh(self.mesh or {})} divides the "
                f"model along {beyond[0]}; leave one of the two out, or ask for replicate only"
            )

    def _check_relax(self) -> None:
        """Refuse to choose a strategy where the script already has one, and numbers of samples that are not above 0."""
        sync = self.script.sync
        if self.relax != "exact" and (sync.mode != "synchronous" or sync.compress is not None):
            raise PlanError(
                f"--relax {self.relax} lets the planner choose how replicas are synchronised, but the script already "
                f"asks for {format_relaxation(sync)}; leave one out"
            )
        for strategy, factor in self.samples.items():
            if factor is not None and not factor > 0:
                raise PlanError(f"samples of {strategy} = {factor}; give a number above 0, such as 1.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a plan costs over a whole training, or over one step where `steps` is unknown.

    Attributes:
        steps: number of steps of the training.
        time_s: seconds.
        device_hours: devices times hours.
        cost: price; None where the cluster has no prices.
        energy_kwh: energy; None where the cluster has no powers.
        evidence: where the number of steps comes from.
    """

    steps: int | None
    time_s: float
    device_hours: float
    cost: float | None = None
    energy_kwh: float | None = None
    evidence: Evidence = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that was not chosen.

    Attributes:
        plan: the plan.
        prediction: its prediction; None where it cannot be predicted.
        reason: why it was not chosen.
        totals: the whole training with this plan.
    """

    plan: Plan
    prediction: Prediction | None
    reason: str
    totals: Totals | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How far a search went, in numbers of plans.

    Attributes:
        considered: plans in the search space.
        too_large: ruled out because a lower bound of their memory exceeds what there is.
        too_slow: ruled out because a lower bound of their value exceeds that of the best plan.
        costed: predicted.
        refused: cannot be predicted.
        left: not examined.
        gap: the fraction of the best plan's value by which a plan that was left could be better at most; 0 if none
            is left.
    """

    considered: int
    too_large: int
    too_slow: int
    costed: int
    refused: int
    left: int
    gap: float


def step_s(prediction: Prediction, size: int, whole: int) -> float:
    """Return the seconds of a step with another batch size than the predicted one.

    Loading, forward and backward scale with the batch size. The rest depends on parameters and calls, and stays the
    same. Communication that was hidden is assumed to stay hidden.

    Args:
        prediction: prediction of a step with a global batch of `whole`.
        size: the other global batch size.
        whole: the global batch size of the prediction.
    """
    passes = prediction.phases["data"] + prediction.phases["forward"] + prediction.phases["backward"]
    return prediction.step_time_s.value - passes * (1.0 - size / whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxationGain:
    """What strategies that send less would gain.

    Attributes:
        relax: the relaxation level that was allowed.
        chosen: whether the strategy was chosen. It must take less, including its additional samples, than every exact
            plan, even if links are `links` times as fast as predicted and the codec's kernels `kernels` times as slow.
        strategy: the best strategy, as a user types it; empty where none could be tried.
        exact_step_s: step time of the best exact plan.
        step_s: step time of the best plan with the strategy.
        samples: samples to the same quality, as a multiple of exact training.
        evidence: where `samples` comes from.
        links: margin of error of the links' speed.
        kernels: margin of error of the codec's kernels.
        sentence: the result in one sentence.
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
    """The chosen plan, its prediction, and the alternatives.

    Attributes:
        model: name of the model.
        cluster: name of the cluster.
        request: what was asked.
        best: the chosen plan.
        prediction: prediction for the chosen plan.
        alternatives: plans that were not chosen, the best first.
        remarks: sentences on what the choice means.
        totals: the whole training with the chosen plan.
        changes: sentences on what would have to change for another plan to win.
        coverage: how far the search went.
        nodes: names of the nodes in the order in which ranks are placed; empty for the cluster's own order.
        relaxation: what strategies that send less would gain, where the request allows any.
        version: version of this format.
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
"""Largest number of global batch sizes above the script's own that are tried."""


def samples_to_quality(batch: float, noise: NoiseScale) -> float:
    """Return the samples needed with a global batch B: E = E_min (1 + B / B_crit).

    McCandlish, Kaplan, Amodei and others 2018, arXiv 1812.06162, equations 2.11 and 2.12: the steps S and the samples
    E = S B obey (S / S_min - 1) (E / E_min - 1) = 1. The result is only as reliable as the evidence of the noise scale,
    which is reported with it.

    Args:
        batch: the global batch size B, in the unit of the noise scale.
        noise: samples to a quality by batch size.
    """
    return noise.least_samples * (1.0 + batch / noise.critical_batch)


def steps_to_quality(batch: float, noise: NoiseScale) -> float:
    """Return the steps needed with a global batch B: S = S_min (1 + B_crit / B)."""
    return samples_to_quality(batch, noise) / batch


def batches_to_try(script_batch: int, noise: NoiseScale, ranks: int) -> tuple[int, ...]:
    """Return the global batch sizes that are worth a search: the script's own, multiplied and divided by powers of two.

    None is above 4 times the critical batch, or above the least samples that the quality takes. Beyond that, a larger
    batch saves less than a fifth of the steps, while the samples grow in proportion to it.

    Args:
        script_batch: the script's global batch size.
        noise: samples to a quality by batch size.
        ranks: number of devices.
    """
    most = max(float(script_batch), min(4 * noise.critical_batch, noise.least_samples))
    least = max(1.0, min(script_batch, noise.critical_batch) / 4, min(float(script_batch), float(ranks)) / 4)
    sizes = {script_batch}
    batch = script_batch
    while batch * 2 <= most and len(sizes) <= MOST_DOUBLINGS:
        batch *= 2
        sizes.add(batch)
    batch = script_batch
    while batch // 2 >= least and batch % 2 == 0:
        batch //= 2
        sizes.add(batch)
    return tuple(sorted(sizes))


def sizes_of(batch: BatchPlan, samples: float) -> list[tuple[int, int]]:
    """Return pairs (batch size, steps), in order, of a training over this many samples, in the batch's unit."""
    return _walk(batch, samples, float)


def sizes_to_quality(batch: BatchPlan, noise: NoiseScale) -> list[tuple[int, int]]:
    """Return pairs (batch size, steps), in order, of a training to a quality, also where the batch grows.

    A step with batch B brings the training as far as B / (1 + B / B_crit) samples with very small batches do (see
    samples_to_quality).

    Args:
        batch: the global batch size and how it grows.
        noise: samples to a quality by batch size.
    """
    return _walk(batch, noise.least_samples, lambda size: size / (1.0 + size / noise.critical_batch))


def _walk(batch: BatchPlan, needed: float, worth: Callable[[int], float]) -> list[tuple[int, int]]:
    """Return pairs (batch size, steps) until `needed` is reached, if a step with batch B counts as `worth(B)`."""
    sizes, left, done = list[tuple[int, int]](), needed, 0
    for until, size in (*batch.ramp, (None, batch.global_batch_size)):
        steps = math.ceil(left / worth(size))
        if until is not None:
            steps = min(steps, until - done)
            done = until
        if steps > 0:
            sizes.append((size, steps))
        left -= steps * worth(size)
        if left <= 0:
            break
    return sizes
