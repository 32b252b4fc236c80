"""Exchanges of the shard axis in a step, and the part of them that is waited for.

At level 1, parts of parameters are gathered after the update. At levels 2 and 3, a unit (a block, or the
parameters outside of blocks) is gathered while the previous unit computes, and gradients are reduce-scattered
behind backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tutti.cost_model.compressed_sync_cost import PartsWritten
from tutti.cost_model.group_links import RankGroup
from tutti.cost_model.module_costs import ModelTable
from tutti.cost_model.overlap import CommCost
from tutti.cost_model.rank_placement import HostGroup
from tutti.cost_model.work_division import Division
from tutti.cost_model.worker_speed import Array

Numbers = TypeVar("Numbers", float, Array)


def units_of(columns: ModelTable, part: Division) -> list[float]:
    """Return the bytes of the parameters that are gathered together, by unit.

    The first entry has the parameters outside of blocks and those tied between blocks; then there is one entry
    for each block.
    """
    nbytes = columns.parameters * part.weight
    tied = columns.owner[columns.owner >= 0]
    inside = columns.block.copy()
    inside[tied] = False
    blocks = np.bincount(columns.unit[inside], weights=nbytes[inside], minlength=columns.units)
    return [float(nbytes[~inside].sum()), *blocks[blocks > 0].tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWork:
    """The work of each unit, in the order of `units_of`.

    Attributes:
        nbytes: bytes of parameters.
        forward_s: seconds of a microbatch's forward.
        backward_s: seconds of a microbatch's backward.
        forward_link_s: seconds of forward in which the links of the shard axis carry something else.
        backward_link_s: the same in backward.
    """

    nbytes: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    forward_link_s: tuple[float, ...]
    backward_link_s: tuple[float, ...]


def unit_work(
    columns: ModelTable,
    part: Division,
    forward_s: Array,
    backward_s: Array,
    forward_link_s: Array,
    backward_link_s: Array,
    parameters: Array,
) -> UnitWork:
    """Return the work of each unit; work outside of blocks belongs to the first unit.

    Args:
        columns: the modules.
        part: how their work is divided.
        forward_s, backward_s: seconds of each module's passes.
        forward_link_s, backward_link_s: seconds of these in which the links of the shard axis carry something else.
        parameters: bytes of each module's parameters on the device.
    """
    nbytes = parameters * part.weight
    tied = columns.owner[columns.owner >= 0]
    inside = columns.block.copy()
    inside[tied] = False
    weights = np.bincount(columns.unit[inside], weights=nbytes[inside], minlength=columns.units)
    there = weights > 0

    def by_unit(values: Array) -> tuple[float, ...]:
        sums = np.bincount(columns.unit[columns.block], weights=values[columns.block], minlength=columns.units)[there]
        return (float(values.sum() - sums.sum()), *sums.tolist())

    return UnitWork(
        nbytes=(float(nbytes[~inside].sum()), *weights[there].tolist()),
        forward_s=by_unit(forward_s),
        backward_s=by_unit(backward_s),
        forward_link_s=by_unit(np.minimum(forward_link_s, forward_s)),
        backward_link_s=by_unit(np.minimum(backward_link_s, backward_s)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The constants of the shard axis.

    Attributes:
        group: the ranks along the shard axis.
        others: the ranks that reduce parts further.
        load_s_per_nbyte: seconds per byte of moving offloaded state; 0 without offload.
        gathered_s: seconds in which a rank's cores copy a byte of a unit into the whole parameters; never
            hidden.
        summed_s: seconds in which they copy a byte of its gradients for the reduction; never hidden.
        coded: (bytes of a unit) -> (how its gradients are encoded, seconds in kernels); None without a codec.
    """

    group: RankGroup
    others: RankGroup
    load_s_per_nbyte: float = 0.0
    gathered_s: float = 0.0
    summed_s: float = 0.0
    coded: Callable[[float], tuple[PartsWritten, float]] | None = None

    def gather(self, nbytes: float) -> float:
        """Return the seconds of gathering a unit of `nbytes`."""
        return self.group.divided(nbytes) + nbytes / self.group.ranks * self.load_s_per_nbyte

    def on_cores(self, host_group: HostGroup) -> "Costs":
        """Return the same costs in core seconds of a rank on `host_group`. Kernels run on one thread."""
        coded = self.coded

        def written(nbytes: float) -> tuple[PartsWritten, float]:
            assert coded is not None
            how, kernels_s = coded(nbytes)
            return how, kernels_s / host_group.threads if host_group.device.kind == "cpu" else 0.0

        return Costs(
            group=self.group.on_cores(host_group),
            others=self.others.on_cores(host_group),
            coded=None if coded is None else written,
        )

    def sum(self, nbytes: float) -> float:
        """Return the seconds of reducing the gradients of a unit of `nbytes`."""
        part = nbytes / self.group.ranks
        loads = part * self.load_s_per_nbyte
        if self.coded is None:
            return self.group.divided(nbytes) + self.others.summed(part) + loads
        how, kernels = self.coded(nbytes)
        to_ranks = self.group.all_to_all(nbytes * how.there)  # codes go from each rank to each other
        return to_ranks + self.others.all_reduce(part * how.across) + kernels + loads


