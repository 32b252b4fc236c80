"""0/1 Adam once its second moment stands: ranks step alone, and agree on their ways every so many updates."""

from dataclasses import dataclass
from typing import Final

from tutti.config.compression import ZERO_ONE, sum_sent_nbytes
from tutti.config.plan import Plan
from tutti.cost_model.compressed import VALUE_NBYTES, kernel_s
from tutti.cost_model.groups import Group
from tutti.cost_model.overlap import Exchange
from tutti.cost_model.placement import Seat
from tutti.cost_model.worker import rank_bandwidth

PASSES: Final = 14.0
"""Bytes that pass through memory for a byte of ways, when ranks agree: ways, bases, parameters and momenta are read and
written, and copied into one vector and back. Counted from the code."""

OWN_PASSES: Final = 3.0
"""The same in every update: the way is read and written, the momentum read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """Of a step on average, where ranks agree as rarely as they come to: nothing of it is hidden behind backward.
    `kept_nbytes`: of ways, bases, and what one bit has lost, old and new.
    """

    exchange: Exchange
    sent_nbytes: float
    kept_nbytes: float


def step_alone(plan: Plan, updates: int | None) -> bool:
    """Whether ranks step alone after so many updates; None: once nothing changes any more."""
    how = plan.sync.compress
    return (
        how is not None
        and how.method == ZERO_ONE
        and plan.degree("replicate") > 1
        and (updates is None or updates >= (how.freeze_step or 0))
    )


def agreed(plan: Plan, group: Group, seat: Seat, nbytes: float) -> Agreed:
    """What replicas along `group` exchange of `nbytes` of parameters."""
    how = plan.sync.compress
    assert how is not None
    sent = sum_sent_nbytes(how, [(round(nbytes / VALUE_NBYTES),)], group.ranks, VALUE_NBYTES)
    share = sent / (2 * (group.ranks - 1) / group.ranks * nbytes) if nbytes else 0.0
    copies_s = seat.slowdown * nbytes / rank_bandwidth(seat)
    kernels_s = seat.slowdown * kernel_s(plan, seat.device, group.ranks, share, nbytes)
    together_s = kernels_s + PASSES * copies_s
    longest = how.settings["longest"]
    each_s = (group.all_reduce(nbytes * share) + together_s) / longest + OWN_PASSES * copies_s
    return Agreed(
        exchange=Exchange(total_s=each_s, exposed_s=each_s), sent_nbytes=sent / longest, kept_nbytes=4 * nbytes
    )
