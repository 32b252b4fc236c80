"""RunReport: what a run did, as read from its run folder. Every number is a Quantity and carries its evidence.

The fields are those that an honest report needs (see tutti.report.rules); what the run did not record is null and
is shown as "not recorded".
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from tutti.errors import SpecError
from tutti.spec.prediction import Phase
from tutti.spec.words import Carried, Evidence, Unit

Split = Literal["train", "validation", "test", "other"]
Scope = Literal["kernel", "step", "epoch", "train"]
Status = Literal["completed", "stopped", "failed", "unfinished"]
Severity = Literal["refuse", "warn", "note"]
StartState = Literal["disk-cold", "disk-warm", "ram", "generated"]
StopRule = Literal["target", "epochs", "steps", "time"]
Scaling = Literal["strong", "weak"]
BaselineSource = Literal["measured-here", "published"]
Claim = Literal["speedup", "efficiency", "strong scaling", "ranking", "rate", "end-to-end", "quality", "breakdown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number with its unit and where it comes from; `value` None: not recorded (then `evidence` is None too).

    Units: "s", "B", "B/s", "FLOP", "FLOP/s", "samples", "samples/s", "ratio" (shown in percent), "x" (a factor),
    "" for a plain number. `low` and `high` bound an estimate; `note` says how the number was made.
    """

    value: int | float | None = None
    unit: str = ""
    evidence: Evidence | None = None
    low: int | float | None = None
    high: int | float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) != (self.evidence is None):
            raise SpecError(
                f"value = {self.value} with evidence = {self.evidence}; give a number its evidence, and none to null"
            )
        for number in (self.value, self.low, self.high):
            if number is not None and not math.isfinite(number):
                raise SpecError(f"a quantity is {number}; write null for a number that is not there")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One value over the run; the four tuples are parallel. `time_s`: on the run's own clock, down time excluded."""

    name: str  # "training loss", "test accuracy"
    split: Split
    metric: str
    evidence: Evidence = "measured"
    steps: tuple[int, ...]
    samples: tuple[int, ...]
    time_s: tuple[float, ...]
    values: tuple[float, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityReport:
    """The quality reached, on data that was not trained on where the run evaluated such.

    `selection`: "last" is the last evaluation, "best" the best of all of them. `eval_every_samples`: samples trained
    on between two evaluations.
    """

    name: str = ""
    metric: str = ""
    split: Split = "other"
    higher_is_better: bool = True
    test_value: Quantity = Quantity()
    best_value: Quantity = Quantity()
    target: Quantity = Quantity()
    reached: bool | None = None
    reference_value: Quantity = Quantity()
    selection: Literal["last", "best"] = "last"
    eval_every_samples: Quantity = Quantity(unit="samples")
    eval_samples: Quantity = Quantity(unit="samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """What was trained and evaluated on, and where the data lay when the clock started."""

    name: str
    kind: str
    train_samples: Quantity
    train_sha256: str | None
    hash_covers: str
    test_name: str | None = None
    test_sha256: str | None = None
    train_test_overlap: Quantity = Quantity(unit="samples")
    start_state: StartState | None = None
    bytes_read: Quantity = Quantity(unit="B")
    preprocess_timed: bool | None = None
    input_shape: str | None = None
    native_shape: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeReport:
    """Where the time went. `breakdown` is rank 0's; `accounted` is its sum over `wall`, 1 when it adds up.

    `wall`: from the start of prepare to the end, over all generations of a resumed run. `startup`: how long it took
    until the first step, by part.
    `per_step` is the median of the steady steps; its note says which steps those are.
    """

    wall: Quantity
    breakdown: dict[Phase, Quantity]
    accounted: Quantity
    per_step: Quantity
    step_phases: dict[Phase, Quantity] = field(default_factory=dict)
    load_wait: Quantity = Quantity(unit="s")
    startup: dict[str, Quantity] = field(default_factory=dict)
    generations: Quantity = Quantity()
    repeated_steps: Quantity = Quantity()


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    """What was spent on finding the recipe before this run."""

    trials: Quantity = Quantity()
    device_seconds: Quantity = Quantity(unit="device s")
    space: str | None = None
    search_log_sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """One tier of links."""

    tier: str
    latency: Quantity
    bandwidth: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemReport:
    """The machines. `peak_dense_flops`: of one device, by dtype, dense. `device_model` of all ranks, "+"-joined.
    `sums`: what sums of gradients went through, in words.
    """

    device_model: str
    device_kind: str  # "cpu" or "cuda"
    ranks: Quantity
    hosts: Quantity
    devices: Quantity  # of a CPU run: its hosts, whose cores the ranks share
    cores_used: Quantity
    cores_granted: Quantity = Quantity(unit="cores")
    year: Quantity = Quantity()
    peak_dense_flops: dict[str, Quantity] = field(default_factory=dict)
    links: tuple[LinkReport, ...] = ()
    backend: str = ""
    sums: str = ""
    platform: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The batch of a step: global, a rank's share of it, and what a rank computes at once."""

    global_size: Quantity
    local_size: Quantity
    micro_size: Quantity
    num_microbatches: Quantity
    unit: Unit = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeReport:
    """How the optimizer was driven. `compress`: how sums of gradients were written, None where they were exact."""

    optimizer: str
    lr: Quantity
    lr_rule: str | None
    scheduler: str | None
    clip_norm: Quantity
    precision: str
    seed: Quantity
    last_batch: str
    compress: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsReport:
    """Work and rates. `model_per_sample`: forward and backward, by `formula`; `peak_fraction`: of the dense peak."""

    model_per_sample: Quantity = Quantity(unit="FLOP")
    formula: str = ""
    dtype: str | None = None
    counts_recompute: bool = False
    sparsity: Literal["dense", "sparse"] = "dense"
    rate: Quantity = Quantity(unit="FLOP/s")
    peak: Quantity = Quantity(unit="FLOP/s")
    peak_fraction: Quantity = Quantity(unit="ratio")
    to_target: Quantity = Quantity(unit="FLOP")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReport:
    """What ended the run."""

    rule: StopRule | None = None
    value: Quantity = Quantity()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReport:
    """What it took to reach the target quality the first time; null where there is no target or it was missed."""

    time: Quantity = Quantity(unit="s")
    steps: Quantity = Quantity(unit="steps")
    epochs: Quantity = Quantity(unit="epochs")
    samples: Quantity = Quantity(unit="samples")
    device_seconds: Quantity = Quantity(unit="device s")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineReport:
    """What the run is compared with, and who tuned that."""

    source: BaselineSource | None = None
    system: str | None = None
    tuned_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionCheck:
    """One predicted number beside the measured one. `error`: (predicted - measured) / measured."""

    name: str
    predicted: Quantity
    measured: Quantity
    error: Quantity
    within: bool | None  # whether the measured value lies in the predicted interval


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank: where it ran, its peak memory and its time by phase over the run (evaluation is in rank 0's)."""

    rank: int
    host: str
    device: str
    device_model: str
    threads: Quantity
    peak_memory: Quantity
    breakdown: dict[Phase, Quantity]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationReport:
    """One kind of exchange over some axes of the mesh, in a step of rank 0.

    `sent`: by rank 0; `under_way`: seconds in which an exchange had begun and was not known to have ended; `exposed`:
    seconds that rank 0 waited, `exposed_in` by phase; `hidden`: the part of `under_way` in which it did not wait.
    """

    axes: str
    carried: Carried
    exchanges: Quantity
    sent: Quantity
    under_way: Quantity
    exposed: Quantity
    exposed_in: dict[Phase, Quantity]
    hidden: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsReport:
    """A mixture of experts over the run: choices of tokens, those that found no room and their share, and the
    load-balancing loss of a step (1 when balanced). `name`: the module's.
    """

    name: str
    assigned: Quantity
    dropped: Quantity
    share: Quantity
    balance_loss: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseReport:
    """The gradient noise scale, measured while training, in the batch's unit: means over the later half of the run.

    `critical_batch`: at which twice the least samples are needed, taken to be the noise scale. `square`: of the mean
    gradient's norm; `variance`: of the gradient of one unit, its trace; `measured`: in how many steps.
    """

    critical_batch: Quantity
    square: Quantity
    variance: Quantity
    measured: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Whether N ranks were shown to compute what one device computes (verify.json). `cause`: of a failure."""

    passed: bool
    sentence: str
    largest: Quantity  # relative difference of a tensor that was tolerated
    tolerance: Quantity
    steps: Quantity
    arithmetic: str
    cause: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank ended before its time."""

    rank: int
    host: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule found. `rule`: its number of the twelve, 0 for the report's own. `where`: path of the field.

    `run`: position of the run in a comparison, None: all of it. `refuses`: the claims that may not be made.
    """

    rule: int
    code: str
    severity: Severity
    sentence: str
    where: str
    run: int | None = None
    refuses: tuple[Claim, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything a run folder says about its run.

    `config_sha256`: of what determines the result except the seed: script arguments, recipe, model, training data.
    `scope`: "train" only when training ended by itself or reached the target.
    """

    name: str
    script: str
    command: str
    started_utc: str
    model: str
    parameters: Quantity
    status: Status
    scope: Scope
    headline: str
    quality: QualityReport
    data: DataReport
    time: TimeReport
    throughput: Quantity
    steps: Quantity
    skipped_steps: Quantity
    epochs: Quantity
    samples_seen: Quantity
    device_seconds: Quantity
    system: SystemReport
    batch: BatchReport
    recipe: RecipeReport
    plan: str | None
    stop: StopReport
    to_target: TargetReport = TargetReport()
    scaling: Scaling | None = None
    flops: FlopsReport = FlopsReport()
    tuning: TuningReport = TuningReport()
    baseline: BaselineReport = BaselineReport()
    checks: tuple[PredictionCheck, ...] = ()
    predicted_phases: dict[Phase, Quantity] = field(default_factory=dict)
    predicted_memory: dict[str, Quantity] = field(default_factory=dict)
    prediction_notes: tuple[str, ...] = ()
    memory_peak: Quantity = Quantity(unit="B")
    sent_per_step: Quantity = Quantity(unit="B")
    communication: tuple[CommunicationReport, ...] = ()
    experts: tuple[ExpertsReport, ...] = ()
    noise: NoiseReport | None = None
    replicas: dict[str, Quantity] = field(default_factory=dict)
    ranks: tuple[RankReport, ...] = ()
    curves: tuple[Curve, ...] = ()
    verification: Verification | None = None
    failures: tuple[Failure, ...] = ()
    config_sha256: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    env_lock_sha256: str | None = None
    findings: tuple[Finding, ...] = ()
    version: int = 1