def copied(group: RankGroup) -> tuple[float, float]:
    """Return the memory passes of a CPU rank over a unit's bytes: (gather of parameters, reduction of gradients).

    They are counted in parallel/sharding. A gather reads the data and writes it to pages that the system clears
    first. A reduction reads gradients and writes the send buffer, then reads the ranks' rows of a part and
    writes their sum. In shared memory the rows are read in place, which the link's time includes. With several
    hosts, a rank also copies what arrived from other hosts, and adds a row from each. GPUs copy in their own
    memory, far faster than links.
    """
    if group.tier == "node":
        return 1 + 2 / group.ranks, 2.0
    if group.tiers:
        hosts = group.span.hosts
        return 1 + 2 * hosts / group.ranks, 2 + (hosts + 1) / group.ranks
    return 3.0, 3 + 1 / group.ranks


def parameters_step(
    work: UnitWork, costs: Costs, level: int, microbatches: int, host_group: HostGroup, *, every_backward: bool = False
) -> CommCost:
    """Return the exchanges of a step at levels 2 and 3 for a rank on `host_group`, whose cores do part of the
    hidden work.

    With `every_backward`, gradients leave the device in every microbatch, not only in the last.
    """
    gathers = [costs.gather(nbytes) for nbytes in work.nbytes]
    sums = [costs.sum(nbytes) for nbytes in work.nbytes]
    # The unit outside of blocks works before and after them, and stays gathered from forward to backward. At level 2
    # all units stay gathered, through all microbatches.
    taken = _around(work.forward_link_s), _around([work.backward_link_s[0], *work.backward_link_s[:0:-1]])
    ahead = _hidden([*gathers, 0.0], _around(work.forward_s), taken[0])
    again = [0.0, *(gathers[:0:-1] if level == 3 else [0.0] * len(gathers[1:])), 0.0]
    back = _around([work.backward_s[0], *work.backward_s[:0:-1]])
    before = _hidden(again, back, taken[1])
    last = _hidden(again, back, taken[1], [0.0, *sums[:0:-1], sums[0]])
    times = microbatches if level == 3 else 1
    lasts = microbatches if every_backward else 1
    passes = [(times, ahead), (max(times - lasts, 0), before), (lasts, last)]
    total = sum(count * pass_cost[0] for count, pass_cost in passes)
    waited = min(sum(count * pass_cost[1] for count, pass_cost in passes), total)
    cores = costs.on_cores(host_group)
    on_cores = [cores.gather(nbytes) for nbytes in work.nbytes]
    taken_s = times * (sum(on_cores) + (sum(on_cores[1:]) if level == 3 else 0.0))
    taken_s += lasts * sum(map(cores.sum, work.nbytes))
    hidden = (total - waited) / total if total > 0 else 0.0
    copies_s = costs.gathered_s * _gathered(work.nbytes, level, microbatches) + costs.summed_s * sum(work.nbytes)
    return CommCost(total_s=total + copies_s, exposed_s=waited + taken_s * hidden + copies_s)


def sent_nbytes(nbytes: Sequence[float], costs: Costs, level: int, microbatches: int) -> float:
    """Return the bytes that a rank sends in a step at levels 2 and 3: gathers, reduce-scatters, all-reduces of
    parts.
    """
    d, r = costs.group.ranks, costs.others.ranks
    gathered = _gathered(nbytes, level, microbatches)
    written = [
        (unit_nbytes, PartsWritten(ranks=d, others=r) if costs.coded is None else costs.coded(unit_nbytes)[0])
        for unit_nbytes in nbytes
    ]
    there, across = (
        sum(unit_nbytes * how.there for unit_nbytes, how in written),
        sum(unit_nbytes * how.across for unit_nbytes, how in written),
    )
    return (d - 1) / d * (gathered + there) + 2 * (r - 1) / r * across / d


def _gathered(nbytes: Sequence[float], level: int, microbatches: int) -> float:
    """Return the bytes of parameters that are gathered in a step, from the bytes of each unit."""
    whole = sum(nbytes)
    return whole if level == 2 else gathered_nbytes(whole, nbytes[0], microbatches)


def gathered_nbytes(whole: Numbers, outside: Numbers, microbatches: Numbers) -> Numbers:
    """Return the bytes of parameters that level 3 gathers in a step: in each pass of each microbatch.

    The parameters outside of blocks stay from forward to backward.

    Args:
        whole: bytes of all parameters.
        outside: bytes of those outside of blocks.
        microbatches: microbatches of a step.
    """
    return microbatches * (2 * whole - outside)


def _around(seconds: Sequence[float]) -> list[float]:
    """Return units in order; the first works half before and half after the others."""
    return [seconds[0] / 2, *seconds[1:], seconds[0] / 2]


def _hidden(
    gathers: Sequence[float], work: Sequence[float], taken: Sequence[float], sums: Sequence[float] = ()
) -> tuple[float, float]:
    """Return (seconds of exchanges, seconds waited).

    Each unit's gather starts with the previous unit; reductions follow each unit. All share one link, in the
    order of their start. Exchanges within the units' work come first, for the seconds `taken`.
    """
    link = now = 0.0
    arrived: list[float] = []

    def launch(at: int) -> None:
        nonlocal link
        if at < len(gathers):
            link = max(link, now) + gathers[at] if gathers[at] else link
            arrived.append(link if gathers[at] else 0.0)

    launch(0)
    for at, seconds in enumerate(work):
        now = max(now, arrived[at])
        if taken[at]:
            link = max(link, now) + taken[at]
        launch(at + 1)
        now += seconds
        if at < len(sums):
            link = max(link, now) + sums[at]
    total = float(sum(gathers) + sum(sums))
    return total, max(0.0, max(now, link) - float(sum(work))) if sums else max(0.0, now - float(sum(work)))
