"""The result of planning: the choice, and what else was asked for: scaling, trials, changed clusters."""

from dataclasses import dataclass, replace

from tutti.commands.plan_trials import with_node_order
from tutti.commands.planning import SEARCH_S, search
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.prediction import MeasuredPoint, ScalingCurve, Timeline, Trials
from tutti.cost_model.rank_tracks import timeline
from tutti.errors import PlanError
from tutti.planner import Choice, PlanRequest, device_counts, scaling

ROWS = 12
"""Largest number of tracks that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The best plan for a changed cluster.

    Attributes:
        change: the change in words.
        choice: the result of the search; None if there is no plan.
        reason: why there is no plan.
    """

    change: str
    choice: Choice | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The best plan for equal nodes of a pool of a cluster, such as a partition.

    Attributes:
        pool: its name; empty where the cluster has only one.
        nodes_are: number and kind of its nodes, in words.
        node_names: of those that can be used.
        idle: number of those on which nothing runs now; None where that is not known.
        absent: why its other nodes are not counted, by name.
        request: the setting that chooses the pool, such as "partition=gpu".
        time_limit_s: of a job there; None for no limit.
        plan: the best plan; None where there is none.
        reason: why there is none.
        nproc: ranks of each node that the plan uses.
        gpus: whether ranks compute on GPUs.
        step_time_s: predicted seconds of a step.
        steps, time_s: of the whole training; None where its length is unknown.
        cost: of the whole training, or of one step; None without prices.
        notes: where values come from, and what is not known.
    """

    pool: str
    nodes_are: str
    node_names: tuple[str, ...]
    idle: int | None
    absent: dict[str, str]
    request: str
    time_limit_s: float | None
    plan: Plan | None = None
    reason: str = ""
    nproc: tuple[int, ...] = ()
    gpus: bool = False
    step_time_s: float | None = None
    steps: int | None = None
    time_s: float | None = None
    cost: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The choice with everything else that was asked for.

    Attributes:
        choice: the best plan by prediction, its prediction, and the plans that lost, each with the reason.
        timeline: a step of the best plan, activity by activity.
        scaling: the best plan's speed against the number of devices, if asked for.
        trials: the plans that were run for a few steps, if asked for.
        scenarios: the best plan for each changed cluster.
        pools: the best plan for each pool of the cluster that was asked what it has, the best first; `choice` is of the
            first one.
    """

    choice: Choice
    timeline: Timeline
    scaling: ScalingCurve | None = None
    trials: Trials | None = None
    scenarios: tuple[Scenario, ...] = ()
    pools: tuple[PoolPlan, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan to run: the best by prediction, or the one that measured faster."""
        return chosen_plan(self.choice, self.trials)


def step_of(model: ModelSpec, cluster: ClusterSpec, choice: Choice, tracks: int = ROWS) -> Timeline:
    """Return the timeline of the chosen plan's step, with at most `tracks` tracks."""
    return timeline(model, with_node_order(cluster, choice.nodes), choice.best, most_tracks=tracks)


def curve_of(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest, limit_s: float | None) -> ScalingCurve:
    """Return the best plan's speed against the number of devices.

    Args:
        model: what is trained.
        cluster: the machines.
        request: what the planner may vary.
        limit_s: time limit of a single search; the searches for the curve share one and a half times as much.
    """
    counts = device_counts(cluster, request.max_devices)
    search_s = max(1.0, 1.5 * (limit_s or SEARCH_S) / len(counts))
    return scaling(request, counts, lambda fewer: search(model, cluster, fewer, search_s))


def scenario(
    model: ModelSpec, cluster: ClusterSpec, words: str, request: PlanRequest, limit_s: float | None
) -> Scenario:
    """Return the best plan for a changed cluster, or the reason why there is none.

    Args:
        model: what is trained.
        cluster: the changed cluster.
        words: the change in words.
        request: what the planner may vary.
        limit_s: time limit of the search.
    """
    try:
        return Scenario(change=words, choice=search(model, cluster, request, limit_s))
    except PlanError as error:
        return Scenario(change=words, choice=None, reason=str(error))


def with_measured(curve: ScalingCurve, trials: Trials | None) -> ScalingCurve:
    """Return the curve with the measured throughput of the fastest plan tried on each number of devices."""
    fastest: dict[int, float] = {}
    for trial in trials.trials if trials is not None else ():
        rate = trial.measured_throughput_per_s
        if rate is not None:
            fastest[trial.plan.world_size] = max(rate, fastest.get(trial.plan.world_size, 0.0))
    points = tuple(MeasuredPoint(devices=count, throughput_per_s=rate) for count, rate in sorted(fastest.items()))
    return replace(curve, measured=points)


def chosen_plan(choice: Choice, trials: Trials | None) -> Plan:
    """Return the choice, or the plan that measured faster."""
    return choice.best if trials is None or trials.best is None else trials.trials[trials.best].plan
