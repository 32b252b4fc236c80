"""The gradient noise scale of a run: its critical batch, and what it says about other batches."""

from tutti.config.report_measured import NoiseReport
from tutti.errors import ReportError
from tutti.report.quality import Target, choose, curves, first_reached
from tutti.report.read import Records, Row
from tutti.report.timing import seen


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


def samples_at_small_batches(records: Records, target: Target | None) -> tuple[float, float]:
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


def _batch(row: Row, unit: str) -> float | None:
    return row.number("tokens" if unit == "tokens" else "samples")
