"""Replace the best exact plan by one that sends less, if it gains more than the predictions may be wrong.

Every strategy of relaxed_strategies.py is predicted on the plans that would be fastest if nothing had to be sent.
The best result is counted with the additional samples that it may need. It is chosen only if it still beats every
exact plan when links are faster and its kernels slower than predicted, by the prediction's own margins of error. On a
fast network, or where a link was measured as too slow, gradient reduction therefore stays exact.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import tutti.planner.objectives as objectives
from tutti.config.cluster import ClusterSpec, scale_bandwidth
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Prediction
from tutti.config.vocabulary import Evidence, Relaxation
from tutti.cost_model import cost_constants, predict
from tutti.cost_model.compressed_sync_cost import kernel_margin, slowed
from tutti.cost_model.cost_notes import disturbed, seconds
from tutti.cost_model.group_links import network
from tutti.cost_model.rank_placement import place_ranks
from tutti.errors import PlanError
from tutti.planner.candidates import candidates, precisions
from tutti.planner.exploration import Clock, Costed
from tutti.planner.plan_request import Alternative, Choice, PlanRequest, RelaxationGain, Totals
from tutti.planner.relaxed_strategies import (
    RELAXATIONS,
    REQUIRED_SAVING,
    REQUIRED_SAVING_OVERSUBSCRIBED,
    RelaxedStrategy,
    correctable,
    samples_of,
    strategies,
)

BASES = 8
"""Number of exact plans on which strategies are predicted: those with the least value if no rank waited for
communication. All plans of pure replication are added, because many strategies need whole replicas.
"""

TIE = 0.02
"""Strategies within this fraction of the best count as equal; among them, the one that changes least is chosen."""

RUNNERS_UP = 6
"""Largest number of strategies that are listed without being chosen."""


def search_relaxed(
    model: ModelSpec, cluster: ClusterSpec, request: PlanRequest, exact: Choice, clock: Clock | None, limit_s: float
) -> Choice:
    """Return `exact`, or a plan that sends less, if the request allows it and it pays.

    The `relaxation` of the result says what was compared.

    Args:
        model: what is trained.
        cluster: the machines.
        request: what may vary, the objective and the limits.
        exact: the best plan with exact gradient reduction.
        clock: returns seconds; needed for `limit_s`.
        limit_s: seconds after which no further plan is predicted.
    """
    best = _costed(_in_order(cluster, exact), request, exact.best, exact.prediction)
    if request.objective == "memory":
        return _exact(request, exact, best, [], "no strategy that sends less takes less memory")
    trial = _Trial(model, request, clock, limit_s)
    plans = [best, *trial.exact_plans(best, exact)]
    bases = sorted(
        (base for base in plans if base.plan.data_parallel_degree > 1 and _value_without_waiting(base) < best.value),
        key=_value_without_waiting,
    )
    tried = _ranked(trial.all_strategies([*bases[:BASES], *filter(_is_replicated, bases[BASES:])]))
    for candidate in _better(tried, best.value):
        margins = _margins_of(candidate.costed)
        if trial.value(candidate, margins) < min(
            trial.value_with_errors(plan, margins) for plan in _possible_winners(plans, best, margins)
        ):
            return _relaxed(request, exact, best, candidate, margins, tried)
    if not bases:
        several = any(base.plan.data_parallel_degree > 1 for base in plans)
        slow = "no plan of several ranks would be faster even if nothing had to be sent"
        return _exact(request, exact, best, [], slow if several else "one rank sends nothing")
    return _exact(request, exact, best, tried, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedStrategy:
    """A plan with a strategy that sends less.

    Attributes:
        strategy: how it sends less.
        costed: the plan and its prediction.
        samples: samples to the same quality, as a multiple of exact training.
        evidence: where `samples` comes from.
        totals: the whole training, with these samples.
    """

    strategy: RelaxedStrategy
    costed: Costed
    samples: float
    evidence: Evidence
    totals: Totals

    @property
    def value_with_samples(self) -> float:
        """The objective's value, including the additional samples."""
        return self.costed.value * self.samples

    @property
    def required_saving(self) -> float:
        """The fraction of the exact plan's value that the strategy must save to be chosen."""
        if self.strategy.relaxation == "exact":
            return 0.0
        if self.strategy.compress is None:
            return REQUIRED_SAVING  # it computes nothing in addition to exact reduction
        host_groups = place_ranks(self.costed.cluster, self.costed.plan.world_size)
        in_turns = any(host_group.slowdown > 1 for host_group in host_groups)
        return (
            REQUIRED_SAVING + (REQUIRED_SAVING_OVERSUBSCRIBED - REQUIRED_SAVING) / (self.strategy.relaxed.period or 1)
            if in_turns
            else REQUIRED_SAVING
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorMargins:
    """How far a prediction may be wrong in a strategy's favour.

    Attributes:
        links: links may be this many times as fast as predicted.
        kernels: the codec's kernels may be this many times as slow as predicted.
    """

    links: float
    kernels: float

    def of(self, cluster: ClusterSpec) -> ClusterSpec:
        """Return the cluster with these faster links and slower kernels."""
        devices = {name: slowed(device, self.kernels) for name, device in cluster.devices.items()}
        return replace(cluster, devices=devices).relinked(
            lambda link: replace(scale_bandwidth(link, self.links), latency_s=link.latency_s / self.links)
        )


class _Trial:
    """Predicts plans for one request until its time is up."""

    def __init__(self, model: ModelSpec, request: PlanRequest, clock: Clock | None, limit_s: float) -> None:
        self.model, self.request, self._clock = model, request, clock
        self._until = clock() + limit_s if clock is not None else math.inf

    def exact_plans(self, best: Costed, exact: Choice) -> Iterator[Costed]:
        """Yield other exact plans: those that the search listed, and some with every data-parallel degree.

        For every degree these are the two plans with the least value if no rank waited for communication, and two of
        pure replication. The exact search rules out plans that wait long for gradients, but a strategy may make them
        the best.
        """
        known = [best.plan]
        allowed = precisions(self.model, best.cluster, self.request)  # plans in other precisions are only listed
        for other in exact.alternatives:
            if other.prediction is not None and other.plan.precision in allowed:
                known.append(other.plan)
                yield _costed(best.cluster, self.request, other.plan, other.prediction)
        # Strategies need whole gradients. Above ZeRO-1, a reduce-scatter leaves each rank only a part.
        for plan in known if self.request.mesh is not None else ():
            if plan.degree("shard") > 1 and plan.sharding.level > 1:
                costed = self._cost(replace(plan, sharding=replace(plan.sharding, level=1)), best.cluster)
                if costed is not None and costed.good:
                    yield costed
        if self.request.mesh is not None or self.request.demanded:
            return
        by_degree: dict[int, list[Costed]] = {}
        for plan in candidates(self.model, best.cluster, self.request):
            if plan.data_parallel_degree > 1 and (costed := self._cost(plan, best.cluster)) is not None and costed.good:
                by_degree.setdefault(plan.data_parallel_degree, []).append(costed)
        for same in by_degree.values():
            least = sorted(same, key=_value_without_waiting)
            yield from least[:2]
            yield from [candidate for candidate in filter(_is_replicated, least) if candidate not in least[:2]][:2]

    def all_strategies(self, bases: Sequence[Costed]) -> Iterator[TriedStrategy]:
        """Yield every strategy on every plan that can use it, where the result fits and keeps the request's limits."""
        corrected = correctable(self.model)
        for base in bases:
            for strategy in strategies(self.request, objectives.steps(self.request, base.plan), corrected=corrected):
                if strategy.relaxation == "exact" and len(base.cluster.devices) > 1:
                    continue  # every rank reduces by itself, and devices of different kinds round differently
                costed = self._cost(strategy.of(base.plan), base.cluster)
                if costed is None or not costed.prediction.fits:
                    continue
                samples, evidence = samples_of(strategy, self.request, costed.plan, self.model.optimizer)
                totals = _with_samples(
                    objectives.totals(costed.cluster, self.request, costed.plan, costed.prediction), samples
                )
                if not objectives.broken_limit(self.request, totals, costed.prediction):
                    yield TriedStrategy(
                        strategy=strategy, costed=costed, samples=samples, evidence=evidence, totals=totals
                    )

    def value(self, tried: TriedStrategy, margins: ErrorMargins) -> float:
        """Return a strategy's objective, with its additional samples, if the prediction is wrong by `margins`."""
        return self.value_with_errors(tried.costed, margins) * tried.samples

    def value_with_errors(self, costed: Costed, margins: ErrorMargins) -> float:
        """Return a plan's objective if its prediction is wrong by `margins`."""
        cluster = margins.of(costed.cluster)
        return _value(costed.cluster, self.request, costed.plan, predict(self.model, cluster, costed.plan))

    def _cost(self, plan: Plan, cluster: ClusterSpec) -> Costed | None:
        """Predict a plan; return None when time is up or the strategy does not apply to the plan."""
        if self._clock is not None and self._clock() >= self._until:
            return None
        try:
            return _costed(cluster, self.request, plan, predict(self.model, cluster, plan))
        except PlanError:
            return None  # the strategy does not apply to this plan


def _costed(cluster: ClusterSpec, request: PlanRequest, plan: Plan, prediction: Prediction) -> Costed:
    """Attach to a plan its prediction, the objective's value, and the limit that it breaks."""
    totals = objectives.totals(cluster, request, plan, prediction)
    return Costed(
        plan=plan,
        prediction=prediction,
        cluster=cluster,
        value=_value(cluster, request, plan, prediction),
        broken=objectives.broken_limit(request, totals, prediction),
    )


def _value(cluster: ClusterSpec, request: PlanRequest, plan: Plan, prediction: Prediction) -> float:
    """Return the objective's value (not memory), including the additional time of the first steps of a training."""
    return objectives.value(cluster, request, plan, prediction) * objectives.begun(request, plan, prediction)


def _in_order(cluster: ClusterSpec, choice: Choice) -> ClusterSpec:
    """Return the cluster with its nodes in the order in which the choice places ranks."""
    if not choice.nodes:
        return cluster
    return replace(cluster, nodes=tuple(sorted(cluster.nodes, key=lambda node: choice.nodes.index(node.name))))


def _value_without_waiting(costed: Costed) -> float:
    """Return the objective's value if no rank waited for communication; no strategy can have less."""
    step = costed.prediction.step_time_s.value
    return costed.value * (1 - costed.prediction.phases["exposed_communication"] / step) if step else costed.value


def _is_replicated(costed: Costed) -> bool:
    """Return whether every rank has the whole model and optimizer."""
    return costed.plan.degree("replicate") == costed.plan.world_size


def _possible_winners(plans: Sequence[Costed], best: Costed, margins: ErrorMargins) -> list[Costed]:
    """Return the exact plans that might be the best if links were faster: none gains more than all its waiting."""
    return [
        candidate
        for candidate in plans
        if candidate is best or (candidate.good and candidate.value < margins.links * best.value)
    ]


def _ranked(tried: Iterator[TriedStrategy]) -> list[TriedStrategy]:
    """Return the best plan of each strategy, in order of the value with its additional samples.

    Strategies that count as equal to the first are ordered by how much they change, the least first.
    """
    best: dict[str, TriedStrategy] = {}
    for candidate in tried:
        rival = best.get(candidate.strategy.words)
        if rival is None or candidate.value_with_samples < rival.value_with_samples:
            best[candidate.strategy.words] = candidate
    order = sorted(best.values(), key=lambda candidate: candidate.value_with_samples)
    equal = [
        candidate
        for candidate in order
        if _equal(candidate.value_with_samples, order[0].value_with_samples) == order[0].value_with_samples
    ]
    return [*sorted(equal, key=_change_key), *order[len(equal) :]]


def _better(tried: Sequence[TriedStrategy], exact: float) -> list[TriedStrategy]:
    """Return those of `_ranked` that save enough, compared with exact gradient reduction, to be worth a change.

    A strategy that counts as equal to the best of its relaxation level is judged by the value of that best one.
    Otherwise a codec that saves only a thousandth more could be chosen, just because the strategies before it miss
    the required saving by less than that.
    """
    least: dict[Relaxation, float] = {}
    for candidate in tried:
        least[candidate.strategy.relaxation] = min(
            candidate.value_with_samples, least.get(candidate.strategy.relaxation, candidate.value_with_samples)
        )
    return [
        candidate
        for candidate in tried
        if _equal(candidate.value_with_samples, least[candidate.strategy.relaxation])
        < (1 - candidate.required_saving) * exact
    ]


def _equal(counted: float, least: float) -> float:
    """Return `least` if a value is equal to it within TIE, else the value."""
    return least if counted <= (1 + TIE) * least else counted


def _change_key(tried: TriedStrategy) -> tuple[float, ...]:
    """Return a sort key that is smaller the less a strategy changes."""
    relaxed = tried.strategy.relaxed
    coded = tried.strategy.compress is not None
    return (
        RELAXATIONS.index(tried.strategy.relaxation),
        tried.samples,
        coded,
        -(relaxed.after or 0),
        relaxed.period or 1,
        tried.value_with_samples,
    )


def _margins_of(costed: Costed) -> ErrorMargins:
    """Return the margins of error of the measurements on which a strategy's prediction rests."""
    group = network(costed.cluster, place_ranks(costed.cluster, costed.plan.world_size), costed.plan).group(
        *costed.plan.mesh
    )
    evidence: Evidence = "assumed" if disturbed(costed.cluster) else group.link.evidence
    device = place_ranks(costed.cluster, costed.plan.world_size)[0].device
    return ErrorMargins(links=1 + cost_constants.STEP_MARGIN[evidence], kernels=1 + kernel_margin(device, costed.plan))


def _with_samples(totals: Totals, samples: float) -> Totals:
    """Return the whole training with `samples` times the steps. Totals of a single step do not change."""
    if totals.steps is None:
        return totals
    return replace(
        totals,
        steps=math.ceil(totals.steps * samples),
        time_s=totals.time_s * samples,
        device_hours=totals.device_hours * samples,
        cost=None if totals.cost is None else totals.cost * samples,
        energy_kwh=None if totals.energy_kwh is None else totals.energy_kwh * samples,
        evidence="assumed" if totals.evidence != "measured" else totals.evidence,
    )


def _relaxed(
    request: PlanRequest,
    exact: Choice,
    best: Costed,
    chosen: TriedStrategy,
    margins: ErrorMargins,
    tried: Sequence[TriedStrategy],
) -> Choice:
    """Return the choice of the strategy `chosen`."""
    sentence = chosen_words(request, best, chosen, margins)
    first = Alternative(
        plan=exact.best, prediction=exact.prediction, reason=why_exact_lost(best, chosen), totals=exact.totals
    )
    others = tuple(
        replace(other, reason=f"compared with the best exact plan: {other.reason}") for other in exact.alternatives
    )
    return replace(
        exact,
        request=request,
        best=chosen.costed.plan,
        prediction=chosen.costed.prediction,
        totals=chosen.totals,
        alternatives=(
            first,
            *_runners_up([other for other in tried if other is not chosen], chosen.value_with_samples),
            *others,
        ),
        remarks=(sentence, *(f"With exact gradient reduction: {remark}" for remark in exact.remarks)),
        changes=tuple(f"With exact gradient reduction: {change}" for change in exact.changes),
        relaxation=replace(_relaxation(request, best, chosen, sentence, margins), chosen=True),
    )


def _exact(request: PlanRequest, exact: Choice, best: Costed, tried: Sequence[TriedStrategy], why: str) -> Choice:
    """Return the exact choice, with the strategies that it was compared with."""
    near = tried[0] if tried else None
    margins = _margins_of(near.costed) if near is not None else None
    sentence = exact_words(request, best, near, margins, why)
    return replace(
        exact,
        request=request,
        alternatives=(*_runners_up(tried, best.value), *exact.alternatives),
        remarks=(*exact.remarks, sentence),
        relaxation=_relaxation(request, best, near, sentence, margins),
    )


def _runners_up(tried: Sequence[TriedStrategy], chosen: float) -> tuple[Alternative, ...]:
    """Return the strategies to list, each with the reason why it was not chosen."""
    return tuple(
        Alternative(
            plan=candidate.costed.plan,
            prediction=candidate.costed.prediction,
            reason=why_strategy_lost(candidate, chosen),
            totals=candidate.totals,
        )
        for candidate in tried[:RUNNERS_UP]
    )


def _relaxation(
    request: PlanRequest, best: Costed, candidate: TriedStrategy | None, sentence: str, margins: ErrorMargins | None
) -> RelaxationGain:
    """Return what the best strategy would bring, as data."""
    step_s = best.prediction.step_time_s.value
    if candidate is None or margins is None:
        return RelaxationGain(relax=request.relax, exact_step_s=step_s, step_s=step_s, sentence=sentence)
    return RelaxationGain(
        relax=request.relax,
        strategy=candidate.strategy.words,
        exact_step_s=step_s,
        step_s=candidate.costed.prediction.step_time_s.value,
        samples=candidate.samples,
        evidence=candidate.evidence,
        links=margins.links,
        kernels=margins.kernels,
        sentence=sentence,
    )


def chosen_words(request: PlanRequest, best: Costed, chosen: TriedStrategy, margins: ErrorMargins) -> str:
    """Return the sentence that says why a plan that sends less was chosen, and what that changes.

    Args:
        request: what was asked.
        best: the best exact plan.
        chosen: the plan that was chosen.
        margins: margins of error with which it still wins.
    """
    counted = samples_text(chosen.samples, chosen.evidence)
    if chosen.strategy.relaxation == "exact":
        return (
            f"{_describe_strategy(chosen)}, which sends fewer bytes and loses nothing: a step takes "
            f"{_step(chosen.costed)} instead of {_step(best)} where gradients are reduced directly. That pays even if "
            f"{margins_text(chosen, margins)}"
        )
    return (
        f"{_describe_strategy(chosen)}, as --relax {request.relax} allows: a step takes {_step(chosen.costed)} instead "
        f"of {_step(best)} with exact gradient reduction. Counting {counted}, that pays even if "
        f"{margins_text(chosen, margins)}. The results differ from those of one device: compare the quality with that "
        "of an exact run"
    )


def exact_words(
    request: PlanRequest, best: Costed, near: TriedStrategy | None, margins: ErrorMargins | None, why: str
) -> str:
    """Return the sentence that says why gradient reduction stays exact although the request allows strategies.

    Args:
        request: what was asked.
        best: the best exact plan.
        near: the best plan with a strategy, if there is one.
        margins: margins of error of its prediction.
        why: the reason where no strategy was tried.
    """
    begin = f"Gradient reduction stays exact, although --relax {request.relax} allows other strategies: "
    if near is None or margins is None:
        return begin + (why or "no strategy that sends less applies to these plans")
    comparison = (
        f"if {_describe_strategy(near, small=True)}, a step takes {_step(near.costed)} instead of {_step(best)}"
    )
    counted = samples_text(near.samples, near.evidence)
    if near.costed.value >= best.value:
        return f"{begin}the best of them is no faster; {comparison}"
    if near.value_with_samples >= best.value:
        return f"{begin}{comparison}, but counting {counted} that is no gain"
    gain = 1 - near.value_with_samples / best.value
    if gain < near.required_saving:
        return (
            f"{begin}{comparison}; counting {counted}, that is a gain of {gain:.0%}, too small to change training for"
        )
    unsure = f"counting {counted}, that would be no gain if {margins_text(near, margins)}"
    return f"{begin}{comparison}; {unsure}"


def margins_text(tried: TriedStrategy, margins: ErrorMargins) -> str:
    """Return the margins of error as text."""
    links = f"links are {margins.links:.2g} times as fast as predicted"
    return f"{links} and the codec's kernels {margins.kernels:.2g} times as slow" if margins.kernels > 1 else links


def samples_text(samples: float, evidence: Evidence) -> str:
    """Return the assumed or measured number of samples of a strategy as text."""
    if abs(samples - 1) < 0.005:
        return "the same number of samples" + ("" if evidence == "measured" else f" ({evidence})")
    return f"{samples:.3g} times the samples ({evidence})"


def why_exact_lost(best: Costed, chosen: TriedStrategy) -> str:
    """Return a phrase saying why the best exact plan was not chosen."""
    ratio = best.value / chosen.value_with_samples
    return f"exact gradient reduction; {ratio:.2f}x as long as {chosen.strategy.words} with its additional samples"


def why_strategy_lost(tried: TriedStrategy, chosen: float) -> str:
    """Return a phrase saying why a strategy was not chosen; `chosen` is the value of the plan that was."""
    ratio, counted = tried.value_with_samples / chosen, samples_text(tried.samples, tried.evidence)
    if ratio < 1:
        return f"{1 - ratio:.0%} less, counting {counted}, which is within the prediction's error"
    return f"{ratio:.2f}x as long, counting {counted}"


def _describe_strategy(tried: TriedStrategy, *, small: bool = False) -> str:
    """Return a clause that says what is sent; `small` starts it with a small letter."""
    verb = "gradients are sent as" if tried.strategy.mode == "synchronous" else "replicas are synchronised by"
    words = f"{verb} {tried.strategy.words}"
    return words if small else words[0].upper() + words[1:]


def _step(costed: Costed) -> str:
    """Return a plan's step time as text."""
    return seconds(costed.prediction.step_time_s.value)
