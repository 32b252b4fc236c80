"""Several runs side by side: a comparison, and how far predictions were off."""

from dataclasses import dataclass

from tutti.config.run_report import Quantity, RuleFinding, RuleOutcome, RunReport, Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """A setting that differs between compared runs, as one text per run."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One run compared with the first.

    Attributes:
        time: time to the target where one is set, otherwise time of the whole run.
        device_seconds: devices times seconds, up to the same point as `time`.
        speedup: time of the first run divided by the time of this run.
        efficiency: `speedup` divided by the ratio of devices (or cores).
        refusal: why no speed-up may be stated; shown in its place.
    """

    name: str
    quality: Quantity
    time: Quantity
    throughput: Quantity
    device_seconds: Quantity
    speedup: Quantity
    efficiency: Quantity
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several runs side by side; the first is the reference.

    Attributes:
        differences: settings that are not equal in all runs.
        scaling: "strong" if the global batch is constant, "weak" otherwise; None if all runs have as many ranks.
    """

    runs: tuple[RunReport, ...]
    rows: tuple[ComparisonRow, ...]
    differences: tuple[SettingDifference, ...]
    scaling: Scaling | None
    headline: str
    findings: tuple[RuleFinding, ...] = ()
    outcomes: tuple[RuleOutcome, ...] = ()
    version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One run with its predicted and measured step time. Errors are (predicted - measured) / measured.

    Attributes:
        cluster: name of the cluster it was predicted for.
        within: whether the measured step time lies in the predicted interval.
        memory_error: error of the peak memory of the fullest rank.
    """

    name: str
    folder: str
    started_utc: str
    script: str
    cluster: str
    plan: str
    ranks: Quantity
    predicted_step: Quantity
    measured_step: Quantity
    step_error: Quantity
    within: bool | None
    memory_error: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionAccuracy:
    """How far predictions for one cluster were off; for all clusters where `cluster` is empty.

    Attributes:
        median, ninetieth: median and 90th percentile of the absolute errors of step times.
        bias: signed median error; negative where runs took longer than predicted.
        within: number of runs whose step time was in the predicted interval.
        memory_median: median of the absolute errors of peak memory.
    """

    cluster: str
    runs: int
    median: Quantity
    ninetieth: Quantity
    bias: Quantity
    within: int
    memory_median: Quantity
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionHistory:
    """Predictions and outcomes of runs, in the order in which the runs began.

    Attributes:
        trust: accuracy over all runs first, then by cluster where there are several.
        left_out: run folders without a prediction or a step, and why.
    """

    entries: tuple[HistoryEntry, ...]
    trust: tuple[PredictionAccuracy, ...]
    left_out: tuple[str, ...] = ()
    version: int = 1
