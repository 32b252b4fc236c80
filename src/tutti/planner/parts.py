"""Parts of layers along the split axis, where its ranks are of unequal speed: all of a group finish together."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from tutti.config.plan import Plan
from tutti.config.prediction import RankMemory
from tutti.config.refusals import check_split
from tutti.cost_model import compute
from tutti.cost_model.division import parts
from tutti.cost_model.layout import recompute_regions
from tutti.cost_model.lines import by_place
from tutti.cost_model.memory import kept
from tutti.cost_model.placement import Seat
from tutti.cost_model.update import update_nbytes
from tutti.cost_model.worker import worker_at
from tutti.errors import PlanError
from tutti.planner.balance import listed
from tutti.planner.room import Room
from tutti.planner.tables import Array

_HALVINGS = 60


def split_shares(
    room: Room, plan: Plan, memory: RankMemory, seats: tuple[Seat, ...], samples: int
) -> tuple[float, ...]:
    """A part of the divided layers for each place along the split axis such that all finish together, clipped where
    memory ends, each with a head or unit at least; empty where places are alike, or parts must be.

    A place is as quick and as roomy as the least of its ranks. `memory`: of the tightest rank at equal parts;
    `samples`: of a microbatch.
    """
    degree = plan.mesh.get("split", 1)
    if degree == 1 or len(seats) == 1:
        return ()
    paces = [_pace(room, plan, seat, samples) for seat in seats]
    of_places = by_place(plan, seats)
    slowest = [max((paces[seat] for seat in some), key=lambda one: one.total_s(1 / degree)) for some in of_places]
    free = np.array([min(seats[seat].memory_nbytes for seat in some) for some in of_places], dtype=np.float64)
    if len(set(slowest)) == 1 and len(set(free.tolist())) == 1:
        return ()
    growing = max(1.0, _growing(room, plan, memory))
    least, most = _least(room, plan), np.maximum(0.0, 1 + (free - memory.total) / growing) / degree
    whole = np.floor(most / least) * least  # a part is cut to the nearest head, which may be one more
    found = listed(together(slowest, whole if whole.sum() > 1 else most, least))
    if not found or min(found) <= 0:
        return ()
    divided = dataclasses.replace(plan, split_shares=found)
    try:
        check_split(divided)
        parts(room.tables.model, divided)
    except PlanError:
        return ()
    return found


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that a microbatch takes a rank: whatever its part is, and in proportion to its part."""

    whole_s: float
    part_s: float

    def total_s(self, part: float) -> float:
        return self.whole_s + part * self.part_s


def together(paces: list[Pace], most: Array, least: float) -> Array:
    """Parts that add up to 1, none above its `most`, with which all places that have room take the same time; one that
    is late with less than `least` gets that. Where all have too little room, parts are in proportion to it.

    (T - a) / b within these limits, with a and b the seconds that do not and that do grow with a part; their sum grows
    with T, which is found by halving.
    """
    if most.sum() <= 1:
        return np.asarray(most / max(most.sum(), 1e-300), dtype=np.float64)
    a = np.array([one.whole_s for one in paces])
    b = np.maximum(np.array([one.part_s for one in paces]), 1e-300)
    low, high = float(a.min()), float((a + b).max())

    def within(until_s: float) -> Array:
        return np.asarray(np.minimum(np.maximum((until_s - a) / b, least), most), dtype=np.float64)

    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle).sum() > 1 else (middle, high)
    found = within(high)
    return np.asarray(found / found.sum(), dtype=np.float64)


def _growing(room: Room, plan: Plan, memory: RankMemory) -> float:
    """Bytes of `memory` that are in proportion to a rank's part: a layer that is divided by its outputs keeps its whole
    input all the same."""
    columns, part = room.work.columns, room.work.part(_degrees(plan))
    state = (columns.parameters + columns.gradients + columns.optimizer) * part.weight
    keeps = kept(columns, part, recompute_regions(room.tables.model, plan), half=room.tables.half).always
    ours, kept_in_part = part.split, part.split & (part.saved < part.passed)
    held = memory.parameters + memory.gradients + memory.optimizer
    of_state, of_kept = state[ours].sum() / max(1.0, state.sum()), keeps[kept_in_part].sum() / max(1.0, keeps.sum())
    return (1 + room.fragments) * float(held * of_state + memory.activations * of_kept)


def _least(room: Room, plan: Plan) -> float:
    """The part with which a rank has one of the fewest heads or units; little where nothing is said of them."""
    limits = room.work.columns.limit[room.work.part(_degrees(plan)).split]
    return 1.0 / int(limits[limits > 0].min(initial=1000 * plan.degree("split")))


def _degrees(plan: Plan) -> tuple[int, ...]:
    return tuple(plan.degree(axis) for axis in ("split", "context", "expert", "table", "space"))


def _pace(room: Room, plan: Plan, seat: Seat, samples: int) -> Pace:
    """Of a rank on `seat`: passes, and its part of the update, which comes once in a step."""
    model, columns = room.tables.model, room.work.columns
    part, worker = room.work.part(_degrees(plan)), worker_at(seat, model.dtype, plan.precision)
    ahead, back = (one(part.ops, worker, samples, len(columns)) for one in (compute.forward, compute.backward))
    updated = update_nbytes(model, columns.gradients, columns.optimizer, on_cpu=seat.device.kind == "cpu")
    updated = updated * part.weight / plan.degree("shard")
    times = plan.batch.num_microbatches
    seconds = ahead.seconds + back.seconds + worker.slowdown / worker.bandwidth_bytes_per_s * updated / times
    divided = float(seconds[part.split].sum())
    return Pace(float(seconds.sum()) - divided, divided * plan.degree("split"))
