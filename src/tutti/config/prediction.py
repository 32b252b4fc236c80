"""Predictions: what a plan is estimated to cost before it runs, and what is derived from them: timelines, scaling,
trials.
"""

from dataclasses import dataclass
from typing import Literal

from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName, Evidence, Unit

Phase = Literal["data", "forward", "backward", "exposed_communication", "optimizer", "evaluation", "other"]
"""The parts of a run's wall time. They add up to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with the interval in which it is expected."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Peak bytes of the fullest rank, by what holds them.

    `script` is the script's libraries and data; `reserve` is the allocator, tutti's libraries and the interpreter.
    """

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
class WarmupSpan:
    """The steps of a warm-up, from the end of the stretch before until update number `until`: their time and bytes."""

    until: int
    step_time_s: float
    sent_nbytes_per_rank: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The estimated cost of one plan.

    `sent_nbytes_per_rank` is what the busiest sender sends in a step: forward and backward of all microbatches,
    recompute included. It counts gradients, sharded parameters and activations: an all-reduce over n ranks as a ring
    sends it, 2 (n - 1) / n of the tensor; a reduce-scatter (n - 1) / n; an all-gather (n - 1) times the rank's part;
    halos, rows for experts and tables, keys and values, and messages between stages as they are. It does not count
    losses, norms, batch statistics, and requests for rows. A run's step row counts the same: `sent_nbytes` +
    `exchanged_nbytes`.

    Attributes: phases: seconds of a step by phase on the slowest rank. fits: whether `memory` is within the memory of
        the smallest device. throughput_per_s: samples or tokens (the plan's unit) per second. first: the steps before
        the steady ones, where a plan starts differently: exact all-reduces until a second moment is frozen, sparsity
        that rises, replicas that diverge only later. notes: what limits the step, and which constants are assumed.
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
    first: tuple[WarmupSpan, ...] = ()
    notes: tuple[str, ...] = ()
    version: int = 1


Activity = Literal[
    "data", "forward", "backward", "weights", "optimizer", "communication", "bubble", "waiting", "other", "hidden"
]
"""What a rank does at a moment of a step.

- data: it waits for its batch, or loads it.
- forward, backward, optimizer; weights: the weight-gradient half of a split backward.
- communication: exposed communication.
- bubble: it waits for the result of another stage.
- waiting: it waits for slower ranks.
- other: the fixed cost of a step.
- hidden: communication while it computes.
"""

ACTIVITY_LABELS: dict[Activity, str] = {
    "data": "loading of data",
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
"""Labels, in the order in which they are listed."""


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
        ranks, count: which ranks, as text, and how many.
        bars: what they do; without gaps over the step, except where the timeline leaves microbatches out.
        hidden: communication beside the bars, drawn at the end of the computation that hides it.
        seconds: the whole step by activity, hidden communication included.
        memory, memory_limit_nbytes: of one of the ranks at its peak, and what it may hold.
        full_when: when that peak is.
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

    `tracks_left_out` is the number of tracks beyond those that were asked for.
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
    """The best predicted plan with at most `devices` devices; it uses `used` of them.

    Attributes:
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

    Attributes: pays_until: the largest number of devices up to which each added one is worth `least_worth` (assumed) of
        the average; 0 where no number of devices has a plan. sentence: the same as text.
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
        measured_s: the median of `steps` steps, which took `least_s` to `most_s`; None where the run failed.
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
        best: index of the fastest measured plan; None where none ran.
        sentence: what the measurement says of the choice.
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
        """Whether the measurement prefers another plan than the prediction."""
        return self.best not in (None, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlacement:
    """Where one module with parameters of its own is placed.

    Attributes:
        placement: a description.
        nbytes: bytes of its own parameters, whole.
        nbytes_per_rank: of those, what each previewed rank holds.
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
        ranks: the ranks that were previewed; all of a small world.
        state_nbytes_per_rank: parameters, gradients and optimizer state that each of them holds between steps.
    """

    mesh: dict[AxisName, int]
    ranks: tuple[int, ...]
    modules: tuple[ModulePlacement, ...]
    parameter_nbytes: int
    parameter_nbytes_per_rank: tuple[int, ...]
    gradient_nbytes_per_rank: tuple[int, ...]
    state_nbytes_per_rank: tuple[int, ...]
    evidence: Evidence = "predicted"
