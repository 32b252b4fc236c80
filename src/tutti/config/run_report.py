"""RunReport: what a run did, read from its run folder.

The fields are those that an honest report needs (`tutti.reporting`). Most numbers are a Quantity, which carries
its unit and evidence. What the run did not record is null and is shown as "not recorded".
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from tutti.config.prediction import Phase
from tutti.config.vocabulary import Evidence, StartState, StopRule, TrafficKind, Unit
from tutti.errors import SpecError

Scope = Literal["kernel", "step", "epoch", "train"]
Status = Literal["completed", "stopped", "failed", "unfinished"]
Severity = Literal["refuse", "warn", "note"]
Scaling = Literal["strong", "weak"]
Claim = Literal["speedup", "efficiency", "strong scaling", "ranking", "rate", "end-to-end", "quality", "breakdown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number with its unit and evidence. A `value` of None, with an `evidence` of None, means "not recorded".

    Attributes:
        unit: "" for a plain number, "ratio" for a fraction (shown in percent), "x" for a factor; "s", "B", "B/s",
            "FLOP", "FLOP/s", "samples/s", "tokens/s"; "device s" and "core s" for costs; for counts what is counted:
            "samples", "tokens", "steps", "epochs", "ranks", "hosts", "devices" or "cores".
        low, high: bounds of an estimate.
        note: how the number was obtained.
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
                f"value = {self.value} with evidence = {self.evidence}; give evidence with a number, and none with null"
            )
        for number in (self.value, self.low, self.high):
            if number is not None and not math.isfinite(number):
                raise SpecError(f"a quantity is {number}; write null for a missing number")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationSummary:
    """Outcome of the verification that N ranks compute what one device computes (verify.json).

    Attributes:
        largest: the largest relative difference of a tensor that was tolerated.
        tolerance: the largest accepted relative difference.
        arithmetic: number format of the computation.
        cause: likely cause of a failure, and its remedy.
        comparable: whether what differs can be judged; random numbers that differ prevent it.
    """

    passed: bool
    sentence: str
    largest: Quantity
    tolerance: Quantity
    steps: Quantity
    arithmetic: str
    cause: str | None = None
    comparable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Why a rank ended early; the kind is "peer" if it only lost another rank."""

    rank: int
    host: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFinding:
    """What a rule of honest reporting found.

    Attributes:
        rule: number of the rule, 1 to 12; 0 for rules of the report itself.
        code: short name of the finding, such as "QUALITY-LOSS".
        where: dotted path of the field.
        run: position of the run in a comparison; None for all runs.
        refuses: the claims that may not be made.
    """

    rule: int
    code: str
    severity: Severity
    sentence: str
    where: str
    run: int | None = None
    refuses: tuple[Claim, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOutcome:
    """What one of the twelve rules says.

    Attributes:
        rule: its number.
        outcome: "kept", "objection" if it refuses or warns, or "unstated" if the run does not say what it needs.
        missing: what is not stated and how to state it, as a sentence; empty unless the outcome is "unstated".
    """

    rule: int
    outcome: Literal["kept", "objection", "unstated"]
    missing: str = ""


Split = Literal["train", "validation", "test", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricCurve:
    """One metric over the run, as four parallel tuples.

    Attributes:
        samples: samples trained on until each point.
        time_s: seconds on the run's clock, which excludes downtime.
        note: how the points were obtained.
    """

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
    """The quality reached, on held-out data where the run evaluated some.

    Attributes:
        name: the evaluation by which the run is judged.
        split: the part of the data that it used.
        test_value: the value of the evaluation that `selection` names: the last or the best.
        best_value: the best value of all evaluations.
        reached: whether any evaluation reached the target; None without a target.
        reloaded: whether the last evaluation repeats the value of an earlier one, after another at the same step.
        eval_every_samples: samples trained on between two evaluations (median).
        eval_samples: number of samples evaluated.
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
    reloaded: bool = False
    eval_every_samples: Quantity = Quantity(unit="samples")
    eval_samples: Quantity = Quantity(unit="samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeReport:
    """Where the time went.

    Attributes:
        wall: time from the start of prepare to the end, over all generations of a resumed run, without downtime.
        breakdown: time of rank 0 by phase.
        accounted: sum of the breakdown divided by `wall`; 1 when it adds up.
        per_step: median of the steady steps; its note says which those are.
        step_phases: the same by phase.
        load_wait: time that rank 0 waited for data, over the whole run.
        startup: time until the first step, by part.
        earlier_steps: steps of the run in another folder that this one continues; their time is not counted.
        generations: how often the run was started; 1 if it was never resumed.
        repeated_steps: steps that were made again after a resume.
    """

    wall: Quantity
    breakdown: dict[Phase, Quantity]
    accounted: Quantity
    per_step: Quantity
    step_phases: dict[Phase, Quantity] = field(default_factory=dict)
    load_wait: Quantity = Quantity(unit="s")
    startup: dict[str, Quantity] = field(default_factory=dict)
    earlier_steps: Quantity = Quantity(unit="steps")
    generations: Quantity = Quantity()
    repeated_steps: Quantity = Quantity()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsReport:
    """FLOPs of the model, and their rate.

    Attributes:
        model_per_sample: FLOPs of forward and backward.
        formula: how they are counted.
        dtype: number format of the products; the peak is that of this dtype.
        rate: the model's FLOPs per second in the steady steps, on all devices.
        peak: peak of all devices.
        peak_fraction: `rate` divided by `peak`.
        to_target: the model's FLOPs until the target was reached.
    """

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
class TargetReport:
    """What it took to first reach the target quality; null where there is no target or it was missed.

    Attributes:
        device_seconds: devices times seconds, or for a run on CPUs cores times seconds.
    """

    time: Quantity = Quantity(unit="s")
    steps: Quantity = Quantity(unit="steps")
    epochs: Quantity = Quantity(unit="epochs")
    samples: Quantity = Quantity(unit="samples")
    device_seconds: Quantity = Quantity(unit="device s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionCheck:
    """A predicted number beside the measured one.

    Attributes:
        error: (predicted - measured) / measured.
        within: whether the measured value lies in the predicted interval; None without an interval.
    """

    name: str
    predicted: Quantity
    measured: Quantity
    error: Quantity
    within: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank: where it ran, its peak memory and the time of its steps by phase.

    Attributes:
        device: such as "cuda:0".
        threads: number of threads on which it computes.
        stolen: fraction of its host's core time that a hypervisor gave to other machines.
        others: fraction of its host's core time that programs other than the run's ranks used.
    """

    rank: int
    host: str
    device: str
    device_model: str
    threads: Quantity
    peak_memory: Quantity
    breakdown: dict[Phase, Quantity]
    stolen: Quantity = Quantity(unit="ratio")
    others: Quantity = Quantity(unit="ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationReport:
    """One communication channel in a step of rank 0: medians over the steady steps.

    Attributes:
        axes: the axes it goes over, joined by "+".
        carried: what it carries.
        sent: bytes that rank 0 sent.
        in_progress: seconds during which an exchange had begun and was not known to have ended.
        exposed: seconds that rank 0 waited.
        exposed_in: seconds that rank 0 waited, by phase.
        hidden: fraction of `in_progress` during which rank 0 did not wait.
    """

    axes: str
    carried: TrafficKind
    exchanges: Quantity
    sent: Quantity
    in_progress: Quantity
    exposed: Quantity
    exposed_in: dict[Phase, Quantity]
    hidden: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsReport:
    """One mixture of experts over the run.

    Attributes:
        name: name of the module.
        assigned: (token, expert) choices.
        dropped: choices that exceeded an expert's capacity.
        share: dropped choices divided by all choices.
        balance_loss: load-balancing loss of a step; 1 when balanced.
    """

    name: str
    assigned: Quantity
    dropped: Quantity
    share: Quantity
    balance_loss: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseReport:
    """The gradient noise scale, measured while training, in the unit of the batch.

    All values but `measured` are means over the second half of the measurements.

    Attributes:
        critical_batch: the batch size at which twice the minimum number of samples is needed, taken to be the noise
            scale.
        square: squared norm of the mean gradient.
        variance: trace of the covariance of the gradient of one unit of the batch.
        measured: number of steps in which it was measured.
    """

    critical_batch: Quantity
    square: Quantity
    variance: Quantity
    measured: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """The data trained and evaluated on, and where it was stored when the clock started.

    Attributes:
        kind: class name of the data set.
        hash_covers: which part of the data was hashed.
        train_test_overlap: samples that are in both, as they are or scaled.
        trained_on: samples of the evaluated data that steps were seen to train on; of so many the notes tell.
        start_state: where the training data was when the clock started: as stated by the user, else as found.
        found_state: where it was, as found by reading samples.
        state_reason: how that was seen, as a clause.
        bytes_read, preprocess_timed: stated by the user: bytes read while training, and whether the time includes
            preprocessing.
        input_shape: shape of the model's inputs.
        native_shape: shape of the data before it was enlarged: as stated by the user, else as found.
        found_shape: that shape as found by reading samples.
        shape_reason: how it was seen that the data was enlarged, as a clause; empty if it was not.
        chosen_from: number of samples of the data set that the training data was chosen from, if that is known, without
            the evaluated ones.
        same_as: names of all evaluations of the evaluated data.
        distinct: share of the samples looked at that differ from the others.
        majority: share of the most frequent label in the evaluated data; None if labels are not classes.
    """

    name: str
    kind: str
    train_samples: Quantity
    train_sha256: str | None
    hash_covers: str
    test_name: str | None = None
    test_sha256: str | None = None
    train_test_overlap: Quantity = Quantity(unit="samples")
    trained_on: Quantity = Quantity(unit="samples")
    start_state: StartState | None = None
    bytes_read: Quantity = Quantity(unit="B")
    preprocess_timed: bool | None = None
    found_state: StartState | None = None
    state_reason: str = ""
    input_shape: str | None = None
    native_shape: str | None = None
    found_shape: str | None = None
    shape_reason: str = ""
    chosen_from: Quantity = Quantity(unit="samples")
    same_as: tuple[str, ...] = ()
    distinct: Quantity = Quantity(unit="ratio")
    majority: Quantity = Quantity(unit="ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    """What was spent on finding the recipe before this run, as the user stated it.

    Attributes:
        trials: number of runs.
        space: the settings that were tried.
        found_trials: number of other settings with which runs beside this one trained the same script on the same data.
        found_device_seconds: their cost.
        found_seeds: number of other seeds with which runs beside this one trained with the same settings.
    """

    trials: Quantity = Quantity()
    device_seconds: Quantity = Quantity(unit="device s")
    space: str | None = None
    search_log_sha256: str | None = None
    found_trials: Quantity = Quantity()
    found_seeds: Quantity = Quantity()
    found_device_seconds: Quantity = Quantity(unit="device s")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """One tier of links, with the transfer to which its numbers are fitted."""

    tier: str
    latency: Quantity
    bandwidth: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemReport:
    """The machines.

    Attributes:
        device_model: models of all ranks' devices, joined by "+".
        device_kind: "cpu" or "cuda".
        devices: number of devices; for a CPU run the number of hosts, whose cores the ranks share.
        cores_used: threads of all ranks.
        cores_granted: cores that all hosts grant.
        year: year in which the device appeared.
        peak_dense_flops: peak of one device, by dtype.
        sums: what gradient reductions went through, as text.
        attention: kernels of attention over the context axis, as text.
    """

    device_model: str
    device_kind: str
    ranks: Quantity
    hosts: Quantity
    devices: Quantity
    cores_used: Quantity
    cores_granted: Quantity = Quantity(unit="cores")
    year: Quantity = Quantity()
    peak_dense_flops: dict[str, Quantity] = field(default_factory=dict)
    links: tuple[LinkReport, ...] = ()
    backend: str = ""
    sums: str = ""
    attention: str = ""
    platform: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The batch of a step: global, per rank, and per microbatch of a rank (means where shares are unequal)."""

    global_size: Quantity
    local_size: Quantity
    micro_size: Quantity
    num_microbatches: Quantity
    unit: Unit = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeReport:
    """Training settings.

    Attributes:
        lr_rule: how the learning rate follows the batch size.
        last_batch: what happens to a short last batch.
        compress: codec of gradient reductions; None where they were exact.
    """

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
class StopReport:
    """What ended the run: the rule, and its value (a number of epochs, for example).

    Attributes:
        planned_epochs: number of epochs that the script asked for.
        left_early: whether the script left its loop before that, or within an epoch.
        clock: where the script leaves a loop because of the time; None if nowhere.
        early_reason: why training ended before the epochs that the script asked for; empty if it did not.
        watched: name of the value by which it was stopped early, such as "val/loss".
    """

    rule: StopRule | None = None
    value: Quantity = Quantity()
    planned_epochs: Quantity = Quantity(unit="epochs")
    left_early: bool = False
    clock: str | None = None
    early_reason: str = ""
    watched: str | None = None


BaselineSource = Literal["measured-here", "published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineReport:
    """The baseline as the user stated it: where its numbers come from, its name and device, and who tuned it."""

    source: BaselineSource | None = None
    system: str | None = None
    device: str | None = None
    tuned_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything a run folder says about its run.

    Attributes:
        folder: the run folder; empty in files, which may be copied with it.
        scope: largest unit of training that the run completed; "train" only when training ended by itself or reached
            the target.
        headline: the run in one sentence.
        throughput: samples (or tokens) per second of the steady steps.
        steps: number of steps, without repeated ones.
        steps_on_same_batch: steps on the same batch as the step before, although the loader had given another.
        skipped_steps: steps without an update, because the loss or gradients were not finite.
        device_seconds: devices times seconds, or for a run on CPUs cores times seconds.
        scaling: "strong" or "weak", if the user stated it.
        predicted_phases: predicted seconds of a step by phase.
        predicted_memory: predicted peak memory of the fullest rank by component.
        memory_peak: peak memory of the fullest rank.
        sent_per_step: bytes per step of the rank that sends most.
        replicas: how far replicas diverged, by name; empty where they were equal.
        config_sha256: hash of what determines the result except the seed: script, arguments, recipe, model, training
            data.
        git_dirty: whether there were uncommitted changes.
        env_lock_sha256: hash of the list of installed packages.
        energy: measured energy of the devices or hosts while the run lasted.
        price: the run's cost in the currency of the cluster file.
        outcomes: what each of the twelve rules says.
        version: version of this format.
    """

    name: str
    folder: str = ""
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
    steps_on_same_batch: Quantity = Quantity(unit="steps")
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
    curves: tuple[MetricCurve, ...] = ()
    verification: VerificationSummary | None = None
    failures: tuple[RankFailure, ...] = ()
    config_sha256: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    env_lock_sha256: str | None = None
    energy: Quantity = Quantity(unit="J")
    price: Quantity = Quantity()
    findings: tuple[RuleFinding, ...] = ()
    outcomes: tuple[RuleOutcome, ...] = ()
    version: int = 1
