"""The size of gradients' buckets in words, as users type it: "8" (MiB), "auto"."""

import math
from dataclasses import replace

from tutti.config.plan import Plan
from tutti.errors import PlanError


def with_buckets(plan: Plan, text: str | None) -> Plan:
    """The plan with buckets as `text` says; as it is where that is None. Raises PlanError for another word."""
    if text is None:
        return plan
    if text.strip() == "auto":
        return replace(plan, sync=replace(plan.sync, bucket_sizes="measured"))
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size * 2**20 < math.inf or int(size * 2**20) < 1:
        raise PlanError(f"bucket-mb = {text!r}; give a size in MiB above 0, or auto")
    return replace(plan, sync=replace(plan.sync, bucket_nbytes=int(size * 2**20), bucket_sizes="stated"))
