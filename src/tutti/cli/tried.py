"""`tutti plan --try N`: the best plans really run for a few steps on this machine, and what that says of the choice."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tutti.cli.common import console
from tutti.cli.conclusion import short
from tutti.cli.contest import fastest, said, to_try, weights, words_in_full
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.prediction import Trial, Trials
from tutti.config.run_folder import RunFolder
from tutti.errors import PlanError, ReportError, ScriptError, TrainingError
from tutti.planner import Alternative, Choice, stamp

if TYPE_CHECKING:
    from tutti.cli.plan_options import Options

TIMEOUT_S = 600.0
"""How long the ranks of a trial wait for each other."""


def try_plans(model: ModelSpec, cluster: ClusterSpec, choice: Choice, options: "Options") -> Trials:
    """Run the best plans of a choice, each for some steps, the first ones left out of what is measured.

    Raises PlanError where they cannot be run here, ScriptError where there is no script, TrainingError where none of
    them ran: a plan that this machine is known not to run is no answer. One that fails is reported with the others.
    """
    check_here(cluster, options)
    plans = to_try(model, cluster, choice, options.tries or 1)
    from tutti.launch.host import granted_cores, threads_per_rank
    from tutti.launch.local import warm
    from tutti.profile.probe import host_facts

    load = host_facts.load()
    warm(threads_per_rank(plans[0].plan.world_size))
    name = f"try-{Path(options.target[0]).stem}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}"
    found = []
    for index, one in enumerate(plans):
        words = words_in_full(one.plan, choice.request)
        with console.status(f"trying plan {index + 1} of {len(plans)}: {words}"):
            folder = Path("runs") / f"{name}-{index + 1}"
            found.append(_tried(one, _write(folder, model, cluster, one), options, words))
    best = fastest(found, weights(model, cluster, choice, plans))
    if best is None:
        raise TrainingError(
            f"{said(found, best)}; repair what failed (what ranks said: {short(Path(found[0].folder))}/ranks/), or "
            "leave --try out"
        )
    return Trials(
        trials=tuple(found),
        best=best,
        sentence=said(found, best, choice.request.objective),
        unit=choice.best.batch.unit,
        load=load,
        cores=granted_cores(),
    )


def check_here(cluster: ClusterSpec, options: "Options") -> None:
    """Raises where the plans of `cluster` cannot be run by this process' machine."""
    from tutti.cli.named import named_model

    if options.model is not None or not options.target or named_model(options.target) is not None:
        raise ScriptError("--try runs plans, and a described model cannot run; name a script")
    hosts = sum(node.count for node in cluster.nodes)
    if hosts > 1:
        raise PlanError(f"--try runs plans on this machine, but {cluster.name} has {hosts} hosts; leave --cluster out")
    if any(cluster.devices[node.device].kind == "cuda" for node in cluster.nodes):
        import torch

        if torch.cuda.device_count() < cluster.device_count:
            raise PlanError(
                f"--try runs plans on this machine, which has {torch.cuda.device_count()} CUDA devices, but "
                f"{cluster.name} has {cluster.device_count}; leave --cluster out"
            )


def _write(folder: Path, model: ModelSpec, cluster: ClusterSpec, one: Alternative) -> Path:
    """The run folder of a trial, with all that its report needs. Raises ReportError where it cannot be written."""
    files = RunFolder(folder.resolve())
    try:
        serialization.save(replace(one.plan, made_for=stamp(model)), files.plan)
        serialization.save(cluster, files.cluster)
        serialization.save(model, files.model)
        serialization.save(one.prediction, files.prediction)
    except OSError as error:
        raise ReportError(f"{folder} cannot be written ({error.strerror}); run tutti plan in another folder") from None
    return folder.resolve()


def _tried(one: Alternative, folder: Path, options: "Options", words: str) -> Trial:
    from tutti.launch import failure as failures
    from tutti.launch.base import LaunchSpec
    from tutti.launch.host import threads_per_rank
    from tutti.launch.local import LocalLauncher
    from tutti.launch.supervise import interrupts, supervise
    from tutti.launch.watch import Silent

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
        outcome = supervise(lambda: LocalLauncher().start(spec), spec, Silent(), interrupted)
    if outcome.status == "stopped":
        raise KeyboardInterrupt
    assert one.prediction is not None
    found = Trial(
        plan=one.plan,
        words=words,
        predicted=one.prediction.step_time_s,
        predicted_throughput_per_s=one.prediction.throughput_per_s,
        folder=str(folder),
    )
    if outcome.failure is not None:
        short = replace(outcome.failure, traceback="")  # the reason alone: its whole output is in the run folder
        return replace(found, failure=failures.sentence(spec, short))
    return measured(found, folder)


def measured(trial: Trial, folder: Path) -> Trial:
    """The trial with what its run folder says of its steps; with a failure where it says nothing."""
    from tutti.report.measurements import steady_steps, throughput
    from tutti.report.run_records import read_records

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
