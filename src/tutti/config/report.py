"""RunReport: what a run did, as read from its run folder. Every number is a Quantity and carries its evidence.

The fields are those that an honest report needs (see tutti.report.rules); what the run did not record is null and
is shown as "not recorded".
"""

from dataclasses import dataclass, field
from typing import Literal

from tutti.config.prediction import Phase
from tutti.config.quantity import Curve, Quantity
from tutti.config.report_measured import (
    CommunicationReport,
    ExpertsReport,
    FlopsReport,
    NoiseReport,
    PredictionCheck,
    QualityReport,
    RankReport,
    TargetReport,
    TimeReport,
)
from tutti.config.report_setting import (
    BaselineReport,
    BatchReport,
    DataReport,
    RecipeReport,
    StopReport,
    SystemReport,
    TuningReport,
)

Scope = Literal["kernel", "step", "epoch", "train"]
Status = Literal["completed", "stopped", "failed", "unfinished"]
Severity = Literal["refuse", "warn", "note"]
Scaling = Literal["strong", "weak"]
Claim = Literal["speedup", "efficiency", "strong scaling", "ranking", "rate", "end-to-end", "quality", "breakdown"]


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
