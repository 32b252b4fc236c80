"""The search: examine meshes in order of their bounds, and their variants in order of corrected estimates.

It ends when nothing that is left can be better, or time is up. Plans are ruled out only by lower bounds of their
predicted value and memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

import tutti.planner.objectives as objectives
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Prediction
from tutti.config.vocabulary import Precision
from tutti.cost_model import predict
from tutti.cost_model.best_case import BestCase, uneven
from tutti.cost_model.best_case_memory import BestCaseMemory
from tutti.cost_model.plan_bounds import shape_bounds, variant_bounds
from tutti.cost_model.plan_table import Array, MeshTable, by_kind
from tutti.errors import PlanError
from tutti.planner.candidates import Limits, limits_of
from tutti.planner.mesh_enumeration import plan_of, shapes, variants
from tutti.planner.mixed_hardware import improved
from tutti.planner.plan_request import Alternative, Coverage, PlanRequest
from tutti.planner.search_pool import FamilyRecord, Pool, mechanism_count, slow_to_predict

Clock = Callable[[], float]

_CHUNK = 300
"""Number of meshes whose variants are made at once."""

_BATCH = 12
"""Number of plans that are predicted before the order is computed anew."""

_PATIENCE = 150
"""The search ends when this many plans in a row brought no gain and more than this many are left."""

_MIN_IDLE_FRACTION = 0.125
"""With a time limit, the search ends early only if there was also no gain for this fraction of the limit. Plans that
are left may be better, and the user gave the time to examine them.
"""

_PLANS_PER_MESH = 4
"""Number of plans that a mesh counts for while its variants are not made."""

_MIN_PREDICTED = 6
"""Number of plans that are predicted however short the time is."""

_PATIENCE_WITHOUT_PLAN = 3.0
"""Multiple of the time limit that a search may take as long as no plan fits."""

_HOPELESS = 60
"""The search ends when this many plans in a row brought no gain and none at all fits."""

_FIRST_LOOK, _SEARCH = 0.5, 0.85
"""Fractions of the time after which the first look and the search end; the rest is for neighbours of the best plans."""

_GAIN = 0.002
"""The smallest relative improvement that counts as a gain."""

_FAMILIES = 24
"""Number of families of plans whose best plan among the first meshes is always predicted, so that each family is judged
once.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costed:
    """A plan with its prediction and value.

    Attributes:
        plan: the plan.
        prediction: its prediction.
        cluster: the machines, in the order in which ranks are placed.
        value: the objective's value; less is better.
        broken: the limit of the request that the plan breaks, as text; empty where it keeps all.
    """

    plan: Plan
    prediction: Prediction
    cluster: ClusterSpec
    value: float
    broken: str = ""

    @property
    def good(self) -> bool:
        """Whether the plan fits, keeps every limit of the request and has a finite value."""
        return self.prediction.fits and not self.broken and math.isfinite(self.value)


@dataclass(slots=True, kw_only=True)
class SearchBranch:
    """The meshes of one order of nodes and one precision.

    Attributes:
        cluster: the machines, in the order in which ranks are placed.
        precision: precision of the plans.
        best_case: the model at the best rates of the cluster.
        best_memory: the memory and work of the model in the best case.
        shapes: all meshes.
        least: lower bound of the objective of each mesh, (meshes,).
        waiting: rows of the meshes whose variants are not made yet, the most promising first.
        pool: plans that wait to be predicted.
    """

    cluster: ClusterSpec
    precision: Precision
    best_case: BestCase
    best_memory: BestCaseMemory
    shapes: MeshTable
    least: Array
    waiting: NDArray[np.intp]
    pool: Pool


