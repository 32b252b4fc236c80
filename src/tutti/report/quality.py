"""Quality of a run: its curves, the value it is judged by, and what it took to reach a target."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from tutti.config.quantity import Curve, Quantity, Split
from tutti.config.report_measured import QualityReport, TargetReport
from tutti.errors import ReportError
from tutti.report.read import Records, Row
from tutti.report.timing import seen
from tutti.report.words import higher_is_better

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
class Target:
    """A quality to reach: evaluation `name` (None: the one the run is judged by), metric and value."""

    name: str | None
    metric: str
    value: float


def parse_target(text: str) -> Target:
    """Read "test.accuracy=0.9" or "accuracy=0.9". Raises ReportError when it is neither."""
    left, _, right = text.replace(">=", "=").replace("<=", "=").partition("=")
    name, _, metric = left.strip().rpartition(".")
    try:
        value = float(right)
    except ValueError:
        value = float("nan")
    if not metric or value != value or value in (float("inf"), float("-inf")):
        raise ReportError(f"target {text!r} is not NAME.METRIC=VALUE; write for example test.accuracy=0.9")
    return Target(name=name or None, metric=metric, value=value)


def split_of(row: Row, training_sha256: str) -> Split:
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


def curves(records: Records) -> tuple[Curve, ...]:
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
    name: str, split: Split, metric: str, rows: Sequence[Row], samples: Callable[[int], int], field: str | None
) -> Curve:
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
    return Curve(
        name=name,
        split=split,
        metric=metric,
        steps=tuple(point[0] for point in points),
        samples=tuple(point[1] for point in points),
        time_s=tuple(point[2] for point in points),
        values=tuple(point[3] for point in points),
        note=note,
    )


def choose(found: Sequence[Curve], target: Target | None) -> Curve | None:
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


def quality_report(records: Records, curve: Curve | None, target: Target | None) -> QualityReport:
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


def first_reached(curve: Curve, value: float) -> int | None:
    """Position of the first point at or beyond a target value, or None."""
    up = higher_is_better(curve.metric)
    hits = (i for i, v in enumerate(curve.values) if (v >= value if up else v <= value))
    return next(hits, None)


def target_report(records: Records, curve: Curve | None, target: Target | None) -> TargetReport:
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
