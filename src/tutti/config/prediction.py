"""Predictions: what a plan is estimated to cost before it runs, and timelines, scaling and trials based on them."""

from dataclasses import dataclass, fields
from typing import Literal

from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName, Evidence, Unit

Phase = Literal["data", "forward", "backward", "exposed_communication", "optimizer", "evaluation", "other"]
"""The parts of a run's wall time, which they add up to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with the interval in which it is expected."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Peak bytes of the rank that needs most memory, by use.

    Attributes:
        reserve: the allocator, tutti's libraries and the interpreter.
        script: the script's libraries and data.
        host: in the memory of the device's host, which the total leaves out.
        disk: in files on a disk of the host, which the total leaves out.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    communication: float
    buffers: float
    reserve: float
    script: float = 0.0
    host: float = 0.0
    disk: float = 0.0

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


DEVICE_PARTS = tuple(field.name for field in fields(RankMemory) if field.name not in ("host", "disk"))
"""What holds a rank's memory, without what is on its device's host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorMemory:
    """Peak memory of the fullest rank as torch.cuda reports it.

    Attributes:
        allocated: bytes of tensors (`max_memory_allocated`).
        reserved: bytes that the caching allocator holds for them (`max_memory_reserved`).
        context_nbytes: further memory of the device, which torch does not count: the CUDA context and NCCL's buffers.
    """

    allocated: Estimate
    reserved: Estimate
    context_nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSpan:
    """The average step in one stretch of a warm-up, which ends before update number `until`: its time and bytes."""

    until: int
    step_time_s: float
    sent_nbytes_per_rank: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The estimated cost of one plan.

    `sent_nbytes_per_rank` is what the busiest sender sends in a step: forward and backward of all microbatches,
    recompute included. It counts gradients, sharded parameters and activations. An all-reduce over n ranks counts as a
    ring sends it, 2 (n - 1) / n of the tensor; a reduce-scatter (n - 1) / n; an all-gather (n - 1) times the rank's
    part. Halos, rows for experts and tables, keys and values, and messages between stages count at their size. Losses,
    norms, batch statistics and requests for rows are not counted. A run's step row counts the same: `sent_nbytes` +
    `exchanged_nbytes`.

    Attributes:
        plan_digest: identifies the plan.
        phases: seconds of a step by phase, on the slowest rank.
        memory_nbytes: peak memory of the rank that needs most.
        memory: the same by use.
        allocator: the same as torch reports it; None where no GPU computes.
        fits: whether `memory` is within the memory of the smallest device, and of its host.
        throughput_per_s: samples or tokens (the plan's unit) per second.
        first: the steps before the steady ones, where a plan starts differently: exact all-reduces until a second
            moment is frozen, sparsity that rises, replicas that diverge only later.
        notes: what limits the step, and which constants are assumed.
    """

    plan_digest: str
    step_time_s: Estimate
    phases: dict[Phase, float]
    memory_nbytes: Estimate
    memory: RankMemory
    fits: bool
    sent_nbytes_per_rank: float
    throughput_per_s: float
    model_flops_per_s: float
    devices: int
    first: tuple[WarmupSpan, ...] = ()
    allocator: AllocatorMemory | None = None
    notes: tuple[str, ...] = ()
    version: int = 1


Activity = Literal[
    "data", "forward", "backward", "weights", "optimizer", "communication", "bubble", "waiting", "other", "hidden"
]
"""What a rank does at a moment of a step.

- data: it waits for its batch, or loads it.
- forward, backward, optimizer: it computes them.
- weights: it computes the weight-gradient half of a split backward.
- communication: exposed communication.
- bubble: it waits for the result of another stage.
- waiting: it waits for slower ranks.
- other: the fixed cost of a step.
- hidden: communication while it computes.
"""

ACTIVITY_LABELS: dict[Activity, str] = {
    "data": "data loading",
    "forward": "forward",
    "backward": "backward",
    "weights": "weight gradients",
    "optimizer": "optimizer",
    "communication": "exposed communication",
    "bubble": "bubble",
    "waiting": "waiting for slower ranks",
    "other": "other",
    "hidden": "hidden communication",
}
"""Labels of the activities, in the order in which they are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One activity from `start_s` to `end_s` of the step; `what` gives details."""

    doing: Activity
    start_s: float
    end_s: float
    what: str = ""

    @property
    def lasts_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Ranks that do the same at the same time.

    Attributes:
        ranks: which ranks, as text.
        count: how many ranks.
        stage: their pipeline stage.
        bars: what they do; without gaps over the step, except where the timeline leaves microbatches out.
        hidden: hidden communication, drawn at the end of the computation that hides it.
        seconds: the whole step by activity, hidden communication included.
        memory: memory of one of the ranks at its peak.
        memory_limit_nbytes: memory that such a rank has.
        full_when: when that peak is reached.
    """

    ranks: str
    count: int
    stage: int
    bars: tuple[Bar, ...]
    hidden: tuple[Bar, ...]
    seconds: dict[Activity, float]
    memory: RankMemory
    memory_limit_nbytes: float
    full_when: str

    @property
    def busy_s(self) -> float:
        """Seconds of computation."""
        return sum(self.seconds.get(doing, 0.0) for doing in ("forward", "backward", "weights", "optimizer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Omission:
    """A part of the step that is not drawn: microbatches that repeat those before and after."""

    start_s: float
    end_s: float
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A predicted step by tracks, those of the first stage first.

    Attributes:
        tracks_left_out: number of tracks beyond those that were asked for.
        left_out: the part of the step that is not drawn.
    """

    step_time_s: Estimate
    world_size: int
    num_microbatches: int
    tracks: tuple[Track, ...]
    tracks_left_out: int = 0
    left_out: Omission | None = None
    version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """The best predicted plan with at most `devices` devices.

    Attributes:
        used: devices that the plan uses.
        worth: gain of each device added since the last point, relative to the average gain per device there.
        reason: why there is no plan.
    """

    devices: int
    used: int = 0
    plan: str = ""
    step_time_s: Estimate | None = None
    throughput_per_s: float = 0.0
    worth: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    """Measured samples or tokens per second on this many devices."""

    devices: int
    throughput_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCurve:
    """Predicted throughput against the number of devices.

    Attributes:
        unit: what the throughput counts.
        points: one per number of devices.
        pays_until: the largest number of devices up to which each added device gains at least `least_worth` of the
            average; 0 where no number of devices has a plan.
        least_worth: an assumed threshold.
        sentence: the result as text.
        measured: points that were measured.
    """

    unit: Unit
    points: tuple[ScalingPoint, ...]
    pays_until: int
    least_worth: float
    sentence: str
    measured: tuple[MeasuredPoint, ...] = ()
    version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan that was run for a few steps.

    Attributes:
        words: the plan in words.
        predicted: step time.
        measured_s: median time of `steps` steps; None where the run failed.
        least_s, most_s: the shortest and the longest of these steps.
        folder: its run folder.
        failure: why it failed.
    """

    plan: Plan
    words: str
    predicted: Estimate
    predicted_throughput_per_s: float
    measured_s: float | None = None
    least_s: float | None = None
    most_s: float | None = None
    measured_throughput_per_s: float | None = None
    steps: int = 0
    folder: str = ""
    failure: str = ""

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        return None if self.measured_s is None else (self.predicted.value - self.measured_s) / self.measured_s

    @property
    def within(self) -> bool | None:
        """Whether the measured step lies in the predicted interval."""
        return None if self.measured_s is None else self.predicted.low <= self.measured_s <= self.predicted.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Plans that were run, in the order of their predictions; the first is the planner's choice.

    Attributes:
        best: index of the fastest measured plan; None where every run failed.
        sentence: what the measurement says about the choice.
        load: cores busy with other work when the trials began.
        cores: cores of this machine.
    """

    trials: tuple[Trial, ...]
    best: int | None
    sentence: str
    unit: Unit
    load: float = 0.0
    cores: int = 1
    version: int = 1

    @property
    def changed(self) -> bool:
        """Whether the measurement prefers a different plan from the prediction."""
        return self.best not in (None, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlacement:
    """Where one module with parameters of its own is placed.

    Attributes:
        placement: a description.
        nbytes: bytes of its own parameters, undivided.
        nbytes_per_rank: bytes of them on each previewed rank.
        collectives: what a step exchanges for it.
    """

    name: str
    kind: str
    placement: str
    nbytes: int
    nbytes_per_rank: tuple[int, ...]
    collectives: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The layout of a plan, module by module.

    Attributes:
        ranks: the ranks that were previewed; all ranks of a small world.
        state_nbytes_per_rank: parameters, gradients and optimizer state that each of them holds between steps.
        engine: what runs sharding levels 2 and 3; empty for other plans.
    """

    mesh: dict[AxisName, int]
    ranks: tuple[int, ...]
    modules: tuple[ModulePlacement, ...]
    parameter_nbytes: int
    parameter_nbytes_per_rank: tuple[int, ...]
    gradient_nbytes_per_rank: tuple[int, ...]
    state_nbytes_per_rank: tuple[int, ...]
    engine: str = ""
    evidence: Evidence = "predicted"
