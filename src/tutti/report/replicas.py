"""Replicas that differ: how far they drifted apart, how stale they were, and what a step sends on average."""

from statistics import mean

from tutti.config.quantity import Quantity
from tutti.config.sync_words import way_in_words
from tutti.report.read import Records, finite
from tutti.report.timing import seen

NOTE = "distance of a replica from the mean of all, over the mean's length"


def replicas_report(records: Records) -> dict[str, Quantity]:
    """By what it is; empty for a run whose replicas were equal."""
    steps = records.kept("step")
    seen_too = records.kept("evaluate")  # where no step can: all ranks meet there
    rows = [found for row in [*steps, *seen_too] if isinstance(found := row.data.get("replicas"), dict)]
    if not rows:
        return {}
    measured = [one for row in rows if isinstance(one := row.get("disagreement"), dict)]
    means = [value for one in measured if (value := finite(one.get("mean"))) is not None]
    largest = [value for one in measured if (value := finite(one.get("max"))) is not None]
    stale = [value for row in rows if (value := finite(row.get("staleness"))) is not None]
    sent = [value for row in steps if (value := row.number("sent_nbytes")) is not None]
    times = f"{NOTE}; measured {len(measured)} times"
    return {
        "disagreement": seen(mean(means) if means else None, "ratio", f"{times}, mean"),
        "largest disagreement": seen(max(largest, default=None), "ratio", f"{times}, farthest replica"),
        "staleness": seen(max(stale, default=None), "steps", "most updates since a replica took in what others had"),
        "bytes sent": seen(mean(sent) if sent else None, "B", "mean over all steps, rank 0: not every step sends"),
    }


def mode_text(records: Records) -> str:
    """The plan's mode in words, nothing where replicas are equal."""
    plan = records.plan
    return "" if plan is None or plan.sync.mode == "synchronous" else f"replicas {way_in_words(plan.sync)}"
