"""One microbatch on one kind of rank: seconds of forward and backward, module by module, and what is exchanged."""

from dataclasses import dataclass

import numpy as np

from tutti.cost_model import compute
from tutti.cost_model.batch_statistics import taken_in_passes
from tutti.cost_model.exchanges import Exchanged, Wires, exchanged
from tutti.cost_model.layout import Region, marks
from tutti.cost_model.slabs import computed_apart
from tutti.cost_model.table import Flags
from tutti.cost_model.worker import Array, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Seconds by module, recomputing in backward. `waits`: what is waited for and sent, the repeats of recomputing
    among it; `limits`: (3, modules), the seconds of both passes by what limits them.
    """

    forward_s: Array
    backward_s: Array
    waits: Exchanged
    limits: Array

    @property
    def total_s(self) -> float:
        """Of all modules, there and back."""
        return float((self.forward_s + self.backward_s + self.waits.forward_s + self.waits.backward_s).sum())


def passed(wires: Wires, worker: Worker, regions: tuple[Region, ...], samples: int) -> Passed:
    """A microbatch of `samples` samples on a rank that computes as `worker` does."""
    ops, modules = wires.division.ops, len(wires.columns)
    if wires.on_cpu and wires.statistics_group().ranks > 1:
        ops = taken_in_passes(ops)
    ahead = compute.forward(ops, worker, samples, modules)
    back = compute.backward(ops, worker, samples, modules)
    for chunks in {region.chunks for region in regions} - {1}:
        inside = np.zeros(modules, dtype=np.bool_)
        inside[[index for region in regions if region.chunks == chunks for index in region.members]] = True
        part = -(-samples // chunks)
        ahead = _chunked(ahead, compute.forward(ops, worker, part, modules), inside, chunks)
        back = _chunked(back, compute.backward(ops, worker, part, modules), inside, chunks)
    grid = (wires.plan.space_grid or (wires.plan.degree("space"),))[:3]
    ahead, back = computed_apart(
        wires.columns, wires.division, grid, worker, samples, (ahead, back), on_cpu=wires.on_cpu
    )
    again = repeats(wires, regions)
    waits = exchanged(wires, samples, ahead.seconds, back.seconds)
    if regions:
        repeated = again * ~_last_sums(wires, regions)
        waits = Exchanged(
            forward_s=waits.forward_s,
            backward_s=waits.backward_s + repeated * waits.forward_s,
            forward_nbytes=waits.forward_nbytes,
            backward_nbytes=waits.backward_nbytes + repeated * waits.forward_nbytes,
            forward_link_s=waits.forward_link_s,
            backward_link_s=waits.backward_link_s + repeated * waits.forward_link_s,
        )
    return Passed(
        forward_s=ahead.seconds,
        backward_s=back.seconds + again * ahead.seconds,
        waits=waits,
        limits=ahead.limits * (1.0 + again) + back.limits,
    )


def repeats(wires: Wires, regions: tuple[Region, ...]) -> Array:
    """1 for modules whose forward is computed again in backward."""
    again = np.zeros(len(wires.columns))
    if regions:
        found = marks(regions)
        dear = wires.columns.multiplies[found.member] & found.selective[found.of]
        again[found.member] = np.where(dear, 0.0, 1.0)
    return again


def _last_sums(wires: Wires, regions: tuple[Region, ...]) -> Flags:
    """The last module of each region whose output is summed: backward needs nothing that comes after it, so the region
    is not computed again so far."""
    found = marks(regions)
    summed = wires.division.split[found.member] & wires.columns.summed[found.member]
    last = np.zeros(len(regions), dtype=np.intp) - 1
    np.maximum.at(last, found.of[summed], found.member[summed])
    result = np.zeros(len(wires.columns), dtype=np.bool_)
    result[last[last >= 0]] = True
    return result


def _chunked(whole: compute.Work, part: compute.Work, inside: Flags, chunks: int) -> compute.Work:
    """`whole` where modules in the mask `inside` do `part` so many times."""
    return compute.Work(
        seconds=np.where(inside, chunks * part.seconds, whole.seconds),
        limits=np.where(inside, chunks * part.limits, whole.limits),
    )
