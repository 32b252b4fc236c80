"""How the best plan's speed grows with the number of devices, and from where more devices do not pay."""

import dataclasses
from collections.abc import Callable, Sequence

from tutti.config.cluster import ClusterSpec
from tutti.config.prediction import ScalingCurve, ScalingPoint
from tutti.errors import PlanError
from tutti.planner.candidates import max_unshared_ranks
from tutti.planner.plan_description import plan_words
from tutti.planner.plan_request import Choice, PlanRequest

LEAST_WORTH = 0.5
"""A device pays as long as it adds at least this fraction of what each device before it adds on average. Assumed."""


def device_counts(cluster: ClusterSpec, most: int | None = None) -> tuple[int, ...]:
    """Return 1, 2, 4 ... and the number of devices, or `most` if that is smaller.

    Each core of a CPU counts as a device, because it can have a rank.
    """
    limit = min(max_unshared_ranks(cluster), most or max_unshared_ranks(cluster))
    counts = [1]
    while counts[-1] * 2 < limit:
        counts.append(counts[-1] * 2)
    return tuple(dict.fromkeys([*counts, limit]))


def scaling(request: PlanRequest, counts: Sequence[int], search: Callable[[PlanRequest], Choice]) -> ScalingCurve:
    """Find the fastest plan with at most as many devices as each of `counts` says.

    Args:
        request: what was asked. Its objective is replaced by throughput.
        counts: numbers of devices, ascending.
        search: returns the best plan for a request.

    Raises:
        PlanError: the request fixes the number of ranks.
    """
    if request.degree is not None or request.mesh is not None:
        raise PlanError("a scaling curve varies the number of ranks, but --nproc or --mesh fixes it; leave them out")
    points: list[ScalingPoint] = []
    for count in counts:
        current = _point(
            count, dataclasses.replace(request, objective="throughput", max_devices=count, noise=None), search
        )
        before = max(points, key=lambda point: point.throughput_per_s, default=current)
        # a search ended early: the additional devices can stay idle
        if current.throughput_per_s < before.throughput_per_s:
            current = dataclasses.replace(before, devices=count)
        points.append(dataclasses.replace(current, worth=_worth(points, current)))
    until = pays_until(points)
    return ScalingCurve(
        unit=request.script.batch.unit,
        points=tuple(points),
        pays_until=until,
        least_worth=LEAST_WORTH,
        sentence=_sentence(points, until),
    )


def _point(count: int, request: PlanRequest, search: Callable[[PlanRequest], Choice]) -> ScalingPoint:
    """Return the best plan with at most `count` devices as a point of the curve."""
    try:
        choice = search(request)
    except PlanError as error:
        return ScalingPoint(devices=count, reason=str(error))
    return ScalingPoint(
        devices=count,
        used=choice.best.world_size,
        plan=plan_words(choice.best),
        step_time_s=choice.prediction.step_time_s,
        throughput_per_s=choice.prediction.throughput_per_s,
    )


def _worth(before: list[ScalingPoint], larger: ScalingPoint) -> float | None:
    """Return what each additional device adds in speed, relative to the average per device of the last plan."""
    known = [point for point in before if point.throughput_per_s]
    if not known or not larger.throughput_per_s:
        return None
    gained = larger.throughput_per_s / known[-1].throughput_per_s - 1
    return gained / (larger.devices / known[-1].devices - 1)


def pays_until(points: Sequence[ScalingPoint]) -> int:
    """Return the largest number of devices that pays, before the first point that does not; 0 without any plan."""
    until = 0
    for point in points:
        if not point.throughput_per_s or (point.worth is not None and point.worth < LEAST_WORTH):
            if until:
                break
            continue
        until = point.devices
    return until


def _sentence(points: Sequence[ScalingPoint], until: int) -> str:
    """Say up to which number more devices pay, and why not beyond it."""
    if not until:
        return "no number of these devices has a plan: " + (points[-1].reason if points else "there is none")
    at = next(point for point in points if point.devices == until)
    after = next((point for point in points if point.devices > until), None)
    if after is None:
        return f"more devices pay up to all {until}: each adds at least half of the speed that one before it adds"
    if after.worth is None:
        return f"beyond {until} devices there is no plan: {after.reason}"
    if after.throughput_per_s <= at.throughput_per_s:
        return f"more devices stop paying at {until}: {after.devices} are not faster"
    return (
        f"more devices stop paying at {until}: up to {after.devices}, each additional one adds {after.worth:.0%} of "
        "the speed that one before it adds"
    ).replace("%", " %")
