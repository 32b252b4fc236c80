"""Lines of ranks: who computes the same samples, and what kinds of ranks stand at each place of a pipeline."""

from dataclasses import dataclass

import numpy as np

from tutti.config.plan import Plan
from tutti.config.vocabulary import DATA_AXES
from tutti.cost_model.counts import rank_samples
from tutti.cost_model.groups import seat_of_ranks
from tutti.cost_model.pipeline import Places
from tutti.cost_model.placement import Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Ranks with the same samples. `samples`: (of a microbatch, in how many), the last microbatch last; `seats`: for
    each place on the stage axis, the kinds of its ranks (see kinds_of_ranks)."""

    samples: tuple[tuple[int, int], ...]
    seats: tuple[tuple[int, ...], ...]

    @property
    def microbatches(self) -> list[int]:
        """Samples of each microbatch, in order."""
        return [count for count, times in self.samples for _ in range(times)]


def lines_of(plan: Plan, seats: tuple[Seat, ...], samples: int) -> list[Line]:
    """The different lines of a plan. Equal shares count as the largest of them."""
    return list({id(line): line for line in lines_by_share(plan, seats, samples)}.values())


def lines_by_share(plan: Plan, seats: tuple[Seat, ...], samples: int) -> list[Line]:
    """The line of each data-parallel rank, equal ones the same object."""
    degree, stages = plan.data_parallel_degree, plan.degree("stage")
    count = plan.batch.num_microbatches
    if plan.shares:
        counts = rank_samples(samples, count, degree, plan.shares)
    else:
        (whole,) = rank_samples(samples, count, 1)
        counts = [tuple((-(-size // degree), times) for size, times in whole)] * degree
    alike = len(seats) == 1 and not plan.split_weights
    if alike and not plan.shares:
        return [Line(samples=counts[0], seats=((0,),) * stages)] * degree
    if alike:
        alone = {one: Line(samples=one, seats=((0,),) * stages) for one in dict.fromkeys(counts)}
        return [alone[one] for one in counts]
    where = by_share_and_stage(plan, kinds_of_ranks(plan, seats))
    rows, index = np.unique(where.reshape(degree, -1), axis=0, return_inverse=True)
    kinds = [tuple(tuple(sorted(set(place))) for place in row.reshape(stages, -1).tolist()) for row in rows]
    pairs = list(zip(counts, index.reshape(-1).tolist(), strict=True))
    found = {pair: Line(samples=pair[0], seats=kinds[pair[1]]) for pair in dict.fromkeys(pairs)}
    return [found[pair] for pair in pairs]


def by_share_and_stage(plan: Plan, of_ranks: Places) -> Places:
    """(data-parallel ranks, places on the stage axis, the others): what is said of each rank, in the mesh's order."""
    axes = list(plan.mesh)
    data = [place for place, axis in enumerate(axes) if axis in DATA_AXES]
    stage = [place for place, axis in enumerate(axes) if axis == "stage"]
    others = [place for place in range(len(axes)) if place not in (*data, *stage)]
    where: Places = of_ranks.reshape(list(plan.mesh.values())).transpose(data + stage + others)
    return where.reshape(plan.data_parallel_degree, plan.degree("stage"), -1)


def kinds_of_ranks(plan: Plan, seats: tuple[Seat, ...]) -> Places:
    """What tells ranks apart, in their order: the index of the seat, or, where parts are unequal along the split axis,
    (seat, place along it), numbered row by row."""
    at = seat_of_ranks(seats)
    if not plan.split_weights:
        return at
    degrees = list(plan.mesh.values())
    places = np.indices(degrees, dtype=np.intp)[list(plan.mesh).index("split")].reshape(-1)
    found: Places = at * len(plan.split_weights) + places
    return found


def by_place(plan: Plan, seats: tuple[Seat, ...]) -> tuple[tuple[int, ...], ...]:
    """The seats that ranks at each place along the split axis have."""
    rows = np.moveaxis(seat_of_ranks(seats).reshape(list(plan.mesh.values())), list(plan.mesh).index("split"), 0)
    return tuple(tuple(np.unique(row).tolist()) for row in rows)
