"""What past runs say about ways to send less: how many times the samples of exact runs they took to a quality."""

from collections.abc import Sequence
from statistics import mean

from tutti.config.sync_words import way_in_words
from tutti.errors import ReportError
from tutti.report.quality import Target, choose, curves, first_reached
from tutti.report.read import Records


def samples_by_way(runs: Sequence[Records], target: Target) -> dict[str, float | None]:
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
        found.setdefault(_way(records), []).append(_samples(records, target))
    exact = found.pop("", [])
    reached = [one for one in exact if one is not None]
    wanted = f"{target.metric} {target.value:g}"
    if not reached:
        raise ReportError(f"no exact run reached {wanted}; name one that did, beside those to compare with it")
    if not found:
        raise ReportError(
            "all runs named are exact; name one that compressed its gradients or let replicas differ, too"
        )
    got = {way: [one for one in some if one is not None] for way, some in found.items()}
    return {way: mean(got[way]) / mean(reached) if len(got[way]) == len(some) else None for way, some in found.items()}


def _way(records: Records) -> str:
    """How the run exchanged, in words; empty for an exact one."""
    if records.plan is None:
        raise ReportError(f"run {records.header.name!r} has no plan.json; name a run that has one")
    return way_in_words(records.plan.sync)


def _samples(records: Records, target: Target) -> float | None:
    """Samples when the target was first reached; None where it was not."""
    curve = choose(curves(records), target)
    position = first_reached(curve, target.value) if curve else None
    return float(curve.samples[position]) if curve is not None and position is not None else None
