"""Errors of predictions by family: never one mean over all."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan, Sync
from tutti.cost_model import predict
from tutti.errors import PlanError
from tutti.validate.machines import cluster_of
from tutti.validate.measured import step_s
from tutti.validate.models import model_of
from tutti.validate.plans import plan_of
from tutti.validate.rows import Row, Uncosted

_GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row that can be costed: what it ran on, and what it measured. `device`: name in its cluster."""

    row: Row
    model: ModelSpec
    cluster: ClusterSpec
    plan: Plan
    measured_s: float

    @property
    def machine(self) -> str:
        """What a calibration is for: device and how many share a node."""
        return "; ".join(node.device for node in self.cluster.nodes)

    @property
    def contest(self) -> tuple[str, str, str, str, str]:
        """Rows that differ in nothing but how the work is spread, among which a planner would choose."""
        text = self.row.text
        return (text("model"), text("n_gpus"), text("gpu"), text("seq_len"), text("global_batch"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A prediction beside its measurement; memory in bytes, None where none was printed."""

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
        """Of the step's time, relative to the measured one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        if self.measured_memory_nbytes is None:
            return None
        return self.memory_nbytes / self.measured_memory_nbytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of several rows: absolute errors of the step's time (median, mean, 90th percentile), the mean signed one, how
    many lie in the prediction's interval, Spearman's rank correlation within contests (None below 3 rows), and regret:
    how much slower than the best measured plan is the best predicted one, or the best measured of the 5 predicted best.
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


def case_of(row: Row) -> Case:
    """A row as something to predict. Raises Uncosted with the reason."""
    if row.text("evidence").startswith("formula-derived"):
        raise Uncosted("derived from a formula, no measurement")
    model = model_of(row)
    cluster = cluster_of(row)
    plan = plan_of(row, model)
    measured_s = step_s(row, model, plan)
    if measured_s < _least_s(model, cluster, plan):
        raise Uncosted("more FLOPs a second than the devices' dense peak: not all that the row names was computed")
    return Case(row=row, model=model, cluster=cluster, plan=plan, measured_s=measured_s)


def _least_s(model: ModelSpec, cluster: ClusterSpec, plan: Plan) -> float:
    """Seconds of a step at the dense peak of all devices; 0 where a peak is not known, and for convolutions, which
    Winograd's form computes with fewer FLOPs than are counted.
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
    """Predict a case on a cluster. Raises Uncosted where the plan cannot be costed."""
    try:
        done = predict(case.model, cluster, case.plan)
    except PlanError as error:
        raise Uncosted(f"predict: {error}") from None
    memory, held = case.row.memory_gib, done.memory.total
    if case.plan.sync != Sync():
        # One bucket of all gradients says when they are summed. Frameworks that do so sum them in place; those that
        # add them up in float32 have 16-bit ones besides.
        wide = any(module.gradient_nbytes > module.parameter_nbytes for module in case.model.modules)
        held -= done.memory.communication * (0.5 if wide else 1.0)
    return Scored(
        row_id=case.row.row_id,
        contest=case.contest,
        measured_s=case.measured_s,
        predicted_s=done.step_time_s.value,
        low_s=done.step_time_s.low,
        high_s=done.step_time_s.high,
        memory_nbytes=held,
        measured_memory_nbytes=memory * _GIB if memory is not None else None,
    )


def errors(rows: Sequence[Scored]) -> Errors | None:
    """The errors of rows; None of none."""
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
        memory_mean=_mean([abs(each) for each in memory]),
        memory_worst_under=min(memory) if memory else None,
    )


def regret(group: Sequence[Scored], count: int) -> float:
    """How much slower than the best measured is the best measured among the `count` predicted fastest."""
    tried = sorted(group, key=lambda row: row.predicted_s)[:count]
    return min(row.measured_s for row in tried) / min(row.measured_s for row in group) - 1


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _spearman(group: Sequence[Scored]) -> float:
    predicted = _ranks([row.predicted_s for row in group])
    measured = _ranks([row.measured_s for row in group])
    if predicted.std() == 0 or measured.std() == 0:
        return 0.0
    return float(np.corrcoef(predicted, measured)[0, 1])


def _ranks(values: Sequence[float]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Ranks; equal values share the mean of theirs."""
    array = np.asarray(values)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2.0)[inverse]
