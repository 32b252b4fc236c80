"""Score predictions against published measurements, family by family; families are never averaged together."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan, SyncPlan
from tutti.cost_model import predict
from tutti.errors import PlanError
from tutti.validation.published_rows import PublishedRow, Uncosted
from tutti.validation.row_specs import cluster_of, model_of, plan_of, step_s

_GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row that can be costed: what it ran on, and what it measured."""

    row: PublishedRow
    model: ModelSpec
    cluster: ClusterSpec
    plan: Plan
    measured_s: float

    @property
    def machine(self) -> str:
        """The kind of machine that a calibration is for: the devices of its nodes."""
        return "; ".join(node.device for node in self.cluster.nodes)

    @property
    def contest(self) -> tuple[str, str, str, str, str]:
        """Key of the rows that differ only in how the work is distributed, among which a planner would choose."""
        text = self.row.text
        return (text("model"), text("n_gpus"), text("gpu"), text("seq_len"), text("global_batch"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A prediction and its measurement.

    Attributes:
        memory_nbytes: predicted peak memory of a rank, as far as the measured one counts it.
        measured_memory_nbytes: None where the row prints none.
    """

    row_id: str
    contest: tuple[str, ...]
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    memory_nbytes: float
    measured_memory_nbytes: float | None

    @property
    def error(self) -> float:
        """Relative error of the step time: predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the memory; None where none was measured."""
        if self.measured_memory_nbytes is None:
            return None
        return self.memory_nbytes / self.measured_memory_nbytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors over several rows.

    Attributes:
        median, mean, p90: of the absolute relative errors of step times.
        bias: mean of the signed errors.
        within: fraction of the measurements that lie in the predicted interval.
        rank_correlation: Spearman's, averaged over contests of at least 3 rows; None without such contests.
        top1_regret: how much slower than the fastest measured plan is the plan predicted to be fastest.
        top5_regret: the same for the fastest measured plan among the 5 predicted to be fastest.
        memory_worst_under: the most negative relative error of memory.
    """

    rows: int
    median: float
    mean: float
    p90: float
    bias: float
    within: float
    rank_correlation: float | None
    top1_regret: float | None
    top5_regret: float | None
    contests: int
    memory_rows: int
    memory_mean: float | None
    memory_worst_under: float | None


def case_of(row: PublishedRow) -> Case:
    """Build the case of a row.

    Raises:
        Uncosted: the row cannot be predicted; the message is the reason.
    """
    if row.text("evidence").startswith("formula-derived"):
        raise Uncosted("derived from a formula, not measured")
    model = model_of(row)
    cluster = cluster_of(row)
    plan = plan_of(row, model)
    measured_s = step_s(row, model, plan)
    if measured_s < _least_s(model, cluster, plan):
        raise Uncosted("more FLOPs a second than the devices' dense peak: not all the work in the row was computed")
    return Case(row=row, model=model, cluster=cluster, plan=plan, measured_s=measured_s)


def _least_s(model: ModelSpec, cluster: ClusterSpec, plan: Plan) -> float:
    """Return the seconds of a step at the dense peak of all devices.

    It is 0 where a peak is unknown, and for models with convolutions, because Winograd's algorithm needs fewer FLOPs
    than are counted.
    """
    if any(op.kind == "conv" for module in model.modules for op in module.ops):
        return 0.0
    name = plan.precision if plan.precision != "full" else model.dtype
    peaks = [cluster.devices[node.device].peak_flops_per_s.get(name, 0.0) for node in cluster.nodes]
    counts = [node.count * node.devices_per_node for node in cluster.nodes]
    total = sum(peak * count for peak, count in zip(peaks, counts, strict=True))
    flops = (model.flops_forward + model.flops_backward) * plan.batch.global_batch_size
    return flops / total if all(peaks) else 0.0


def scored(case: Case, cluster: ClusterSpec) -> Scored:
    """Predict a case on a cluster.

    Raises:
        Uncosted: the plan cannot be costed.
    """
    try:
        done = predict(case.model, cluster, case.plan)
    except PlanError as error:
        raise Uncosted(f"predict: {error}") from None
    memory, predicted_memory = case.row.memory_gib, done.memory.total
    if case.plan.sync != SyncPlan():
        # The plan's single bucket only models when gradients are reduced. Frameworks that reduce so late do it in place
        # and need no bucket; those that accumulate in float32 also have 16-bit gradients, half the bucket's size.
        wide = any(module.gradient_nbytes > module.parameter_nbytes for module in case.model.modules)
        predicted_memory -= done.memory.communication * (0.5 if wide else 1.0)
    return Scored(
        row_id=case.row.row_id,
        contest=case.contest,
        measured_s=case.measured_s,
        predicted_s=done.step_time_s.value,
        low_s=done.step_time_s.low,
        high_s=done.step_time_s.high,
        memory_nbytes=predicted_memory,
        measured_memory_nbytes=memory * _GIB if memory is not None else None,
    )


def errors(rows: Sequence[Scored]) -> Errors | None:
    """Return the errors over rows; None if there are no rows."""
    if not rows:
        return None
    signed = np.array([row.error for row in rows])
    absolute = np.abs(signed)
    groups: dict[tuple[str, ...], list[Scored]] = defaultdict(list)
    for row in rows:
        groups[row.contest].append(row)
    contests = [group for group in groups.values() if len(group) >= 3]
    memory = [row.memory_error for row in rows if row.memory_error is not None]
    return Errors(
        rows=len(rows),
        median=float(np.median(absolute)),
        mean=float(absolute.mean()),
        p90=float(np.quantile(absolute, 0.9)),
        bias=float(signed.mean()),
        within=float(np.mean([row.low_s <= row.measured_s <= row.high_s for row in rows])),
        rank_correlation=_mean([_spearman(group) for group in contests]),
        top1_regret=_mean([regret(group, 1) for group in contests]),
        top5_regret=_mean([regret(group, 5) for group in contests if len(group) > 5]),
        contests=len(contests),
        memory_rows=len(memory),
        memory_mean=_mean([abs(error) for error in memory]),
        memory_worst_under=min(memory) if memory else None,
    )


def regret(group: Sequence[Scored], count: int) -> float:
    """Return how much slower (as measured) the best of the `count` plans predicted fastest is than the best plan."""
    tried = sorted(group, key=lambda row: row.predicted_s)[:count]
    return min(row.measured_s for row in tried) / min(row.measured_s for row in group) - 1


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _spearman(group: Sequence[Scored]) -> float:
    """Return Spearman's rank correlation of predicted and measured times; 0 if either is constant."""
    predicted = _ranks([row.predicted_s for row in group])
    measured = _ranks([row.measured_s for row in group])
    if predicted.std() == 0 or measured.std() == 0:
        return 0.0
    return float(np.corrcoef(predicted, measured)[0, 1])


def _ranks(values: Sequence[float]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return the ranks of values; equal values share their mean rank."""
    array = np.asarray(values)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2.0)[inverse]


Setting = Literal["data sheet", "one factor", "calibrated", "mixed devices"]
"""How a prediction was calibrated.

- data sheet: nothing is fitted.
- one factor: one factor on the time is fitted to a few rows of the family.
- calibrated: a cluster's constants are fitted to rows of the same machines.
- mixed devices: the job ran on devices of different kinds.
"""

MEAN_AIM: Final[dict[Setting, float]] = {
    "data sheet": 0.25,
    "one factor": 0.12,
    "calibrated": 0.07,
    "mixed devices": 0.20,
}
P90_AIM: Final[dict[Setting, float]] = {"calibrated": 0.15}
REGRET_AIM: Final = 0.02
MEMORY_AIM: Final = 0.08
MEMORY_UNDER_AIM: Final = -0.05

_WHY: Final[dict[str, str]] = {
    "dle": "one family has many programs, frameworks and years: software versions are unknown, models are taken from "
    "their repositories, several (U-Net, recommendation) wait for their data, and printed batches mix precisions",
    "mbridge": "hand-written kernels and overlaps change with each release: identical printed configurations differ by "
    "5.9 % in the median and 77 % at most between releases",
    "mpt": "FlashAttention in Triton as of 2023 uses one kernel for A100 and H100, so that long sequences and H100 are "
    "far below what newer kernels reach",
    "titan": "the H100s are limited to 500 W, below the clock of the published peak; eager and compiled runs differ",
    "mcoreh100": "gradient reduce-scatters and parameter all-gathers overlap with compute, also with pipeline stages, "
    "which no plan can express; tensor-parallel exchanges overlap; micro-batch and interleaving are not printed",
    "bloom": "only the second iteration was measured while the cluster changed: repeats differ by 4.3 % (median), and "
    "plans are close to each other",
    "tr3": "seconds are rounded to whole numbers",
    "amphomo": "T4 with DeepSpeed of 2021: clocks fall under load, and virtual machines share their network",
    "amphet": "V100 and T4 are in virtual machines that share their network; DeepSpeed of 2021",
    "vtrains": "the host's kernel launches limit the steps of small models, and differ by framework and processor",
    "vtrainm": "a tensor-parallel group of 16 crosses nodes; one run of each configuration",
    "sc21t1": "the interconnect's fitted constants are not printed",
    "meg2020": "V100 and A100 of early drivers, one run each",
    "horovod": "the framework's own overlap of 2017, 25 Gbit/s shared with reading data",
}
_OTHERWISE: Final = "nothing is known about the software that ran it"


def misses(family: str, setting: Setting, found: Errors) -> tuple[str, ...]:
    """Return a sentence for each aim that the errors miss, followed by the likely reason; empty if all aims are met."""
    sentences = []
    if found.mean > MEAN_AIM[setting]:
        sentences.append(f"mean error {found.mean:.1%} is above {MEAN_AIM[setting]:.0%}")
    if setting in P90_AIM and found.p90 > P90_AIM[setting]:
        sentences.append(f"the 90th percentile of the errors is {found.p90:.1%}, above {P90_AIM[setting]:.0%}")
    if found.top5_regret is not None and found.top5_regret > REGRET_AIM:
        sentences.append(
            f"the best of the five plans predicted fastest is {found.top5_regret:.1%} slower than the best plan"
        )
    if found.memory_mean is not None and found.memory_mean > MEMORY_AIM:
        sentences.append(f"the mean error of memory is {found.memory_mean:.1%}, above {MEMORY_AIM:.0%}")
    if found.memory_worst_under is not None and found.memory_worst_under < MEMORY_UNDER_AIM:
        sentences.append(f"the worst prediction of memory is {-found.memory_worst_under:.1%} too low")
    if not sentences:
        return ()
    return (*sentences, f"likely because: {_WHY.get(family, _OTHERWISE)}")
