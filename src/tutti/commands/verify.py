"""`tutti.verify`: compares N ranks with one device and names the first difference."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from tutti.commands.messages import messages, status
from tutti.commands.values import (
    StrPath,
    compression_of,
    mesh_text,
    needed_path,
    one_of,
    path_of,
    path_or,
    positive,
    seconds_above_0,
    sharding_of,
    texts_of,
    whole,
)
from tutti.config.compression import Compression
from tutti.config.plan import Plan
from tutti.errors import DataError, LaunchError, PlanError, ScriptError, SpecError

if TYPE_CHECKING:
    from tutti.config.verdict import Verdict
    from tutti.verification.verification import Runner, VerificationRequest, VerificationTrial

ArithmeticChoice = Literal["auto", "double", "script"]


def verify(
    script: StrPath,
    arguments: Sequence[object] = (),
    *,
    nproc: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    resume_at: int | None = None,
    plan: StrPath | Plan | None = None,
    mesh: str | Mapping[str, int] | None = None,
    compress: str | Compression | None = None,
    shard: str | None = None,
    arithmetic: ArithmeticChoice = "auto",
    tolerance: float | None = None,
    folder: StrPath | None = None,
    output: StrPath | None = None,
    timeout: float = 300.0,
    share_device: bool = False,
    verbose: bool = False,
) -> "Verdict":
    """Check that a script computes the same on N ranks as on one device.

    A difference is no error: the verdict says where the two first differ, and the likely cause.

    Args:
        script: the script.
        arguments: the script's own arguments.
        nproc: ranks to compare with one device; 2 if nothing sets them.
        steps: steps to compare; 3 if None.
        epochs: compare all steps of so many epochs instead, and evaluations.
        resume_at: compare so many steps; then resume the ranks from their checkpoint, and compare as many as `steps`.
        plan: verify this Plan, or the one of a file: its ranks, microbatches and shares.
        mesh: verify ranks in this grid, such as {"replicate": 2, "split": 2} or "dp=2,tp=2".
        compress: codec of gradient reductions.
        shard: settings of the shard axis, such as "level=2,engine=fsdp2".
        arithmetic: "double": float64 throughout; "script": its own dtypes; "auto": float64 if the script can.
        tolerance: relative tolerance; by default that of the dtype.
        folder: write verify.json into this run folder.
        output: write the verdict to this file.
        timeout: seconds that ranks wait for each other, and that a script may take without any sign of progress.
        share_device: ranks may compute on the same GPU.
        verbose: show on standard error what is being run.

    Raises:
        TuttiError: what `tutti verify` would refuse, with the same sentence.
        KeyboardInterrupt: it was stopped.
    """
    options = VerifyOptions(
        script=needed_path("script", script),
        arguments=texts_of(arguments),
        nproc=whole("nproc", nproc),
        steps=whole("steps", steps),
        epochs=whole("epochs", epochs),
        resume_at=whole("resume_at", resume_at),
        plan=path_or("plan", Plan, plan),
        mesh=mesh_text(mesh),
        compress=compression_of(compress),
        shard=sharding_of(shard),
        arithmetic=one_of("arithmetic", arithmetic, get_args(ArithmeticChoice)),
        tolerance=positive("tolerance", tolerance),
        folder=path_of("folder", folder),
        output=path_of("output", output),
        timeout_s=seconds_above_0("timeout", timeout),
        share_device=share_device,
    )
    with messages(shown=verbose):
        return verdict_of(options)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What `tutti verify` is asked for; `tutti.verify` says what each option means."""

    script: Path
    arguments: tuple[str, ...] = ()
    nproc: int | None = None
    steps: int | None = None
    epochs: int | None = None
    resume_at: int | None = None
    plan: "Path | Plan | None" = None
    mesh: str | None = None
    compress: "Compression | None" = None
    shard: str | None = None
    arithmetic: str = "auto"
    tolerance: float | None = None
    folder: Path | None = None
    output: Path | None = None
    timeout_s: float = 300.0
    share_device: bool = False
    as_json: bool = False


def verdict_of(options: VerifyOptions) -> "Verdict":
    """Run the script on one device and on several ranks, compare them, and write the verdict where it is asked for."""
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
    from tutti.verification.verification import VerificationRequest
    from tutti.verification.verification import verify as compared

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
        verdict = compared(question, _runner(options, question, plan, Path(folder)), Path(folder))
    verdict = replace(verdict, notes=(*verdict.notes, *notes))
    _save(verdict, options)
    return verdict


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

    plan = options.plan if isinstance(options.plan, Plan) else serialization.load(Plan, options.plan)
    if options.nproc not in (None, plan.world_size):
        place = options.plan if isinstance(options.plan, Path) else "the plan"
        raise PlanError(
            f"{place}: its mesh has {plan.world_size} ranks, but --nproc says {options.nproc}; leave --nproc out"
        )
    return plan


def _runner(options: VerifyOptions, question: "VerificationRequest", plan: "Plan | None", folder: Path) -> "Runner":
    """Return the function that runs the script once, on ranks of this machine, without showing their output."""
    from tutti.config import serialization
    from tutti.launch import failure as failures
    from tutti.launch.launch_environment import threads_per_rank
    from tutti.launch.launcher import LaunchSpec
    from tutti.launch.local_launcher import LocalLauncher
    from tutti.launch.rank_watch import Stalls
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
        if options.shard is not None and trial.world_size > 1:
            environment["TUTTI_SHARD"] = options.shard
        if options.share_device or (plan is not None and plan.share_device):
            environment["TUTTI_SHARE_DEVICE"] = "1"
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
        with status(_doing(trial)), interrupts() as interrupted:
            outcome = supervise(LocalLauncher().start, spec, Stalls(spec, question.script, trial.folder), interrupted)
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


REFUSALS = frozenset(error.__name__ for error in (PlanError, SpecError, ScriptError, DataError, LaunchError))
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
