"""Lower the shares of the batch of ranks that are slow, and give them back when these are no slower.

All ranks add up the same own times (`OwnTimes`) and know the same causes, so each comes to the same shares without a
message. A rank that takes k times as long as the others gets 1/k of its share in the plan, in whole samples. The
global batch stays: its samples are divided otherwise, and means are weighted by the samples that each rank gets.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tutti.config.compression import format_compression
from tutti.config.mesh_axes import format_mesh
from tutti.config.partitioning import cut
from tutti.config.plan import Plan
from tutti.data.samples import DataSource
from tutti.errors import PlanError
from tutti.parallel.mesh import Mesh
from tutti.trainer.own_times import OwnTimesWindow

FOLLOW_SHARE = frozenset({"data", "compute", "throttling", "memory pressure", "other processes on its cores"})
"""Causes that delay a rank less where it has fewer samples."""

_LEAST_WEIGHT = 1 / 32

_WHOLE = 0.8
"""From this part of its share on, a rank gets all of it."""

_LOWER, _RAISE = 1.25, 1.15
"""A share is lowered where it is so many times too large, and raised where it may be so many times as large."""

_GAIN = 0.9
"""Shares are lowered where the slowest rank then takes at most this part of its time."""

_EVEN = 1.05
"""A rank takes no longer than others if its time is at most so many times theirs."""

_EFFECT = 0.95
"""A rank whose own time after its share was lowered is more than this part of that before gets its share again."""

_LEAST_SPREAD = 0.1
"""Numbers of samples that differ by such a part tell what part of a step's time follows them; of n ranks, smaller ones
do, too, by the square root of n."""

_TRIAL, _LONGEST_TRIAL = 32, 1024
"""After so many windows in which a rank takes no longer than others it gets its share on trial; twice as many later."""

_MOST_PATIENCE = 32


@dataclass(slots=True)
class RankShare:
    """The share of the ranks that compute the same samples.

    Attributes:
        weight: what part of their share in the plan they get.
        calm: windows in a row in which they could have had more.
        patience: the number of these after which they get more; doubled each time that this was too early.
        raised: whether they have got more since they were last slow.
        lowered: the weight before their share was last lowered, and their own time of a step for so many samples,
            until the effect is known.
        held: windows in which their share is not lowered again, as that had no effect.
        even: windows in a row in which they took no longer than others, with their lower share.
        trial: the number of these after which they get their share on trial.
        why: why they get more, where it is not their time.
        said: whether it was said that no other share would suit them better than this one.
    """

    weight: float = 1.0
    calm: int = 0
    patience: int = 1
    raised: bool = False
    lowered: tuple[float, float, int] | None = None
    held: int = 0
    even: int = 0
    trial: int = _TRIAL
    why: str = ""
    said: bool = False

    def has_no_effect(self, measured_s: float, samples: int) -> bool:
        """Return whether they took as long after their share was lowered; then it is not lowered again for a while.

        Args:
            measured_s: their own time of a step.
            samples: of a microbatch of the global batch.
        """
        before, self.lowered, self.held = self.lowered, None, max(self.held - 1, 0)
        if before is None or before[2] != samples or measured_s <= _EFFECT * before[1]:
            return False
        self.held, self.why = _MOST_PATIENCE, "with less it was no faster"
        return True

    def wanted(self, part: float, time: float, kind: str | None, fixed: float) -> float:
        """Return the weight that they should have, after a window.

        Args:
            part: the weight that they have had, in whole samples.
            time: their own time at whole shares, as a multiple of that of other ranks.
            kind: the kind of cause, if they are slow.
            fixed: what part of the time of other ranks does not follow the share.
        """
        self.why = ""
        self.even = self.even + 1 if self.weight < 1.0 and fixed + part * (time - fixed) <= _EVEN else 0
        if self.even >= self.trial:
            self.even, self.trial = 0, min(2 * self.trial, _LONGEST_TRIAL)
            self.why = "on trial, as it takes no longer than others"
            return 1.0
        # With n samples a rank of their speed takes fixed + (time - fixed) * n; others take 1.
        equal = 1.0 if time * _WHOLE <= 1.0 else max((1.0 - fixed) / (time - fixed), _LEAST_WEIGHT)
        more = self.weight < 1.0 and (equal == 1.0 or equal >= _RAISE * part)
        if kind is not None and kind not in FOLLOW_SHARE:
            return self.weight
        if kind is not None and equal * _LOWER <= part:
            return self.weight if self.held else min(equal, self.weight)
        self.calm = self.calm + 1 if more else 0
        return equal if self.calm >= self.patience else self.weight

    def follow(self, weight: float) -> None:
        """Take a weight."""
        if weight < self.weight and self.raised:
            self.patience, self.raised = min(2 * self.patience, _MOST_PATIENCE), False
        elif weight > self.weight:
            self.raised = True
        if weight != self.weight:
            self.calm, self.said = 0, False
        self.weight = weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareChange:
    """Other shares of the batch, from the next batch on.

    Attributes:
        shares: of the data-parallel ranks, as in `Plan.shares`.
        raised: the data-parallel ranks that get more than before because they are no slower.
        times: own times of the ranks whose shares are lowered, as multiples of the others', by rank.
        kinds: the kinds of their causes, by rank.
        step_s: how long a step took before.
        why: why data-parallel ranks get more, where it is not that they are no slower.
    """

    shares: tuple[float, ...]
    raised: frozenset[int]
    times: Mapping[int, float]
    kinds: Mapping[int, str]
    step_s: float
    why: Mapping[int, str] = field(default_factory=dict)


class Rebalancer:
    """The shares of the batch in a run, as the ranks' own times ask for them.

    Args:
        plan: the plan, whose shares ranks have that are not slow.
        stream: whether the samples come from a stream, all of which each rank reads.

    Attributes:
        stated: the plan's shares.
        groups: for each data-parallel rank, the ranks that compute its samples.
        pending: the change to make before the next batch; None: none.
        changed: the first step with the present shares, and how long a step took before, until that is said.
        fixed: what part of a step's time does not follow the share, on ranks that are not slow; 0 until it is known.
    """

    def __init__(self, plan: Plan, *, stream: bool = False) -> None:
        self.stated = plan.shares
        self.groups: list[list[int]] = [[] for _ in range(plan.data_parallel_degree)]
        for rank in range(plan.world_size):
            self.groups[Mesh(plan.mesh, rank).data_index].append(rank)
        self._ranks = [RankShare() for _ in self.groups]
        self._sizes = self.stated or (1.0,) * len(self.groups)
        self._shares = self.stated
        self.pending: ShareChange | None = None
        self.changed: tuple[int, float] | None = None
        self.stream = stream
        self.fixed = 0.0
        self._learned = 0
        self._samples = 0
        self._measured: list[float] = []
        self._before: list[tuple[int, float]] = []

    def too_few(self, samples: int) -> bool:
        """Return whether a microbatch has fewer samples than there are ranks with a share."""
        return samples < sum(size > 0 for size in self._sizes)

    def parts(self, samples: int) -> list[float]:
        """Return which part of its share in the plan each data-parallel rank has, in whole samples; 1 if all of it.

        Args:
            samples: of a microbatch of the global batch.
        """
        if self.too_few(samples):
            return [1.0] * len(self._ranks)
        ranks = [*zip(self._counts(self._shares, samples), self._sizes, self._ranks, strict=True)]
        whole = [(count, size) for count, size, share in ranks if size and share.weight == 1.0]
        unit = sum(count for count, _ in whole) / sum(size for _, size in whole)
        return [
            1.0 if share.weight == 1.0 or not size else max(count, 1) / (size * unit) for count, size, share in ranks
        ]

    def at_whole_shares(
        self, window: OwnTimesWindow, peers: Sequence[Sequence[int]], rank: int, samples: int
    ) -> OwnTimesWindow:
        """Take in a window, and return it as it would be with the plan's shares.

        Args:
            window: the own times of all ranks.
            peers: for each rank, the ranks that compute the same modules.
            rank: this rank.
            samples: of a microbatch of the global batch.
        """
        self._measured, index_of = window.times(), self._index_of()
        if self.too_few(samples):
            return window
        parts, counts = self.parts(samples), self._counts(self._shares, samples)
        whole = [each for each, index in enumerate(index_of) if parts[index] == 1.0]
        if len(whole) == len(index_of):
            self._before = [(counts[index], time) for index, time in zip(index_of, self._measured, strict=True)]
            self._samples = samples
        elif samples == self._samples:  # batches of tokens, and those of a ramp, differ
            self._learn([(each, counts[index_of[each]]) for each in whole])
        fixed = []
        for each, time in enumerate(self._measured):
            usual = statistics.median(self._measured[other] for other in peers[each] if other in whole)
            fixed.append(min(self.fixed * usual / time, 1.0) if time > 0 else 0.0)
        return window.at_whole_shares([parts[index] for index in index_of], rank, fixed, stream=self.stream)

    def _index_of(self) -> list[int]:
        found = {rank: index for index, group in enumerate(self.groups) for rank in group}
        return [found[rank] for rank in sorted(found)]

    def _learn(self, whole: Sequence[tuple[int, int]]) -> None:
        """Find what part of the time does not follow the samples: ranks with whole shares have more than before.

        Args:
            whole: these ranks, with their samples.
        """
        found = []
        for rank, count in whole:
            (old, before), now = self._before[rank], self._measured[rank]
            if old and count - old >= _LEAST_SPREAD * old / math.sqrt(len(whole)) and now > 0:
                found.append(min(max(1.0 - (now - before) / (count - old) * count / now, 0.0), 1.0))
        if found:
            self._learned += 1
            self.fixed += (statistics.median(found) - self.fixed) / self._learned

    def judge(
        self, window: OwnTimesWindow, peers: Sequence[Sequence[int]], kinds: Mapping[int, str], samples: int
    ) -> list[int]:
        """Look at a window; `pending` then has the change that it asks for, if any.

        Args:
            window: what `at_whole_shares` has returned.
            peers: for each rank, the ranks that compute the same modules.
            kinds: the slow ranks, with the kinds of causes.
            samples: of a microbatch of the global batch.

        Returns:
            The slow ranks whose share would be lowered if a division into whole samples were faster for that.
        """
        if self.too_few(samples):
            return []
        slowest = [max((window.relative_time(rank, peers[rank]), rank) for rank in group) for group in self.groups]
        parts, before = self.parts(samples), [share.weight for share in self._ranks]
        measured = [max(self._measured[rank] for rank in group) for group in self.groups]
        if self.stream:
            kinds = {rank: kind for rank, kind in kinds.items() if kind != "data"}
        earlier = [share.lowered for share in self._ranks]
        vain = [share.has_no_effect(seconds, samples) for share, seconds in zip(self._ranks, measured, strict=True)]
        if any(vain):
            wanted = [
                then[0] if no_effect and then else weight
                for no_effect, then, weight in zip(vain, earlier, before, strict=True)
            ]
        else:
            wanted = [
                share.wanted(part, time, kinds.get(rank), self.fixed)
                for share, part, (time, rank) in zip(self._ranks, parts, slowest, strict=True)
            ]
        most = max(weight for weight, size in zip(wanted, self._sizes, strict=True) if size)
        wanted = [weight / most if size else 1.0 for weight, size in zip(wanted, self._sizes, strict=True)]
        changed = [
            (index, new - old)
            for index, (new, old) in enumerate(zip(wanted, before, strict=True))
            if not math.isclose(new, old)
        ]
        if not changed:
            return []
        lowered = {slowest[index][1]: slowest[index][0] for index, by in changed if by < 0}
        shares = self._shares_of(wanted, samples)
        then, now = self._counts(shares, samples), self._counts(self._shares, samples)
        whole = then == self._counts(self.stated, samples)
        if whole:
            wanted, shares = [1.0] * len(wanted), self.stated
        times = [
            min(time, self.fixed) + max(part * (time - self.fixed), 0.0)
            for part, (time, _) in zip(parts, slowest, strict=True)
        ]
        if (then == now and not whole) or (lowered and not _is_faster(times, now, then, self.fixed)):
            return self._unsaid(lowered)
        for share, weight, measured_s in zip(self._ranks, wanted, measured, strict=True):
            if weight < share.weight:
                share.lowered = (share.weight, measured_s, samples)
            share.follow(weight)
        self._shares, self._learned = shares, 0
        raised = frozenset(index for index, by in changed if by > 0)
        why = {index: self._ranks[index].why for index in raised if self._ranks[index].why}
        self.pending = ShareChange(
            shares=shares, raised=raised, times=lowered, kinds=kinds, step_s=window.step_s, why=why
        )
        return []

    def _unsaid(self, lowered: Mapping[int, float]) -> list[int]:
        """Return those of the ranks of which it was not said yet that they keep their shares."""
        index_of, unsaid = self._index_of(), []
        for rank in sorted(lowered):
            share = self._ranks[index_of[rank]]
            if not share.said:
                share.said = True
                unsaid.append(rank)
        return unsaid

    def _shares_of(self, weights: Sequence[float], samples: int) -> tuple[float, ...]:
        """Return shares in whole samples of a microbatch; those of the plan where no rank is lowered."""
        if all(weight == 1.0 for weight in weights):
            return self.stated
        parts = whole_parts([size * weight for size, weight in zip(self._sizes, weights, strict=True)], samples)
        return tuple(map(float, parts)) or self._shares

    def _counts(self, shares: Sequence[float], samples: int) -> list[int]:
        bounds = cut(samples, len(self.groups), shares)
        return [end - begin for begin, end in pairwise(bounds)]


def _is_faster(times: Sequence[float], before: Sequence[int], after: Sequence[int], fixed: float) -> bool:
    """Return whether the slowest rank would be faster with other numbers of samples; `fixed` of a time stays."""
    then = [
        min(time, fixed) + max(time - fixed, 0.0) * new / max(old, 1)
        for time, old, new in zip(times, before, after, strict=True)
    ]
    return max(then) <= _GAIN * max(times)


def whole_parts(weights: Sequence[float], total: int) -> list[int]:
    """Divide a number of samples in proportion to weights; each with a weight above 0 gets at least one.

    Args:
        weights: relative sizes.
        total: the samples.

    Returns:
        The samples of each; empty if they are too few.

    Examples:
        >>> whole_parts([1, 1, 0.5], 16)
        [7, 6, 3]
        >>> whole_parts([1, 0.01, 1], 8)
        [4, 1, 3]
        >>> whole_parts([1, 1, 1], 2)
        []
    """
    present = sum(weight > 0 for weight in weights)
    if total < present:
        return []
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [max(math.floor(value), int(value > 0)) for value in exact]
    while sum(parts) != total:
        missing = 1 if sum(parts) < total else -1
        able = [number for number, part in enumerate(parts) if weights[number] > 0 and part + missing > 0]
        parts[max(able, key=lambda number: missing * (exact[number] - parts[number]))] += missing
    return parts


def check_rebalancing(plan: Plan, source: DataSource) -> None:
    """Check that shares of the batch may change in a run without changing what it computes.

    Args:
        plan: the plan.
        source: the training data.

    Raises:
        PlanError: they may not, or no ranks share a batch.
    """
    compression = plan.sync.compress
    if plan.sync.mode != "synchronous":
        raise PlanError(
            f"on_slow_rank = 'rebalance' with sync.mode = \"{plan.sync.mode}\": replicas that differ depend on "
            'their shares of the batch, so the result would depend on timing; use sync.mode = "synchronous", or '
            "on_slow_rank = 'warn'"
        )
    if compression is not None and not compression.entry.exact:
        raise PlanError(
            f"on_slow_rank = 'rebalance' with {format_compression(compression)}: what the codec loses depends on the "
            "samples of each rank, so the result would depend on timing; leave compress out, or use on_slow_rank = "
            "'warn'"
        )
    if plan.world_size > 1 and plan.data_parallel_degree == 1:
        raise PlanError(
            f"on_slow_rank = 'rebalance' with the mesh {format_mesh(plan.mesh)}: its ranks compute the same samples, "
            "so no share can be lowered; add a replicate or shard axis, or use on_slow_rank = 'warn'"
        )
    if source.is_stream and source.options.get("num_workers", 0):
        raise PlanError(
            "on_slow_rank = 'rebalance' with an IterableDataset and num_workers=1: the worker has already divided the "
            "batches that come next; use num_workers=0, a data set with __len__, or on_slow_rank = 'warn'"
        )
