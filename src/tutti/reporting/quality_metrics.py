"""Quality of a run: its curves, the value that it is judged by, and the cost of reaching a target."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from tutti.config.run_report import MetricCurve, NoiseReport, QualityReport, Quantity, Split, TargetReport
from tutti.config.sync_notation import format_relaxation
from tutti.errors import ReportError
from tutti.reporting.formatting import higher_is_better
from tutti.reporting.measurements import seen
from tutti.reporting.run_records import MetricsRow, Records

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
    """A quality to reach.

    Attributes:
        name: the evaluation; None for the one that the run is judged by.
    """

    name: str | None
    metric: str
    value: float


def parse_target(text: str) -> QualityTarget:
    """Parse a target such as "test.accuracy=0.9" or "accuracy=0.9"; ">=" and "<=" count as "=".

    Raises:
        ReportError: the text has another form, or the value is not finite.
    """
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
    """Return which part of the data an evaluation used.

    Its name decides, but an evaluation on data with the hash of the training data is always "train".
    """
    data = row.data.get("data")
    if isinstance(data, dict) and data.get("sha256") and data.get("sha256") == training_sha256:
        return "train"
    return _SPLITS.get(str(row.data.get("name", "")).lower(), "other")


def samples_at(records: Records) -> Callable[[int], int]:
    """Return a function from a step number to the samples trained on by then."""
    steps = records.kept("step")
    numbers = [row.step for row in steps]
    totals = [int(row.number("samples_seen") or 0) for row in steps]

    def lookup(step: int) -> int:
        position = bisect_right(numbers, step)
        return totals[position - 1] if position else 0

    return lookup


def curves(records: Records) -> tuple[MetricCurve, ...]:
    """Return the training loss and every metric of every evaluation, over steps, samples and wall time."""
    samples = samples_at(records)
    result = [_curve("training loss", "train", "loss", records.kept("step"), samples, "loss")]
    names = dict.fromkeys(str(row.data.get("name", "")) for row in records.kept("evaluate"))
    for name in names:
        rows = [row for row in records.kept("evaluate") if str(row.data.get("name", "")) == name]
        split = split_of(rows[-1], records.header.data.sha256)
        for metric in dict.fromkeys(key for row in rows for key in row.mapping("values")):
            result.append(_curve(f"{name} {metric}", split, metric, rows, samples, None))
    return tuple(curve for curve in result if curve.values)


def _curve(
    name: str, split: Split, metric: str, rows: Sequence[MetricsRow], samples: Callable[[int], int], field: str | None
) -> MetricCurve:
    """Build a curve from a field of step rows or, if `field` is None, from a metric of evaluation rows.

    More than CURVE_POINTS points are averaged in groups of consecutive ones.
    """
    points = [
        (row.step, samples(row.step), row.time_s, value)
        for row in rows
        if (value := row.number(field) if field else row.mapping("values").get(metric)) is not None
    ]
    width = -(-len(points) // CURVE_POINTS)
    note = f"each point is the mean of {width} consecutive steps" if width > 1 else ""
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


def choose(candidates: Sequence[MetricCurve], target: QualityTarget | None) -> MetricCurve | None:
    """Return the evaluation curve by which the run is judged; None without evaluations.

    It is the target's, or else the first one of the best split (test, validation, other, train), with losses last.

    Args:
        candidates: all curves of the run.
        target: the quality to reach.

    Raises:
        ReportError: the target names an evaluation that the run does not have.
    """
    evaluations = [curve for curve in candidates if curve.name != "training loss"]
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
    """Build the quality section, which is judged by the last evaluation and never by the best one."""
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
        reference_value=_reference(records.header.extra.get("quality.reference_value")),
        selection="best" if records.header.extra.get("quality.selection") == "best" else "last",
        reloaded=_reloaded(curve),
        reached=None if target is None else first_reached(curve, target.value) is not None,
        eval_every_samples=seen(median(gaps), "samples"),
        eval_samples=seen(rows[-1].number("samples") if rows else None, "samples"),
    )


def _reloaded(curve: MetricCurve) -> bool:
    """Return whether the last value is that of an earlier step, after another value at its own step."""
    last, step = curve.values[-1], curve.steps[-1]
    pairs = list(zip(curve.steps[:-1], curve.values[:-1], strict=True))
    other = any(at == step and value != last for at, value in pairs)
    return other and any(at < step and value == last for at, value in pairs)


def _reference(text: str | None) -> Quantity:
    """Return the quality of the reference that the user stated; empty if there is none."""
    return Quantity() if text is None else Quantity(value=float(text), evidence="assumed", note="stated by the user")


def first_reached(curve: MetricCurve, value: float) -> int | None:
    """Return the position of the first point that reaches the value; None if none does."""
    up = higher_is_better(curve.metric)
    hits = (i for i, v in enumerate(curve.values) if (v >= value if up else v <= value))
    return next(hits, None)


def target_report(records: Records, curve: MetricCurve | None, target: QualityTarget | None) -> TargetReport:
    """Return the time, steps and samples after which the run first reached the target; empty if it did not."""
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
    """Return devices multiplied by seconds; for a run on CPUs cores, because its ranks share a device."""
    ranks = records.header.ranks
    cores = sum(rank.threads for rank in ranks)
    if cores and all(rank.device == "cpu" for rank in ranks):
        return seen(cores * seconds, "core s", "threads of all ranks multiplied by time")
    return seen(records.header.world_size * seconds, "device s", "ranks multiplied by time")


def noise_report(records: Records) -> NoiseReport | None:
    """Return the mean gradient noise over the second half of the run's measurements; None for a run without any.

    The first half is left out because the mean gradient shrinks fastest there, which would hide the later noise.
    """
    measurements = [measurement for row in records.kept("step") if (measurement := row.mapping("noise"))]
    if not measurements:
        return None
    late = measurements[len(measurements) // 2 :]
    square, variance = (
        sum(measurement.get(name, 0.0) for measurement in late) / len(late) for name in ("square", "variance")
    )
    scale = variance / square if square > 0 and variance >= 0 else None
    span = f"mean of the last {len(late)} measurements"
    return NoiseReport(
        critical_batch=seen(
            scale, records.header.recipe.unit, f"simple noise scale (McCandlish et al. 2018, A.1), {span}"
        ),
        square=seen(square, "", f"squared norm of the mean gradient, {span}"),
        variance=seen(variance, "", f"trace of the covariance of one unit's gradient, {span}"),
        measured=seen(len(measurements), "steps", "steps measured"),
    )


def samples_at_small_batches(records: Records, target: QualityTarget | None) -> tuple[float, float]:
    """Return the critical batch, and the samples needed to reach a quality with very small batches.

    A step with batch B counts B / (1 + B / critical batch): this follows from (S / S_min - 1) (E / E_min - 1) = 1,
    McCandlish et al. 2018, equation 2.11.

    Args:
        records: a run that measured its noise scale.
        target: the quality, counted up to where it was first reached; None counts all steps.

    Returns:
        (critical batch, samples), both in the unit of the run's batch.

    Raises:
        ReportError: the run measured no noise scale, or did not reach the target.
    """
    noise = noise_report(records)
    critical = noise.critical_batch.value if noise else None
    name = records.header.name
    if critical is None or not critical > 0:
        raise ReportError(f"run {name!r} has no measured noise scale; train with Job(noise_every=10), for example")
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
        raise ReportError(f"run {name!r} has no step before it reached that quality; name a quality it reached later")
    return critical, least


def _batch(row: MetricsRow, unit: str) -> float | None:
    """Return the size of a step's batch, in the given unit."""
    return row.number("tokens" if unit == "tokens" else "samples")


