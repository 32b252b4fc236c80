"""`tutti plan --try N`: the best plans really run for a few steps on this machine, and what that says of the choice."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tutti.cli.common import console
from tutti.errors import PlanError, ReportError, ScriptError
from tutti.plan import Alternative, Choice, plan_words, stamp
from tutti.plan.search import TIE
from tutti.predict.words import count, seconds
from tutti.spec import codec
from tutti.spec.cluster import ClusterSpec
from tutti.spec.model import ModelSpec
from tutti.spec.run import RunFolder
from tutti.spec.trials import Trial, Trials

if TYPE_CHECKING:
    from tutti.cli.plan import Options

TIMEOUT_S = 600.0
"""How long the ranks of a trial wait for each other."""


def try_plans(model: ModelSpec, cluster: ClusterSpec, choice: Choice, options: "Options") -> Trials:
    """Run the best plans of a choice, each for some steps, the first ones left out of what is measured.

    Raises PlanError where they cannot be run here, ScriptError where there is no script. A plan that fails is
    reported with the others.
    """
    check_here(cluster, options)
    plans = to_try(choice, options.tries or 1)
    from tutti.describe.probe import host
    from tutti.launch.host import granted_cores, threads_per_rank
    from tutti.launch.local import warm

    load = host.load()
    warm(threads_per_rank(plans[0].plan.world_size))
    name = f"try-{Path(options.target[0]).stem}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}"
    found = []
    for index, one in enumerate(plans):
        words = plan_words(one.plan)
        with console.status(f"trying plan {index + 1} of {len(plans)}: {words}"):
            folder = Path("runs") / f"{name}-{index + 1}"
            found.append(_tried(one, _write(folder, model, cluster, one), options, words))
    best = fastest(found)
    return Trials(
        trials=tuple(found),
        best=best,
        sentence=said(found, best),
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


def to_try(choice: Choice, count: int) -> list[Alternative]:
    """The choice, then the others that fit and keep every limit, by predicted time."""
    best = Alternative(plan=choice.best, prediction=choice.prediction, reason="chosen")
    others = [one for one in choice.alternatives if one.prediction is not None and one.prediction.fits]
    others.sort(key=lambda one: one.prediction.step_time_s.value if one.prediction is not None else 0.0)
    return [best, *others][:count]


def _write(folder: Path, model: ModelSpec, cluster: ClusterSpec, one: Alternative) -> Path:
    """The run folder of a trial, with all that its report needs. Raises ReportError where it cannot be written."""
    files = RunFolder(folder.resolve())
    try:
        codec.save(replace(one.plan, made_for=stamp(model)), files.plan)
        codec.save(cluster, files.cluster)
        codec.save(model, files.model)
        codec.save(one.prediction, files.prediction)
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
            "TUTTI_OBSERVER": "tutti.runtime.observe:brief",
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
        return replace(found, failure=failures.sentence(spec, outcome.failure).splitlines()[0])
    return measured(found, folder)


def measured(trial: Trial, folder: Path) -> Trial:
    """The trial with what its run folder says of its steps; with a failure where it says nothing."""
    from tutti.report.read import read_records
    from tutti.report.timing import steady_steps, throughput

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


def fastest(trials: list[Trial]) -> int | None:
    """The plan that measured fastest, if even its median step is quicker than every step of the choice; else the
    choice: what lies within the spread of steps says nothing. None where none ran."""
    times = {index: trial.measured_s for index, trial in enumerate(trials) if trial.measured_s is not None}
    if not times:
        return None
    quickest = min(times, key=lambda index: times[index])
    first = trials[0]
    if first.measured_s is None or first.least_s is None:
        return quickest
    clearly = times[quickest] < min(first.least_s, first.measured_s / (1 + TIE))
    return quickest if clearly else 0


def said(trials: list[Trial], best: int | None) -> str:
    """What the measurement says of the choice, in one sentence."""
    if best is None:
        return "None of the plans ran, so nothing was measured: " + (trials[0].failure if trials else "there is none")
    won, first = trials[best], trials[0]
    ran = f"{count(sum(one.measured_s is not None for one in trials), 'plan')} ran, and the choice"
    if best != 0:
        lost = "did not run" if first.measured_s is None else f"measured {seconds(first.measured_s)}"
        return (
            f"{ran} changes to {won.words}: it measured {seconds(won.measured_s or 0.0)}; the predicted best, "
            f"{first.words}, {lost}."
        )
    quicker = [one for one in trials[1:] if one.measured_s is not None and one.measured_s < (won.measured_s or 0.0)]
    stands = f"{ran} stands: {won.words} measured {seconds(won.measured_s or 0.0)}"
    if not quicker:
        return f"{stands}, and none was faster."
    near = min(quicker, key=lambda one: one.measured_s or 0.0)
    told = seconds(near.measured_s or 0.0)
    return f"{stands}; {near.words} measured {told}, which the spread of its steps does not tell apart."
