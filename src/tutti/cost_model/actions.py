"""What the actions of a pipeline last, and when they begin and end: each rank on a core of its own, or in turns."""

from dataclasses import dataclass, replace

import numpy as np

from tutti.config.plan import Plan
from tutti.cost_model import pipeline, turns
from tutti.cost_model.pipeline import Array, Messages, Order, Places
from tutti.cost_model.turns import Crowd, Played


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
        """One after another in a schedule's order, of as many microbatches as there are. Where ranks share cores, the
        longer of two: in turns, with messages that take no time; and with messages, as if places of a host did not
        meet on its cores."""
        alone = self._alone(order)
        if self.crowd is None:
            return alone
        turned = turns.in_turns(order, self._work, self.crowd)
        return turned if max(turned.free) > max(alone.free) * (1 + 1e-9) else alone

    def ends(self, plan: Plan) -> tuple[list[float], list[float]]:
        """(when each rank has done all its actions, how long its own work takes of what is predicted for it)."""
        ranks, count, name = plan.degree("stage"), self.seconds.shape[2], plan.pipeline.schedule
        alone = pipeline.ends(plan, self._own, self.messages)
        if self.crowd is None:
            return alone, [1.0] * ranks
        whole = pipeline.shortened(name, count, ranks) if pipeline.equal(self.seconds) else count
        free, busy = self._turned(plan, whole)
        if whole < count:  # what is beyond repeats the last period
            early, worked = self._turned(plan, whole - 2 * ranks)
            periods = (count - whole) / (2 * ranks)
            free, busy = free + periods * (free - early), busy + periods * (busy - worked)
        predicted = (self.seconds - self.waits)[[0, 2, 3] if name == "zero-bubble" else [0, 1]]
        whole_s = np.array([predicted[:, rank::ranks].sum() for rank in range(ranks)])
        return np.maximum(free, alone).tolist(), (busy / np.where(whole_s > 0, whole_s, 1.0)).tolist()

    @property
    def _work(self) -> Array:
        """A rank's own work, on a core of its own."""
        slowed = [1.0] if self.crowd is None else self.crowd.slowed
        work: Array = (self.seconds - self.waits) / np.resize(slowed, self.seconds.shape[1])[:, None]
        return work

    @property
    def _own(self) -> Array:
        """What actions last where no other place's ranks compute."""
        if self.crowd is None:
            return self.seconds
        own: Array = self._work * np.resize(self.crowd.alone, self.seconds.shape[1])[:, None] + self.waits
        return own

    def _alone(self, order: Order) -> Played:
        free, ended = pipeline.moments(order, self._own, self.messages)
        picked = (order.kind, order.stage, order.microbatch)
        lasts = self._own[picked]
        busy = np.bincount(order.rank, weights=lasts - self.waits[picked], minlength=len(free))
        return Played(free=free, began=(np.array(ended) - lasts).tolist(), ended=ended, busy_s=busy.tolist())

    def _turned(self, plan: Plan, microbatches: int) -> tuple[Array, Array]:
        """(when each rank has ended, its own work's seconds), of the first microbatches in turns."""
        assert self.crowd is not None
        pipe = plan.pipeline
        order = pipeline.order_of(pipe.schedule, plan.degree("stage"), pipe.stages_per_rank, microbatches)
        played = turns.in_turns(order, self._work[:, :, :microbatches], self.crowd)
        return np.array(played.free), np.array(played.busy_s)