class Explorer:
    """One search for the best plan.

    Args:
        model: what is trained.
        clusters: the machines, once for every order of nodes to try.
        request: what may vary, the objective and the limits.
        precisions: precisions to try.
        clock: returns seconds; needed for `limit_s`.
        limit_s: seconds after which the search ends early.
        offload: where the plans that are searched keep state, an index into plan_table.OFFLOAD_TIERS.

    Raises:
        PlanError: no mesh serves the request.
    """

    def __init__(
        self,
        model: ModelSpec,
        clusters: tuple[ClusterSpec, ...],
        request: PlanRequest,
        precisions: list[Precision],
        clock: Clock | None = None,
        limit_s: float = math.inf,
        *,
        offload: int = 0,
    ) -> None:
        self.model, self.request, self._offload = model, request, offload
        self.limits: Limits = limits_of(model, clusters[0], request)
        self.samples = self.limits.samples
        self._clock, self._limit_s = clock, limit_s
        self._began, self._patience = _now(self._clock), _PATIENCE_WITHOUT_PLAN
        self.costed: list[Costed] = []
        self.impossible: dict[str, Alternative] = {}
        self._family_records: dict[int, FamilyRecord] = {}
        self._counts = {"considered": 0, "too_large": 0, "too_slow": 0, "refused": 0}
        self.best = math.inf
        meshes = shapes(self.limits, request)
        self.branches = [
            branch
            for cluster in clusters
            for precision in precisions
            if (branch := self._branch(cluster, precision, meshes))
        ]

    def run(self, *, better_than: float | None = None) -> None:
        """Search until nothing that is left can be better, there was no gain for long, or time is up.

        Args:
            better_than: only plans with a value below this are wanted, so no additional time is taken where none fits.
        """
        if better_than is not None:
            self.best, self._patience = min(self.best, better_than), 1.0
        self._prune()
        self._predict_families()
        idle, gained_s = 0, _now(self._clock)
        while not self.over(_SEARCH):
            self._prune()
            before, costed = self.best, self._cost_next()
            grown = self._expand()
            if not costed and not grown:
                break
            if grown:  # better plans, found first, may rule out meshes before their variants are made
                continue
            better = self.best < before * (1 - _GAIN)
            idle, gained_s = (0, _now(self._clock)) if better else (idle + _BATCH, gained_s)
            if _stop_early(self, idle, gained_s):
                break
        self._prune()

    def coverage(self) -> Coverage:
        """Return how far the search got."""
        left, least = 0, math.inf
        for branch in self.branches:
            left += len(branch.pool) + len(branch.waiting)
            waiting = branch.least[branch.waiting]
            least = min(
                least, float(np.min(branch.pool.least, initial=math.inf)), float(np.min(waiting, initial=math.inf))
            )
        gap = max(0.0, 1 - least / self.best) if left and math.isfinite(self.best) else 0.0
        return Coverage(**self._counts, costed=len(self.costed), left=left, gap=gap if math.isfinite(gap) else 0.0)

    def cost(self, plan: Plan, cluster: ClusterSpec) -> Costed | None:
        """Predict one plan and record it; return None, and record the reason, where it cannot be predicted."""
        try:
            prediction = predict(self.model, cluster, plan)
        except PlanError as error:
            self.impossible.setdefault(str(error), Alternative(plan=plan, prediction=None, reason=str(error)))
            self._counts["refused"] += 1
            return None
        totals = objectives.totals(cluster, self.request, plan, prediction)
        costed = Costed(
            plan=plan,
            prediction=prediction,
            cluster=cluster,
            value=objectives.value(cluster, self.request, plan, prediction),
            broken=objectives.broken_limit(self.request, totals, prediction),
        )
        self.costed.append(costed)
        if costed.good:
            self.best = min(self.best, costed.value)
        return costed

    def add(self, candidate: Costed | None) -> None:
        """Predict and record a plan that another search found; None is ignored."""
        if candidate is not None:
            self.cost(candidate.plan, candidate.cluster)

    def _branch(self, cluster: ClusterSpec, precision: Precision, meshes: MeshTable) -> SearchBranch | None:
        """Bound all meshes for one order of nodes and one precision; return None where that precision is impossible."""
        try:
            best_case = BestCase(self.model, cluster, precision, self.request.script.layout)
            seconds, memory = shape_bounds(best_case, meshes, self.samples, offload=self._offload > 0)
        except PlanError as error:
            nothing = Alternative(plan=self.request.script, prediction=None, reason=str(error))
            self.impossible.setdefault(str(error), nothing)
            return None
        # Where parts along split may be unequal, the memory in a prediction may be that of a rank with a small part.
        (uneven_rows,) = by_kind((meshes.world, meshes.split), partial(uneven, best_case))
        reported_memory = np.where(uneven_rows > 0, 0.0, memory)
        least = objectives.bound(cluster, self.request, seconds, meshes.world, reported_memory)
        fits = memory <= self._capacity(best_case, meshes)
        self._counts["considered"] += len(meshes)
        self._counts["too_large"] += int((~fits).sum())
        rows = np.flatnonzero(fits)
        return SearchBranch(
            cluster=cluster,
            precision=precision,
            best_case=best_case,
            best_memory=BestCaseMemory(best_case, self.request.script),
            shapes=meshes,
            least=least,
            waiting=rows[np.argsort(least[rows], kind="stable")],
            pool=Pool(),
        )

    def _capacity(self, best_case: BestCase, meshes: MeshTable, *, tightest: bool = False) -> Array:
        """Return the memory of the largest (or smallest) rank of each mesh in bytes, (meshes,)."""

        def capacity_of(world: int) -> tuple[float]:
            ground = best_case.ground(world)
            return (ground.least_nbytes if tightest else ground.memory_nbytes,)

        (capacity,) = by_kind((meshes.world,), capacity_of)
        return np.minimum(capacity, self.request.memory_nbytes or math.inf)

    def over(self, part: float = 1.0) -> bool:
        """Return whether this fraction of the time is used up. While no plan fits, several times as much is allowed."""
        if self._clock is None:
            return False
        patience = 1.0 if math.isfinite(self.best) else self._patience
        return self._clock() >= self._began + patience * part * self._limit_s

    def _predict_families(self) -> None:
        """Predict the best plan of every family in a sample of all meshes.

        This gives a plan to beat, and for each family the error of the estimates.
        """
        for branch in self.branches:
            world, rows = branch.shapes.world[branch.waiting], branch.waiting
            if not len(rows):
                continue
            simple = np.flatnonzero((branch.shapes.data[rows] == world) | (world == 1))
            step = max(1, len(rows) // _CHUNK)
            picked = np.unique(np.concatenate([np.arange(0, len(rows), step)[:_CHUNK], simple[: _CHUNK // 4]]))
            self._make(branch, rows[picked])
            branch.waiting = np.delete(rows, picked)
            for number, row in enumerate(_best_of_families(branch.pool, self._family_records)):
                if self.over(_FIRST_LOOK) and number >= _MIN_PREDICTED:
                    break
                self._cost_rows(branch, np.array([row], dtype=np.intp), keep=True)
            branch.pool.drop(branch.pool.done)

    def _expand(self) -> bool:
        """Make the variants of the next meshes that may still be better; return whether there were any."""
        branch = min(
            (branch for branch in self.branches if len(branch.waiting)),
            key=lambda branch: float(branch.least[branch.waiting[0]]),
            default=None,
        )
        if branch is None:
            return False
        self._make(branch, branch.waiting[:_CHUNK])
        branch.waiting = branch.waiting[_CHUNK:]
        return True

    def _make(self, branch: SearchBranch, rows: NDArray[np.intp]) -> None:
        """Make the variants of these meshes, and add to the pool those that fit and may be the best."""
        variant_rows = variants(self.limits, branch.shapes, rows, offload=self._offload)
        if not len(variant_rows):
            return
        bounds = variant_bounds(branch.best_memory, branch.shapes, variant_rows, self.samples)
        world = branch.shapes.world[variant_rows.shape]
        # On unequal devices, a prediction reports the rank with the least memory left, which may not be the fullest.
        reported_memory = bounds.emptiest_nbytes if branch.best_case.mixed else bounds.fullest_nbytes
        least = objectives.bound(branch.cluster, self.request, bounds.step_s, world, reported_memory)
        likely = objectives.bound(branch.cluster, self.request, bounds.estimated_s, world, bounds.fullest_nbytes)
        capacity = self._capacity(branch.best_case, branch.shapes)[variant_rows.shape]
        tight = self._capacity(branch.best_case, branch.shapes, tightest=True)[variant_rows.shape]
        fits, quick = bounds.fullest_nbytes <= capacity, least < self.best
        self._counts["considered"] += len(variant_rows) - len(rows)
        self._counts["too_large"] += int((~fits).sum())
        self._counts["too_slow"] += int((fits & ~quick).sum())
        branch.pool.add(branch.shapes, variant_rows, fits & quick, least, likely, bounds, tight)

    def _prune(self) -> None:
        """Drop plans and meshes that cannot be better than the best so far."""
        for branch in self.branches:
            slow = branch.pool.least >= self.best
            late = branch.least[branch.waiting] >= self.best
            self._counts["too_slow"] += int(slow.sum()) + int(late.sum())
            if slow.any():
                branch.pool.drop(slow)
            branch.waiting = branch.waiting[~late]

    def _cost_next(self) -> bool:
        """Predict the most promising plans; return whether there were any."""
        orders = [branch.pool.corrected(self._family_records) for branch in self.branches]
        branch_of = np.concatenate([np.full(len(order), index) for index, order in enumerate(orders)] or [np.empty(0)])
        row_of = np.concatenate([np.arange(len(order)) for order in orders] or [np.empty(0, dtype=np.intp)])
        score = np.concatenate(orders or [np.empty(0)])
        usable = np.flatnonzero(np.isfinite(score))
        if not len(usable):
            return False
        picked = usable[np.argsort(score[usable], kind="stable")[:_BATCH]]
        for index, branch in enumerate(self.branches):
            self._cost_rows(branch, row_of[picked[branch_of[picked] == index]].astype(np.intp))
        return True

    def _cost_rows(self, branch: SearchBranch, rows: NDArray[np.intp], *, keep: bool = False) -> None:
        """Predict rows of a branch's pool and learn from the result; `keep` leaves them in the pool, marked as done."""
        pool = branch.pool
        for row in rows.tolist():
            if self.over(_SEARCH) and not keep:
                break
            pool.done[row] = True
            variant_rows, at = pool.variant_rows[int(pool.chunk[row])], int(pool.row[row])
            plan = plan_of(
                self.model,
                self.request,
                branch.shapes,
                variant_rows,
                at,
                branch.precision,
                objectives.nvme_path(branch.cluster),
            )
            record = self._family_records.setdefault(int(pool.family[row]), FamilyRecord())
            costed = self._cost_all(branch, plan)
            if not costed:
                record.refused += 1
                continue
            best = min(costed, key=lambda candidate: (not candidate.good, candidate.value))
            record.count += 1
            record.time += math.log(max(best.value, 1e-300) / max(float(pool.likely[row]), 1e-300))
            record.memory += math.log(best.prediction.memory.total / max(float(pool.memory[row]), 1.0))
        if not keep:
            pool.drop(pool.done)

    def _cost_all(self, branch: SearchBranch, plan: Plan) -> list[Costed]:
        """Predict a plan and, on unequal devices, its variants with shares, parts and cuts by speed."""
        whole = self.cost(plan, branch.cluster)
        if whole is None:
            return []
        others: list[Plan] = []
        if branch.best_case.mixed and plan.world_size > 1:
            others = improved(branch.best_memory, branch.cluster, plan, whole.prediction, self.samples)
        return [whole, *[costed for other in others if (costed := self.cost(other, branch.cluster)) is not None]]


def _now(clock: Clock | None) -> float:
    """Return the time of the clock in seconds, or 0 without one."""
    return clock() if clock is not None else 0.0


def _timed(explorer: Explorer) -> bool:
    """Return whether the search has a time limit."""
    return explorer._clock is not None and math.isfinite(explorer._limit_s)


def _stop_early(explorer: Explorer, idle: int, gained_s: float) -> bool:
    """Return whether there was no gain for so long that predicting more plans is not worth its time."""
    if not math.isfinite(explorer.best):
        return idle >= _HOPELESS and not any(candidate.prediction.fits for candidate in explorer.costed)
    waited = not _timed(explorer) or _now(explorer._clock) >= gained_s + _MIN_IDLE_FRACTION * explorer._limit_s
    return idle >= _PATIENCE and waited and not _in_time(explorer)


def _in_time(explorer: Explorer) -> bool:
    """Return whether all plans that are left can be predicted in the remaining time."""
    left = sum(len(branch.pool) + _PLANS_PER_MESH * len(branch.waiting) for branch in explorer.branches)
    return left <= _PATIENCE or (
        _timed(explorer) and not explorer.over(_SEARCH / (1 + left / max(1, len(explorer.costed))))
    )


def _best_of_families(pool: Pool, records: dict[int, FamilyRecord]) -> list[int]:
    """Return the most promising row of each of at most `_FAMILIES` families.

    The four most promising families come first, then the plainest of the others. Families that are slow to predict
    come last.
    """
    order = pool.corrected(records)
    kinds, at = np.unique(pool.family, return_inverse=True)
    firsts = np.full(len(kinds), -1, dtype=np.int64)
    ranked = np.argsort(order, kind="stable")[::-1]
    firsts[at.reshape(-1)[ranked]] = ranked
    promising = [
        (int(kind), int(first)) for kind, first in zip(kinds, firsts, strict=True) if math.isfinite(order[first])
    ]
    promising.sort(key=lambda pair: order[pair[1]])
    plain = sorted(promising[: 3 * _FAMILIES], key=lambda pair: (mechanism_count(pair[0]), order[pair[1]]))
    chosen = [*promising[:4], *[pair for pair in plain if pair not in promising[:4]]][:_FAMILIES]
    return [first for _, first in sorted(chosen, key=lambda pair: slow_to_predict(pair[0]))]