def samples_by_strategy(runs: Sequence[Records], target: QualityTarget) -> dict[str, float | None]:
    """Return how many times the samples of exact runs each strategy needs to reach the target.

    Returns:
        Strategy, as a user types it, to its mean samples divided by the mean of the exact runs; None where any run of
        the strategy did not reach the target.

    Raises:
        ReportError: no exact run reached the target, all runs are exact, a run has no plan, or global batches differ.
    """
    sizes = {records.header.recipe.global_batch_size for records in runs}
    if len(sizes) > 1:
        shown = ", ".join(map(str, sorted(sizes)))
        raise ReportError(
            f"the runs have global batches of {shown}, which also change how many samples they need; name runs with "
            "one global batch size"
        )
    by_strategy: dict[str, list[float | None]] = {}
    for records in runs:
        by_strategy.setdefault(_strategy_of(records), []).append(_samples(records, target))
    exact = by_strategy.pop("", [])
    reached = [count for count in exact if count is not None]
    wanted = f"{target.metric} {target.value:g}"
    if not reached:
        raise ReportError(f"no exact run reached {wanted}; name one that did, together with the runs to compare")
    if not by_strategy:
        raise ReportError(
            "all runs named are exact; also name one that compressed its gradients or let replicas diverge"
        )
    reached_counts = {
        strategy: [count for count in counts if count is not None] for strategy, counts in by_strategy.items()
    }
    return {
        strategy: mean(reached_counts[strategy]) / mean(reached)
        if len(reached_counts[strategy]) == len(counts)
        else None
        for strategy, counts in by_strategy.items()
    }


def _strategy_of(records: Records) -> str:
    """Return how the run communicates, as a user types it; empty for an exact run."""
    if records.plan is None:
        raise ReportError(f"run {records.header.name!r} has no plan.json; name runs that have one")
    return format_relaxation(records.plan.sync)


def _samples(records: Records, target: QualityTarget) -> float | None:
    """Return the samples after which the target was first reached; None where it was not."""
    curve = choose(curves(records), target)
    position = first_reached(curve, target.value) if curve else None
    return float(curve.samples[position]) if curve is not None and position is not None else None
