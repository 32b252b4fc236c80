"""Which plans of a choice are worth trying, and what their measured steps say of it. Nothing is run here."""

from collections.abc import Sequence
from dataclasses import replace

from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Trial
from tutti.cost_model.words import count, seconds
from tutti.planner import Alternative, Choice, Request, objectives, plan_words
from tutti.planner.candidates import precisions
from tutti.planner.search import TIE
from tutti.planner.ways import WAYS, samples_of


def seated(cluster: ClusterSpec, nodes: tuple[str, ...]) -> ClusterSpec:
    """The cluster with its kinds of nodes in the order in which a choice seats ranks."""
    order = {name: place for place, name in enumerate(nodes)}
    return replace(cluster, nodes=tuple(sorted(cluster.nodes, key=lambda node: order.get(node.name, len(order)))))


def words_in_full(plan: Plan, request: Request) -> str:
    """The plan in one phrase, its precision where that is not the script's."""
    words = plan_words(plan)
    return words if plan.precision == request.script.precision else f"{words}, {plan.precision}"


def to_try(model: ModelSpec, cluster: ClusterSpec, choice: Choice, most: int) -> list[Alternative]:
    """The choice, then at most `most` - 1 others by the objective: those that fit, keep the request's limits, and
    compute in a precision that it allows. Faster plans that a choice only shows are not among them."""
    best = Alternative(plan=choice.best, prediction=choice.prediction, reason="chosen", totals=choice.totals)
    machines, request = seated(cluster, choice.nodes), choice.request
    allowed = precisions(model, machines, request)
    others = [
        one
        for one in choice.alternatives
        if one.plan.precision in allowed and one.plan != choice.best and _keeps_limits(machines, request, one)
    ]
    others.sort(key=lambda one: _value(model, machines, request, one))
    return [best, *others][:most]


def _keeps_limits(cluster: ClusterSpec, request: Request, one: Alternative) -> bool:
    if one.prediction is None or not one.prediction.fits:
        return False
    totals = one.totals or objectives.totals(cluster, request, one.plan, one.prediction)
    return not objectives.broken_limit(request, totals, one.prediction)


def _value(model: ModelSpec, cluster: ClusterSpec, request: Request, one: Alternative) -> float:
    """What the objective says of a plan, counted with the samples that its way to send less takes."""
    assert one.prediction is not None
    found = objectives.value(cluster, request, one.plan, one.prediction)
    way = next((way for way in WAYS if way.of(one.plan) == one.plan), None)
    if way is None or request.objective == "memory":
        return found
    return found * samples_of(way, request, one.plan, model.optimizer)[0]


def weights(
    model: ModelSpec, cluster: ClusterSpec, choice: Choice, plans: Sequence[Alternative]
) -> tuple[float, ...] | None:
    """What a second of each plan's step counts under the objective; None where time counts nothing."""
    if choice.request.objective == "memory":
        return None
    machines = seated(cluster, choice.nodes)
    return tuple(
        _value(model, machines, choice.request, one) / one.prediction.step_time_s.value
        for one in plans
        if one.prediction is not None
    )


def fastest(trials: Sequence[Trial], counted: Sequence[float] | None = ()) -> int | None:
    """The plan whose measured step counts least, if even its median counts less than every step of the choice; else
    the choice: what lies within the spread of steps says nothing. None where none ran.

    `counted`: what a second of each plan's step counts, all alike where it is empty; None: time counts nothing, and
    the first that ran stands.
    """
    ran = {index: trial.measured_s for index, trial in enumerate(trials) if trial.measured_s is not None}
    if not ran:
        return None
    if counted is None:
        return min(ran)
    unit = counted or (1.0,) * len(trials)
    least = min(ran, key=lambda index: ran[index] * unit[index])
    first = trials[0]
    if first.measured_s is None or first.least_s is None:
        return least
    clearly = ran[least] * unit[least] < unit[0] * min(first.least_s, first.measured_s / (1 + TIE))
    return least if clearly else 0


def said(trials: Sequence[Trial], best: int | None, objective: str = "throughput") -> str:
    """What the measurement says of the choice, in one sentence."""
    if best is None:
        reasons = dict.fromkeys(trial.failure for trial in trials)
        return f"none of the plans that were tried ran, so nothing was measured: {'; '.join(reasons)}"
    won, first = trials[best], trials[0]
    by = "" if objective == "throughput" else f" by {objective}"
    ran = f"{count(sum(one.measured_s is not None for one in trials), 'plan')} ran, and the choice{by}"
    if best != 0:
        lost = "did not run" if first.measured_s is None else f"measured {seconds(first.measured_s)}"
        return (
            f"{ran} changes to {won.words}: it measured {seconds(won.measured_s or 0.0)}; the predicted best, "
            f"{first.words}, {lost}."
        )
    stands = f"{ran} stands: {won.words} measured {seconds(won.measured_s or 0.0)}"
    quicker = [one for one in trials[1:] if one.measured_s is not None and one.measured_s < (won.measured_s or 0.0)]
    if by:
        return f"{stands}."
    if not quicker:
        return f"{stands}, and none was faster."
    near = min(quicker, key=lambda one: one.measured_s or 0.0)
    told = seconds(near.measured_s or 0.0)
    return f"{stands}; {near.words} measured {told}, which the spread of its steps does not tell apart."
