"""What the actions of a pipeline last, and when they begin and end: each rank on a core of its own, or in turns."""

from dataclasses import dataclass, replace

import numpy as np

from tutti.predict import pipeline, turns
from tutti.predict.pipeline import Array, Messages, Order, Places
from tutti.predict.turns import Crowd, Played
from tutti.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """`seconds`: (kinds, stages, microbatches), of it `waits` for other ranks at the same place of the stage axis;
    `crowd`: ranks that share cores, None where each has its own."""

    seconds: Array
    waits: Array
    messages: Messages
    crowd: Crowd | None

    def of(self, microbatches: Places | slice) -> "Actions":
        """Those of some microbatches."""
        seconds, waits = (one[:, :, microbatches] for one in (self.seconds, self.waits))
        return replace(self, seconds=seconds, waits=waits, messages=self.messages.of(microbatches))

    def played(self, order: Order) -> Played:
        """One after another in a schedule's order, of as many microbatches as there are."""
        if self.crowd is not None:
            return turns.in_turns(order, self.seconds, self.waits, self.messages, self.crowd)
        free, ended = pipeline.moments(order, self.seconds, self.messages)
        picked = (order.kind, order.stage, order.microbatch)
        lasts = self.seconds[picked]
        busy = np.bincount(order.rank, weights=lasts - self.waits[picked], minlength=len(free))
        return Played(free=free, began=(np.array(ended) - lasts).tolist(), ended=ended, busy_s=busy.tolist())

    def ends(self, plan: Plan) -> tuple[list[float], list[float]]:
        """(when each rank has done all its actions, how long its own work takes of what is predicted for it)."""
        ranks, count, name = plan.degree("stage"), self.seconds.shape[2], plan.pipeline.schedule
        if self.crowd is None:
            return pipeline.ends(plan, self.seconds, self.messages), [1.0] * ranks
        whole = pipeline.shortened(name, count, ranks)
        if whole == count or not pipeline.equal(self.seconds):
            whole = count
        late = self.of(slice(whole)).played(self._order(plan, whole))
        free, busy = np.array(late.free), np.array(late.busy_s)
        if whole < count:  # what is beyond repeats the last period
            early = self.of(slice(whole - 2 * ranks)).played(self._order(plan, whole - 2 * ranks))
            periods = (count - whole) / (2 * ranks)
            free = free + periods * (free - early.free)
            busy = busy + periods * (busy - early.busy_s)
        work = (self.seconds - self.waits)[[0, 2, 3] if name == "zero-bubble" else [0, 1]]
        alone = np.array([work[:, rank::ranks].sum() for rank in range(ranks)])
        return free.tolist(), (busy / np.where(alone > 0, alone, 1.0)).tolist()

    def _order(self, plan: Plan, microbatches: int) -> Order:
        pipe = plan.pipeline
        return pipeline.order_of(pipe.schedule, plan.degree("stage"), pipe.stages_per_rank, microbatches)
