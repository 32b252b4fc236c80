"""`tutti verify`: compares N ranks with one device and names the first difference."""

import math
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tutti.cli.options import (
    SCRIPT_CONTEXT,
    ScriptCommand,
    compress_option,
    console,
    emit,
    json_option,
    script_arguments,
)
from tutti.errors import DataError, PlanError, ScriptError, SpecError

if TYPE_CHECKING:
    from tutti.config.compression import Compression
    from tutti.config.plan import Plan
    from tutti.config.verdict import Verdict
    from tutti.verification.verification import Runner, VerificationRequest, VerificationTrial


NOT_COMPARABLE = 3
"""Exit code of a verification that found no fault, but could not compare everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """The command line, as given."""

    script: Path
    arguments: tuple[str, ...]
    nproc: int | None
    steps: int | None
    epochs: int | None
    resume_at: int | None
    plan: Path | None
    mesh: str | None
    compress: "Compression | None"
    arithmetic: str
    tolerance: float | None
    folder: Path | None
    output: Path | None
    timeout_s: float
    as_json: bool


@click.command(cls=ScriptCommand, context_settings=SCRIPT_CONTEXT)
@click.option(
    "--nproc", type=click.IntRange(1), metavar="N", help="Ranks to compare with one device; 2 if nothing sets them."
)
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Steps to compare; 3 if nothing is said.")
@click.option(
    "--epochs", type=click.IntRange(1), metavar="N",
    help="Compare all steps of N epochs instead, and evaluations. Every step is saved on disk meanwhile.",
)  # fmt: skip
@click.option(
    "--resume-at", type=click.IntRange(1), metavar="N",
    help="Compare N steps; then resume the ranks from their checkpoint of step N, and compare as many as --steps says.",
)  # fmt: skip
@click.option("--plan", type=click.Path(path_type=Path), help="Verify this plan: its ranks, microbatches and shares.")
@click.option("--mesh", metavar="AXIS=N,...", help="Verify ranks in this grid, such as dp=2,tp=2.")
@compress_option
@click.option(
    "--arithmetic",
    type=click.Choice(["auto", "double", "script"]),
    default="auto",
    show_default=True,
    help="double: float64 throughout; script: the script's own dtypes; auto: float64 if the script can.",
)
@click.option(
    "--tolerance", type=click.FloatRange(0, min_open=True), help="Relative tolerance; by default that of the dtype."
)
@click.option("--folder", type=click.Path(path_type=Path), help="Write verify.json into this run folder.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the verdict to this file.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0.1), default=300.0, show_default=True, metavar="SECONDS",
    help="How long ranks wait for each other.",
)  # fmt: skip
@json_option
@script_arguments
def command(**given: Any) -> None:
    """Check that SCRIPT computes the same on N ranks as on one device.

    Both start every step from the same state, on the same global batches, with the same random numbers. Exit code 0:
    they agree. Exit code 1: they do not, and the first module and tensor that differ are named with the likely cause.
    Exit code 3: they cannot be compared, because they draw different random numbers.
    """
    options = VerifyOptions(**given)
    verdict = _verdict(options)
    _save(verdict, options)
    if options.as_json:
        emit(verdict)
    else:
        _show(verdict)
    sys.exit(0 if verdict.passed else 1 if verdict.comparable else NOT_COMPARABLE)


def _verdict(options: VerifyOptions) -> "Verdict":
    from tutti.launch.launch_environment import threads_per_rank
    from tutti.launch.script_path import check_script

    check_script(options.script)
    if options.epochs is not None and options.steps is not None and options.resume_at is None:
        raise SpecError("--epochs compares all steps of an epoch; leave --steps or --epochs out")
    if options.folder is not None and not options.folder.is_dir():
        raise SpecError(f"--folder {options.folder} is not a folder; name the run folder to write verify.json into")
    plan, options, notes = _summed(_plan(options), options)
    plan, compress = _exact(plan, options)
    world_size = plan.world_size if plan is not None else _mesh_size(options) or options.nproc or 2
    from tutti.launch.local_launcher import warm

    warm(threads_per_rank(world_size), preload=("tutti.verification.recorder",))
    from tutti.verification.verification import VerificationRequest, verify

    question = VerificationRequest(
        script=options.script.name,
        world_size=world_size,
        steps=options.steps or 3,
        epochs=options.epochs,
        resume_at=options.resume_at,
        arithmetic=options.arithmetic,  # type: ignore[arg-type]
        tolerance=options.tolerance,
        compress=compress,
    )
    with tempfile.TemporaryDirectory(prefix="tutti-verify-") as folder:
        verdict = verify(question, _runner(options, question, plan, Path(folder)), Path(folder))
    return replace(verdict, notes=(*verdict.notes, *notes))


def _summed(plan: "Plan | None", options: VerifyOptions) -> tuple["Plan | None", VerifyOptions, tuple[str, ...]]:
    """Return the plan with gradients reduced in every step, and a note on what this leaves unverified."""
    if plan is None or plan.sync.mode == "synchronous":
        return plan, options, ()
    from tutti.config.plan import SyncPlan
    from tutti.config.refusals import check_plan
    from tutti.config.sync_notation import format_relaxation, with_mode

    plan = plan.compressed(options.compress)
    check_plan(plan)
    note = (
        f"this plan lets replicas differ (sync {format_relaxation(plan.sync)}), so their steps have no equal on one "
        "device; verified instead, with gradients reduced in every step: shares of the data, losses, gradients and "
        "updates. Not verified: how replicas are kept together, and the results of their separate steps"
    )
    exact = with_mode(replace(plan, sync=replace(plan.sync, compress=None)), SyncPlan())
    return exact, replace(options, compress=None), (note,)


def _exact(plan: "Plan | None", options: VerifyOptions) -> tuple["Plan | None", str | None]:
    """Return the plan with exact reductions, and the codec of the plan or the command line as text."""
    from tutti.config.compression import format_compression
    from tutti.config.refusals import check_plan

    how = options.compress or (plan.sync.compress if plan is not None else None)
    if plan is not None and how is not None:
        check_plan(plan.compressed(how))
        plan = replace(plan, sync=replace(plan.sync, compress=None))
    return plan, None if how is None else format_compression(how)


def _mesh_size(options: VerifyOptions) -> int | None:
    if options.mesh is None:
        return None
    from tutti.config.mesh_axes import parse_mesh

    size = math.prod(parse_mesh(options.mesh).values())
    if options.plan is not None or options.nproc not in (None, size):
        raise PlanError(f"--mesh {options.mesh} has {size} ranks; leave --nproc and --plan out, or make them agree")
    return size


def _plan(options: VerifyOptions) -> "Plan | None":
    if options.plan is None:
        return None
    from tutti.config import serialization
    from tutti.config.plan import Plan

    plan = serialization.load(Plan, options.plan)
    if options.nproc not in (None, plan.world_size):
        raise PlanError(
            f"{options.plan}: its mesh has {plan.world_size} ranks, but --nproc says {options.nproc}; leave --nproc out"
        )
    return plan


def _runner(options: VerifyOptions, question: "VerificationRequest", plan: "Plan | None", folder: Path) -> "Runner":
    """Return the function that runs the script once, on ranks of this machine, without showing their output."""
    from tutti.config import serialization
    from tutti.launch import supervisor as failures
    from tutti.launch.launch_environment import threads_per_rank
    from tutti.launch.launcher import LaunchSpec
    from tutti.launch.local_launcher import LocalLauncher
    from tutti.launch.rank_watch import Silent
    from tutti.launch.supervisor import interrupts, supervise
    from tutti.verification.verification import on_one_device

    def run(trial: "VerificationTrial") -> str | None:
        environment = trial.environment
        if plan is not None:
            followed = plan if trial.world_size > 1 else on_one_device(plan)
            path = serialization.save(followed, folder / f"plan-{trial.world_size}.json")
            environment["TUTTI_PLAN"] = str(path)
        elif options.mesh is not None and trial.world_size > 1:
            environment["TUTTI_MESH"] = options.mesh
        spec = LaunchSpec(
            target=str(options.script),
            arguments=options.arguments,
            folder=trial.run_folder,
            ranks_per_node=(trial.world_size,),
            timeout_s=options.timeout_s,
            threads=threads_per_rank(trial.world_size),
            environment=environment,
        )
        spec.folder.mkdir(parents=True)
        with console.status(_doing(trial)), interrupts() as interrupted:
            outcome = supervise(lambda: LocalLauncher().start(spec), spec, Silent(), interrupted)
        if outcome.status == "stopped":
            raise KeyboardInterrupt
        failure = outcome.failure
        if failure is not None and failure.error in REFUSALS and trial.world_size > 1:
            ranks = f"{trial.world_size} ranks"
            raise ScriptError(
                f"{question.script} is refused on {ranks}, so there is nothing to compare: {failure.message}"
            )
        return failures.sentence(spec, failure) if failure is not None else None

    return run


REFUSALS = frozenset(error.__name__ for error in (PlanError, SpecError, ScriptError, DataError))
"""Errors that say what tutti does not do. Ranks that fail in another way are a verdict."""


def _doing(trial: "VerificationTrial") -> str:
    ranks = "one device" if trial.world_size == 1 else f"{trial.world_size} ranks"
    again = " again" if trial.world_size == 1 and trial.reference is not None else ""
    if trial.epochs is not None and trial.resume is None:
        return f"running on {ranks}{again}, {trial.epochs} epoch{'s' if trial.epochs > 1 else ''}"
    resumed = " resumed" if trial.resume is not None else ""
    return f"running on {ranks}{again}{resumed}, {trial.steps} step{'s' if trial.steps > 1 else ''}"


def _save(verdict: "Verdict", options: VerifyOptions) -> None:
    from tutti.config import serialization
    from tutti.config.run_folder import RunFolder

    paths = [RunFolder(options.folder).verdict] if options.folder is not None else []
    for path in [*paths, *([options.output] if options.output is not None else [])]:
        try:
            serialization.save(verdict, path)
        except OSError as error:
            raise SpecError(f"the verdict cannot be written to {path} ({error.strerror}); name another file") from None


def _show(verdict: "Verdict") -> None:
    """Print the verdict on standard output."""
    from rich.console import Console

    out = Console(highlight=False)
    word, _, rest = verdict.sentence.partition(":")
    colour = "green" if verdict.passed else "red" if verdict.comparable else "yellow"
    out.print(f"[bold {colour}]{word}[/]:", end="")
    out.print(rest, markup=False, soft_wrap=True)
    if verdict.cause is not None:
        out.print(f"Remedy: {verdict.cause.remedy}", markup=False, soft_wrap=True)
    for note in verdict.notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True, style="dim")
