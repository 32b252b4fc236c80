"""`tutti plan --try N`: runs the best plans for a few steps on this machine and compares them with the choice."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tutti.commands.messages import short, status
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.prediction import Trial, Trials
from tutti.config.run_folder import RunFolder
from tutti.errors import PlanError, ReportError, ScriptError, TrainingError
from tutti.planner import Alternative, Choice, stamp

if TYPE_CHECKING:
    from tutti.commands.plan_options import PlanOptions
from collections.abc import Sequence

from tutti.config.plan import Plan
from tutti.cost_model.cost_notes import count, seconds
from tutti.planner import PlanRequest, objectives, plan_words
from tutti.planner.candidates import precisions
from tutti.planner.plan_search import TIE
from tutti.planner.relaxed_strategies import RELAXED_STRATEGIES, samples_of

TIMEOUT_S = 600.0
"""Seconds that the ranks of a trial wait for each other."""


def try_plans(model: ModelSpec, cluster: ClusterSpec, choice: Choice, options: "PlanOptions") -> Trials:
    """Run the best plans of a choice for a few steps each; the first steps are not measured.

    A plan that fails is reported with the others.

    Raises:
        PlanError: the plans cannot be run on this machine.
        ScriptError: there is no script to run.
        TrainingError: none of the plans ran. A plan that is known to fail here is no answer.
    """
    check_here(cluster, options)
    plans = to_try(model, cluster, choice, options.tries or 1)
    from tutti.launch.launch_environment import granted_cores, threads_per_rank
    from tutti.launch.local_launcher import warm
    from tutti.profile.probe import host_facts

    load = host_facts.load()
    warm(threads_per_rank(plans[0].plan.world_size))
    name = f"try-{Path(options.target[0]).stem}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}"
    trials = []
    for index, candidate in enumerate(plans):
        words = words_in_full(candidate.plan, choice.request)
        with status(f"trying plan {index + 1} of {len(plans)}: {words}"):
            folder = Path("runs") / f"{name}-{index + 1}"
            trials.append(_tried(candidate, _write(folder, model, cluster, candidate), options, words))
    best = fastest(trials, weights(model, cluster, choice, plans))
    if best is None:
        raise TrainingError(
            f"{said(trials, best)}; fix the cause (the output of every rank is in "
            f"{short(Path(trials[0].folder))}/ranks/), or leave --try out"
        )
    return Trials(
        trials=tuple(trials),
        best=best,
        sentence=said(trials, best, choice.request.objective),
        unit=choice.best.batch.unit,
        load=load,
        cores=granted_cores(),
    )


def check_here(cluster: ClusterSpec, options: "PlanOptions") -> None:
    """Check that the plans of `cluster` can be run on this machine.

    Raises:
        ScriptError: there is no script to run.
        PlanError: the cluster has several hosts, or more accelerators than this machine.
    """
    from tutti.commands.inputs import named_model

    if options.model is not None or not options.target or named_model(options.target) is not None:
        raise ScriptError("--try runs plans, but a described model cannot run; name a script")
    hosts = sum(node.count for node in cluster.nodes)
    if hosts > 1:
        raise PlanError(f"--try runs plans on this machine, but {cluster.name} has {hosts} hosts; leave --cluster out")
    if any(cluster.devices[node.device].kind == "cuda" for node in cluster.nodes):
        import torch

        if torch.accelerator.device_count() < cluster.device_count:
            raise PlanError(
                f"--try runs plans on this machine, which has {torch.accelerator.device_count()} accelerators, but "
                f"{cluster.name} has {cluster.device_count}; leave --cluster out"
            )


def _write(folder: Path, model: ModelSpec, cluster: ClusterSpec, one: Alternative) -> Path:
    """Write the run folder of a trial, with everything that its report needs. Raises ReportError if that fails."""
    files = RunFolder(folder.resolve())
    try:
        serialization.save(replace(one.plan, made_for=stamp(model)), files.plan)
        serialization.save(cluster, files.cluster)
        serialization.save(model, files.model)
        serialization.save(one.prediction, files.prediction)
    except OSError as error:
        raise ReportError(f"{folder} cannot be written ({error.strerror}); run tutti plan in another folder") from None
    return folder.resolve()


def _tried(one: Alternative, folder: Path, options: "PlanOptions", words: str) -> Trial:
    from tutti.launch import failure as failures
    from tutti.launch.launch_environment import threads_per_rank
    from tutti.launch.launcher import LaunchSpec
    from tutti.launch.local_launcher import LocalLauncher
    from tutti.launch.rank_watch import Silent
    from tutti.launch.supervisor import interrupts, supervise

    spec = LaunchSpec(
        target=options.target[0],
        arguments=options.target[1:],
        folder=folder,
        ranks_per_node=(one.plan.world_size,),
        timeout_s=TIMEOUT_S,
        threads=threads_per_rank(one.plan.world_size),
        environment={
            "TUTTI_PLAN": str(RunFolder(folder).plan),
            "TUTTI_OBSERVER": "tutti.trainer.observer:stop_after_steps",
            "TUTTI_STEPS": str(options.try_steps),
        },
    )
    with interrupts() as interrupted:
        outcome = supervise(LocalLauncher().start, spec, Silent(), interrupted)
    if outcome.status == "stopped":
        raise KeyboardInterrupt
    assert one.prediction is not None
    trial = Trial(
        plan=one.plan,
        words=words,
        predicted=one.prediction.step_time_s,
        predicted_throughput_per_s=one.prediction.throughput_per_s,
        folder=str(folder),
    )
    if outcome.failure is not None:
        short = replace(outcome.failure, traceback="")  # only the reason: the whole output is in the run folder
        return replace(trial, failure=failures.sentence(spec, short))
    return measured(trial, folder)


def measured(trial: Trial, folder: Path) -> Trial:
    """Return the trial with the step times in its run folder, or with a failure if the folder has none."""
    from tutti.reporting.measurements import steady_steps, throughput
    from tutti.reporting.run_records import read_records

    try:
        records = read_records(folder)
    except ReportError as error:
        return replace(trial, failure=str(error))
    steps = sorted(value for row in steady_steps(records) if (value := row.number("wall_s")) is not None)
    if not steps:
        return replace(trial, failure="the script ended before its first step")
    rate = throughput(records).value
    return replace(
        trial,
        measured_s=median(steps),
        least_s=steps[0],
        most_s=steps[-1],
        measured_throughput_per_s=None if rate is None else float(rate),
        steps=len(steps),
    )


def with_node_order(cluster: ClusterSpec, nodes: tuple[str, ...]) -> ClusterSpec:
    """Return the cluster with its kinds of nodes in the order in which a choice places ranks.

    Args:
        cluster: the machines.
        nodes: names of the kinds of nodes, in that order; others follow.
    """
    order = {name: place for place, name in enumerate(nodes)}
    return replace(cluster, nodes=tuple(sorted(cluster.nodes, key=lambda node: order.get(node.name, len(order)))))


def words_in_full(plan: Plan, request: PlanRequest) -> str:
    """Describe the plan in one phrase, with its precision if that is not the script's."""
    words = plan_words(plan)
    return words if plan.precision == request.script.precision else f"{words}, {plan.precision}"


