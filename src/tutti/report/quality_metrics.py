"""Quality of a run: its curves, the value it is judged by, and what it took to reach a target."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from tutti.config.run_report import MetricCurve, NoiseReport, QualityReport, Quantity, Split, TargetReport
from tutti.config.sync_notation import format_relaxation
from tutti.errors import ReportError
from tutti.report.formatting import higher_is_better
from tutti.report.measurements import seen
from tutti.report.run_records import MetricsRow, Records

CURVE_POINTS = 500
_SPLITS: dict[str, Split] = {
    "test": "test",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "train": "train",
    "training": "train",
}
_PREFERENCE: tuple[Split, ...] = ("test", "validation", "other", "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityTarget:
    """A quality to reach: evaluation `name` (None: the one the run is judged by), metric and value."""

    name: str | None
    metric: str
    value: float


def parse_target(text: str) -> QualityTarget:
    """Read "test.accuracy=0.9" or "accuracy=0.9". Raises ReportError when it is neither."""
    left, _, right = text.replace(">=", "=").replace("<=", "=").partition("=")
    name, _, metric = left.strip().rpartition(".")
    try:
        value = float(right)
    except ValueError:
        value = float("nan")
    if not metric or value != value or value in (float("inf"), float("-inf")):
        raise ReportError(f"target {text!r} is not NAME.METRIC=VALUE; write for example test.accuracy=0.9")
    return QualityTarget(name=name or None, metric=metric, value=value)


def split_of(row: MetricsRow, training_sha256: str) -> Split:
    """Which part of the data an evaluation used: by its name, but "train" if its data is the training data."""
    data = row.data.get("data")
    if isinstance(data, dict) and data.get("sha256") and data.get("sha256") == training_sha256:
        return "train"
    return _SPLITS.get(str(row.data.get("name", "")).lower(), "other")


def samples_at(records: Records) -> Callable[[int], int]:
    """A function from a step to the samples trained on by then."""
    steps = records.kept("step")
    numbers = [row.step for row in steps]
    totals = [int(row.number("samples_seen") or 0) for row in steps]

    def lookup(step: int) -> int:
        position = bisect_right(numbers, step)
        return totals[position - 1] if position else 0

    return lookup


def curves(records: Records) -> tuple[MetricCurve, ...]:
    """Training loss, and every value of every evaluation, over steps, samples and wall time."""
    samples = samples_at(records)
    found = [_curve("training loss", "train", "loss", records.kept("step"), samples, "loss")]
    names = dict.fromkeys(str(row.data.get("name", "")) for row in records.kept("evaluate"))
    for name in names:
        rows = [row for row in records.kept("evaluate") if str(row.data.get("name", "")) == name]
        split = split_of(rows[-1], records.header.data.sha256)
        for metric in dict.fromkeys(key for row in rows for key in row.mapping("values")):
            found.append(_curve(f"{name} {metric}", split, metric, rows, samples, None))
    return tuple(curve for curve in found if curve.values)


def _curve(
    name: str, split: Split, metric: str, rows: Sequence[MetricsRow], samples: Callable[[int], int], field: str | None
) -> MetricCurve:
    """A curve of a step row's `field`, or (None) of a metric among an evaluation's values."""
    points = [
        (row.step, samples(row.step), row.time_s, value)
        for row in rows
        if (value := row.number(field) if field else row.mapping("values").get(metric)) is not None
    ]
    width = -(-len(points) // CURVE_POINTS)
    note = f"every point is the mean of {width} consecutive steps" if width > 1 else ""
    if width > 1:
        groups = [points[start : start + width] for start in range(0, len(points), width)]
        points = [(*group[-1][:3], sum(point[3] for point in group) / len(group)) for group in groups]
    return MetricCurve(
        name=name,
        split=split,
        metric=metric,
        steps=tuple(point[0] for point in points),
        samples=tuple(point[1] for point in points),
        time_s=tuple(point[2] for point in points),
        values=tuple(point[3] for point in points),
        note=note,
    )


def choose(found: Sequence[MetricCurve], target: QualityTarget | None) -> MetricCurve | None:
    """The evaluation curve a run is judged by: the target's, else the test split's first metric that is no loss."""
    evaluations = [curve for curve in found if curve.name != "training loss"]
    if target is not None:
        wanted = [c for c in evaluations if c.metric == target.metric]
        if target.name is not None:
            wanted = [c for c in wanted if c.name == f"{target.name} {target.metric}"]
        if not wanted:
            names = ", ".join(curve.name.replace(" ", ".") for curve in evaluations) or "nothing"
            raise ReportError(
                f"the target names {target.name + '.' if target.name else ''}{target.metric}, but the run evaluated "
                f"{names}; name one of these"
            )
        evaluations = wanted
    ranked = sorted(evaluations, key=lambda c: (_PREFERENCE.index(c.split), c.metric == "loss"))
    return ranked[0] if ranked else None


def quality_report(records: Records, curve: MetricCurve | None, target: QualityTarget | None) -> QualityReport:
    """The quality section: the last evaluation's value, never the best one's."""
    if curve is None:
        return QualityReport()
    name = curve.name.removesuffix(f" {curve.metric}")
    better_up = higher_is_better(curve.metric)
    rows = [row for row in records.kept("evaluate") if str(row.data.get("name", "")) == name]
    gaps = [b - a for a, b in zip((0, *curve.samples), curve.samples, strict=False)]
    wanted = Quantity(value=target.value, evidence="assumed", note="set by the user") if target else Quantity()
    return QualityReport(
        name=name,
        metric=curve.metric,
        split=curve.split,
        higher_is_better=better_up,
        test_value=seen(curve.values[-1], note="the last evaluation"),
        best_value=seen(max(curve.values) if better_up else min(curve.values), note="best of all evaluations"),
        target=wanted,
        reached=None if target is None else first_reached(curve, target.value) is not None,
        eval_every_samples=seen(median(gaps), "samples"),
        eval_samples=seen(rows[-1].number("samples") if rows else None, "samples"),
    )


def first_reached(curve: MetricCurve, value: float) -> int | None:
    """Position of the first point at or beyond a target value, or None."""
    up = higher_is_better(curve.metric)
    hits = (i for i, v in enumerate(curve.values) if (v >= value if up else v <= value))
    return next(hits, None)


def target_report(records: Records, curve: MetricCurve | None, target: QualityTarget | None) -> TargetReport:
    """What it took to reach the target the first time, on the run's clock."""
    position = first_reached(curve, target.value) if curve and target else None
    if curve is None or position is None:
        return TargetReport()
    step, samples, time_s = curve.steps[position], curve.samples[position], curve.time_s[position]
    size = records.header.data.samples
    note = "first evaluation at or beyond the target"
    return TargetReport(
        time=seen(time_s, "s", note),
        steps=seen(step, "steps", note),
        epochs=seen(samples / size if size else None, "epochs", note),
        samples=seen(samples, "samples", note),
        device_seconds=cost(records, time_s),
    )


