"""choose: cost every candidate, take the fastest that fits, and keep for each other one why it lost."""

import dataclasses
from dataclasses import dataclass

from tutti.errors import PlanError
from tutti.plan.candidates import LOWER, candidates, possible
from tutti.plan.choice import Alternative, Choice, Request
from tutti.plan.reasons import no_fit, remarks, why
from tutti.predict import predict
from tutti.spec.cluster import ClusterSpec
from tutti.spec.model import ModelSpec
from tutti.spec.plan import Plan
from tutti.spec.prediction import Prediction

TIE = 0.02
"""Plans within this part of the fastest count as equal: then the one that asks for least is taken."""


@dataclass(frozen=True, slots=True)
class _Costed:
    plan: Plan
    prediction: Prediction

    @property
    def step_s(self) -> float:
        return self.prediction.step_time_s.value

    @property
    def group(self) -> tuple[int, str, bool]:
        return (self.plan.world_size, self.plan.precision, bool(self.plan.shares))


def choose(model: ModelSpec, cluster: ClusterSpec, request: Request) -> Choice:
    """The plan with the shortest predicted step among those that fit in memory.

    Among plans within 2 % of it, the one with the fewest devices, then the script's own precision, then the fewest
    microbatches. Raises PlanError where nothing fits or nothing can be costed, with the numbers.
    """
    costed, impossible = _cost(model, cluster, candidates(model, cluster, request))
    if not costed:
        raise PlanError(impossible[0].reason)
    fitting = [one for one in costed if one.prediction.fits]
    if not fitting:
        raise PlanError(no_fit(model, cluster, [(one.plan, one.prediction) for one in costed]))
    best = _best(fitting, request)
    others = _representatives(costed, best)
    lost = [
        Alternative(
            plan=one.plan,
            prediction=one.prediction,
            reason=why(cluster, (one.plan, one.prediction), (best.plan, best.prediction)),
        )
        for one in sorted(others, key=lambda one: (not one.prediction.fits, one.step_s))
    ]
    alternatives = (*lost, *_not_allowed(model, cluster, request, best), *impossible)
    return Choice(
        model=model.name,
        cluster=cluster.name,
        request=request,
        best=best.plan,
        prediction=best.prediction,
        alternatives=alternatives,
        remarks=remarks(model, cluster, request, (best.plan, best.prediction), alternatives),
    )


def _cost(model: ModelSpec, cluster: ClusterSpec, plans: list[Plan]) -> tuple[list[_Costed], list[Alternative]]:
    """Predictions of all plans, and those that have none with the reason, one for each reason."""
    costed: list[_Costed] = []
    impossible: dict[str, Alternative] = {}
    for plan in plans:
        try:
            costed.append(_Costed(plan, predict(model, cluster, plan)))
        except PlanError as error:
            impossible.setdefault(str(error), Alternative(plan=plan, prediction=None, reason=str(error)))
    return costed, list(impossible.values())


def _best(fitting: list[_Costed], request: Request) -> _Costed:
    fastest = min(one.step_s for one in fitting)
    equal = [one for one in fitting if one.step_s <= fastest * (1 + TIE)]
    script = request.script

    def modesty(one: _Costed) -> tuple[int, bool, int, int, float]:
        return (
            one.plan.world_size,
            one.plan.precision != script.precision,
            one.plan.batch.num_microbatches,
            len(one.plan.shares),
            one.step_s,
        )

    return min(equal, key=modesty)


def _representatives(costed: list[_Costed], best: _Costed) -> list[_Costed]:
    """The losers worth a line: the best of each degree, precision and kind of shares; of the chosen such group, the
    numbers of microbatches that do not fit and the two fastest that do."""
    chosen: dict[tuple[int, str, bool], _Costed] = {}
    for one in costed:
        if one.group == best.group:
            continue
        rival = chosen.get(one.group)
        if rival is None or _rank(one) < _rank(rival):
            chosen[one.group] = one
    same = sorted((one for one in costed if one.group == best.group and one is not best), key=_rank)
    too_large = [one for one in same if not one.prediction.fits]
    return [*chosen.values(), *too_large, *[one for one in same if one.prediction.fits][:2]]


def _rank(one: _Costed) -> tuple[bool, float]:
    """Order within a group: fitting ones by time, then the others by how much memory they need."""
    fits = one.prediction.fits
    return (not fits, one.step_s if fits else one.prediction.memory.total)


def _not_allowed(model: ModelSpec, cluster: ClusterSpec, request: Request, best: _Costed) -> tuple[Alternative, ...]:
    """Faster plans of lower precision that the request rules out: shown, so that the choice is the user's."""
    if request.precision != "script" or best.plan.precision != "full":
        return ()
    shown = []
    for precision in LOWER:
        if not possible(model, cluster, precision):
            continue
        plan = dataclasses.replace(best.plan, precision=precision)
        prediction = predict(model, cluster, plan)
        gain = best.step_s / prediction.step_time_s.value
        if gain > 1.05 and prediction.fits:
            reason = f"{gain:.1f}x faster, but changes the numbers: --precision auto allows it"
            shown.append(Alternative(plan=plan, prediction=prediction, reason=reason))
    return tuple(shown)