def to_try(model: ModelSpec, cluster: ClusterSpec, choice: Choice, most: int) -> list[Alternative]:
    """Return the choice, then the best other plans by the objective.

    The others fit in memory, keep the request's limits and compute in a precision that it allows. A choice may also
    show faster plans that do not; they are left out.

    Args:
        model: what is trained.
        cluster: the machines.
        choice: the result of the search.
        most: how many plans to return at most, the choice included.
    """
    best = Alternative(plan=choice.best, prediction=choice.prediction, reason="chosen", totals=choice.totals)
    machines, request = with_node_order(cluster, choice.nodes), choice.request
    allowed = precisions(model, machines, request)
    others = [
        other
        for other in choice.alternatives
        if other.plan.precision in allowed and other.plan != choice.best and _keeps_limits(machines, request, other)
    ]
    others.sort(key=lambda other: _value(model, machines, request, other))
    return [best, *others][:most]


def _keeps_limits(cluster: ClusterSpec, request: PlanRequest, one: Alternative) -> bool:
    if one.prediction is None or not one.prediction.fits:
        return False
    totals = one.totals or objectives.totals(cluster, request, one.plan, one.prediction)
    return not objectives.broken_limit(request, totals, one.prediction)


def _value(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest, one: Alternative) -> float:
    """Return the objective's value for a plan, counted with the samples that its strategy of communication needs."""
    assert one.prediction is not None
    value = objectives.value(cluster, request, one.plan, one.prediction)
    strategy = next((strategy for strategy in RELAXED_STRATEGIES if strategy.of(one.plan) == one.plan), None)
    if strategy is None or request.objective == "memory":
        return value
    return value * samples_of(strategy, request, one.plan, model.optimizer)[0]


def weights(
    model: ModelSpec, cluster: ClusterSpec, choice: Choice, plans: Sequence[Alternative]
) -> tuple[float, ...] | None:
    """Return the objective's value of one second of each plan's step; None if the objective does not depend on time."""
    if choice.request.objective == "memory":
        return None
    machines = with_node_order(cluster, choice.nodes)
    return tuple(
        _value(model, machines, choice.request, plan) / plan.prediction.step_time_s.value
        for plan in plans
        if plan.prediction is not None
    )


def fastest(trials: Sequence[Trial], counted: Sequence[float] | None = ()) -> int | None:
    """Return the index of the plan that the measurements favour; None if no plan ran.

    The choice (index 0) stands unless another plan's median step counts less than the choice's fastest step, and less
    than its median by more than `TIE`. Smaller differences are within the spread of steps.

    Args:
        trials: the choice, then the others.
        counted: the objective's value of one second of each plan's step; empty if all count the same. None: time does
            not count, and the first plan that ran is taken.
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
    """Return one sentence on what the measurements mean for the choice.

    Args:
        trials: the choice, then the others.
        best: the index that `fastest` returned.
        objective: what the best plan minimises.
    """
    if best is None:
        reasons = dict.fromkeys(trial.failure for trial in trials)
        return f"none of the plans that were tried ran, so nothing was measured: {'; '.join(reasons)}"
    won, first = trials[best], trials[0]
    by = "" if objective == "throughput" else f" by {objective}"
    ran = f"{count(sum(entry.measured_s is not None for entry in trials), 'plan')} ran, and the choice{by}"
    if best != 0:
        lost = "did not run" if first.measured_s is None else f"measured {seconds(first.measured_s)}"
        return (
            f"{ran} changes to {won.words}: it measured {seconds(won.measured_s or 0.0)}; the predicted best, "
            f"{first.words}, {lost}."
        )
    stands = f"{ran} stands: {won.words} measured {seconds(won.measured_s or 0.0)}"
    quicker = [
        entry for entry in trials[1:] if entry.measured_s is not None and entry.measured_s < (won.measured_s or 0.0)
    ]
    if by:
        return f"{stands}."
    if not quicker:
        return f"{stands}, and none was faster."
    near = min(quicker, key=lambda entry: entry.measured_s or 0.0)
    told = seconds(near.measured_s or 0.0)
    return f"{stands}; {near.words} measured {told}, which the spread of the steps does not tell apart."