def cost(records: Records, seconds: float) -> Quantity:
    """What a time cost: devices times seconds; of a CPU run cores times seconds, for its ranks share the devices."""
    ranks = records.header.ranks
    cores = sum(rank.threads for rank in ranks)
    if cores and all(rank.device == "cpu" for rank in ranks):
        return seen(cores * seconds, "core s", "threads of all ranks times time")
    return seen(records.header.world_size * seconds, "device s", "ranks times time")


def noise_report(records: Records) -> NoiseReport | None:
    """Means over the second half of a run's measurements; None for a run that measured nothing.

    The first half is left out because the mean gradient shrinks fastest there: it would hide the noise of the rest.
    """
    found = [one for row in records.kept("step") if (one := row.mapping("noise"))]
    if not found:
        return None
    late = found[len(found) // 2 :]
    square, variance = (sum(one.get(name, 0.0) for one in late) / len(late) for name in ("square", "variance"))
    scale = variance / square if square > 0 and variance >= 0 else None
    span = f"mean of the last {len(late)} measurements"
    return NoiseReport(
        critical_batch=seen(
            scale, records.header.recipe.unit, f"simple noise scale (McCandlish et al. 2018, A.1), {span}"
        ),
        square=seen(square, "", f"squared norm of the mean gradient, {span}"),
        variance=seen(variance, "", f"trace of the covariance of one unit's gradient, {span}"),
        measured=seen(len(found), "steps", "steps measured"),
    )


def samples_at_small_batches(records: Records, target: QualityTarget | None) -> tuple[float, float]:
    """(critical batch, what the quality takes with very small batches), both in the batch's unit, as a run says.

    The quality is the `target`, where it was first reached, else the one at the run's end. A step with the batch B
    counts B / (1 + B / critical batch): from (S / S_min - 1) (E / E_min - 1) = 1, McCandlish et al. 2018, equation
    2.11. Raises ReportError for a run that measured no noise scale, or did not reach the target.
    """
    found = noise_report(records)
    critical = found.critical_batch.value if found else None
    name = records.header.name
    if critical is None or not critical > 0:
        raise ReportError(f"run {name!r} has no measured noise scale; train with Job(noise_every=10) or so")
    steps = records.kept("step")
    if target is not None:
        curve = choose(curves(records), target)
        position = first_reached(curve, target.value) if curve else None
        if curve is None or position is None:
            raise ReportError(f"run {name!r} did not reach {target.metric} {target.value:g}; name a quality it reached")
        steps = tuple(row for row in steps if row.step <= curve.steps[position])
    batches = [size for row in steps if (size := _batch(row, records.header.recipe.unit))]
    least = sum(size / (1 + size / critical) for size in batches)
    if not least > 0:
        raise ReportError(f"run {name!r} has no step before that quality; name a later one")
    return critical, least


def _batch(row: MetricsRow, unit: str) -> float | None:
    return row.number("tokens" if unit == "tokens" else "samples")


def samples_by_strategy(runs: Sequence[Records], target: QualityTarget) -> dict[str, float | None]:
    """By way, as a user types it: mean samples to the `target` over the exact runs' mean; None where a run that went it
    did not get there.

    Raises ReportError without an exact run that reached it, without any other run, or where batches differ.
    """
    sizes = {records.header.recipe.global_batch_size for records in runs}
    if len(sizes) > 1:
        shown = ", ".join(map(str, sorted(sizes)))
        raise ReportError(f"runs with global batches of {shown} differ in samples for that, too; name runs of one size")
    found: dict[str, list[float | None]] = {}
    for records in runs:
        found.setdefault(_strategy_of(records), []).append(_samples(records, target))
    exact = found.pop("", [])
    reached = [one for one in exact if one is not None]
    wanted = f"{target.metric} {target.value:g}"
    if not reached:
        raise ReportError(f"no exact run reached {wanted}; name one that did, beside those to compare with it")
    if not found:
        raise ReportError(
            "all runs named are exact; name one that compressed its gradients or let replicas differ, too"
        )
    got = {strategy: [one for one in some if one is not None] for strategy, some in found.items()}
    return {
        strategy: mean(got[strategy]) / mean(reached) if len(got[strategy]) == len(some) else None
        for strategy, some in found.items()
    }


def _strategy_of(records: Records) -> str:
    """How the run exchanged, in words; empty for an exact one."""
    if records.plan is None:
        raise ReportError(f"run {records.header.name!r} has no plan.json; name a run that has one")
    return format_relaxation(records.plan.sync)


def _samples(records: Records, target: QualityTarget) -> float | None:
    """Samples when the target was first reached; None where it was not."""
    curve = choose(curves(records), target)
    position = first_reached(curve, target.value) if curve else None
    return float(curve.samples[position]) if curve is not None and position is not None else None
