"""Runs that a cluster's scheduler starts: submit, follow, list, show and end them."""

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

from tutti.clusters.cluster_job import (
    RECORD,
    STAY_STOPPED,
    JobArrays,
    JobRecord,
    JobRequest,
    JobStatus,
    Scheduler,
    TakesRanges,
    interrupts_held,
    read_record,
    write_record,
)
from tutti.clusters.cluster_resources import HeterogeneousJobs
from tutti.clusters.schedulers import ALIASES, scheduler_for
from tutti.commands.messages import console, short, warn
from tutti.commands.on_nodes import cluster_settings
from tutti.commands.run_options import (
    RunOptions,
    check_nodes,
    check_relax,
    check_restarts,
    given_mesh,
    given_plan,
    ranks_per_node,
)
from tutti.config import serialization
from tutti.config.count_range import CountRange
from tutti.config.run_folder import RunFolder, last_rows
from tutti.environment import state_folder
from tutti.errors import RESUMABLE, LaunchError, ScriptError, TuttiError

POLL_S = 1.0
"""Seconds between two questions to the scheduler."""

_TAIL_NBYTES = 1 << 16

Answer = Literal["leave", "stop", "cancel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedRun:
    """A run that was submitted, or with `--dry-run` what would be.

    Attributes:
        job: its number; empty if nothing was submitted.
        preview: what was submitted, as text.
    """

    folder: Path
    scheduler: str
    job: str
    preview: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOfArray:
    """A run of an array that is to be submitted.

    Attributes:
        options: of `tutti run`.
        words: its other arguments.
        title: what it has of its own, such as "lr=0.1 seed=2".
    """

    options: RunOptions
    words: tuple[str, ...]
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedArray:
    """An array of runs that was submitted, or with `--dry-run` what would be.

    Attributes:
        folder: the folder that has theirs.
        preview: what was submitted, as text.
    """

    folder: Path
    scheduler: str
    preview: str
    runs: tuple[SubmittedRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A submitted run, as `tutti status` shows it.

    Attributes:
        values: what a run of an array has of its own, such as "lr=0.1 seed=2".
        step, total_steps, loss: of the last completed step; None before the first.
    """

    folder: str
    scheduler: str
    job: str
    name: str
    state: str
    reason: str
    nodes: str
    values: str
    step: int | None
    total_steps: int | None
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedRuns:
    """What `tutti status` shows, the newest run last."""

    runs: tuple[RunState, ...]


def submit_run(
    options: RunOptions,
    words: Sequence[str],
    *,
    on: str,
    nnodes: int | CountRange | None = None,
    requests: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
    hosts: str | None = None,
    dry_run: bool = False,
) -> SubmittedRun:
    """Submit a run to a cluster.

    Args:
        options: of `tutti run`; its folder and checkpoint to resume from are the job's.
        words: the other arguments of `tutti run`, as they were given.
        on: the scheduler's name.
        nnodes: number of nodes, or a range; None for all that are named, or 1.
        requests: settings of the job, such as "partition=gpu,time=2h".
        settings: the same as values, which count more.
        files: values that are written into the run folder, by the option of `tutti run` that names the file.
        hosts: the hosts of a run over ssh, such as "node0:8,node1:8", or a file of them.
        dry_run: submit nothing.

    Raises:
        TuttiError: what `tutti run` would refuse, or the scheduler refuses.
    """
    on = ALIASES.get(on, on)
    scheduler = scheduler_for(on)
    asked_of = {**cluster_settings(on, requests, hosts), **(settings or {})}
    most = nnodes.most if isinstance(nnodes, CountRange) else nnodes
    options = _on_nodes(options, scheduler.nodes(asked_of, most), most)
    if isinstance(nnodes, CountRange):
        same = options.nproc is not None and len(set(options.nproc)) == 1
        nproc = options.nproc[:1] if options.nproc is not None and same else options.nproc
        options = replace(options, least_nodes=nnodes.least, nproc=nproc)
    nproc = _checked(options)
    draft = _request(options, words, nproc, _folder(options, dry_run=True), asked_of)
    if draft.least_nodes is not None:
        _check_range(scheduler, draft, options.nodes, on)
    scheduler.preview(draft)  # what it refuses leaves no folder
    folder = _folder(options, dry_run=dry_run)
    if not dry_run:
        _refuse_busy(folder)
    for option, value in (files or {}).items():
        file = folder / f"given-{option}.json"
        words = (f"--{option}", str(file), *words)
        if not dry_run:
            serialization.save(value, file)
    request = _request(options, words, nproc, folder, asked_of)
    preview = scheduler.preview(request)
    if options.plan is None and isinstance(scheduler, HeterogeneousJobs) and scheduler.kinds(asked_of) > 1:
        _warn_of_equal_shares(options, on, requests)
    if dry_run:
        return SubmittedRun(folder=folder, scheduler=on, job="", preview=preview)
    with contextlib.suppress(FileNotFoundError):
        (folder / STAY_STOPPED).unlink()
    job = _started(scheduler, request, on)
    return SubmittedRun(folder=folder, scheduler=on, job=job, preview=preview)


def submit_array(
    runs: Mapping[int, RunOfArray],
    *,
    on: str,
    at_once: int | None,
    nnodes: int | CountRange | None = None,
    requests: Sequence[str] = (),
    dry_run: bool = False,
) -> SubmittedArray:
    """Submit several runs to a cluster as one job, each with a run folder of its own in a common one.

    Args:
        runs: by number; they need the same nodes.
        on: the scheduler's name.
        at_once: how many may run at once; None for all.
        nnodes: number of nodes of each; 1 if None.
        requests: settings of the job, such as "partition=gpu,time=2h".
        dry_run: submit nothing.

    Raises:
        TuttiError: what `tutti run` would refuse, the scheduler refuses, or it takes no arrays.
    """
    from tutti.launch.script_path import run_folder

    on = ALIASES.get(on, on)
    scheduler, settings = scheduler_for(on), cluster_settings(on, requests, None)
    if not isinstance(scheduler, JobArrays):
        raise LaunchError(f"--array: {on} takes no arrays of runs; use --on slurm, or submit each run")
    if isinstance(nnodes, CountRange):
        raise LaunchError(f"--nnodes {nnodes}: the runs of an array have one number of nodes; give one")
    ready = {
        number: replace(run, options=_on_nodes(run.options, scheduler.nodes(settings, nnodes), nnodes))
        for number, run in runs.items()
    }
    nproc = {number: _checked(run.options) for number, run in ready.items()}
    first = next(iter(ready.values())).options
    if len({(run.options.nnodes, nproc[number]) for number, run in ready.items()}) > 1:
        raise LaunchError("--array: the runs need different numbers of nodes or ranks; submit these one by one")
    if first.resume is not None:
        raise LaunchError("--array begins new runs; let one of an array go on by itself: --resume FOLDER/NUMBER")
    folder = _folder(first, dry_run=dry_run)
    for number in () if dry_run else ready:
        run_folder(folder / str(number), None, first.name)
    asked = {
        number: _request(run.options, run.words, nproc[number], folder / str(number), settings)
        for number, run in ready.items()
    }
    preview = scheduler.preview_array(asked, at_once)
    if dry_run:
        return SubmittedArray(folder=folder, scheduler=on, preview=preview, runs=())
    for request in asked.values():
        (request.folder / STAY_STOPPED).unlink(missing_ok=True)
    with interrupts_held() as interrupts:
        jobs = scheduler.submit_array(asked, at_once)
        for number, request in asked.items():
            _record(scheduler, request, on, jobs[number], ready[number].title)
    if interrupts.came:
        _cancelled_again(folder, f"{on} job {jobs[next(iter(jobs))]}")
    found = tuple(
        SubmittedRun(folder=asked[number].folder, scheduler=on, job=job, preview="") for number, job in jobs.items()
    )
    return SubmittedArray(folder=folder, scheduler=on, preview=preview, runs=found)


def _request(
    options: RunOptions,
    words: Sequence[str],
    nproc: tuple[int, ...] | None,
    folder: Path,
    settings: Mapping[str, Any],
) -> JobRequest:
    return JobRequest(
        name=options.name,
        folder=folder,
        directory=Path.cwd(),
        words=tuple(words),
        resume=options.resume.resolve() if isinstance(options.resume, Path) else options.resume,
        nodes=options.nnodes,
        least_nodes=options.least_nodes,
        nproc=nproc,
        grace_s=options.grace_s,
        time_limit_s=options.time_limit_s,
        script="" if options.module else options.script,
        restarts=options.max_restarts,
        least_ranks=_least_ranks(options) if options.goes_on else None,
        checkpoint_store=options.checkpoint_store,
        settings=settings,
    )


def _least_ranks(options: RunOptions) -> int | None:
    from tutti.launch.restarts import RestartPolicy

    return RestartPolicy(min_ranks=options.min_ranks, on_failure=options.on_failure).least


def _folder(options: RunOptions, *, dry_run: bool) -> Path:
    """Return the run folder, which is made if something is submitted.

    Raises:
        LaunchError: an object store is named, or the folder cannot be used.
    """
    from tutti.launch.script_path import run_folder

    asked = options.folder
    if isinstance(asked, str):
        raise LaunchError(
            f"--folder {asked}: nodes of a cluster need a run folder that they see; name a path, and for checkpoints "
            f"--checkpoint-store {asked}"
        )
    if dry_run:
        return (asked or Path("runs") / f"{options.name}-TIME").resolve()
    resume = options.resume if isinstance(options.resume, Path) else None
    if asked is None and resume is not None and (resume / RECORD).exists():
        asked = resume  # also where the run itself lies in the cluster
    return run_folder(asked, resume, options.name)


def _refuse_busy(folder: Path) -> None:
    """Refuse a folder into which an earlier job still writes, whichever scheduler has it.

    Raises:
        LaunchError: the job waits or runs.
    """
    if not (folder / RECORD).exists():
        return
    try:
        record = read_record(folder)
        job, state = f"{record.scheduler} job {record.job}", scheduler_for(record.scheduler).status(record.job).state
    except LaunchError as error:
        warn(f"whether the earlier job of {short(folder)} has ended is not known: {error}")
        return
    if state in ("pending", "running"):
        raise LaunchError(f"{job} still writes into {short(folder)}; wait for its end, or `tutti cancel` it")


def _warn_of_equal_shares(options: RunOptions, on: str, requests: Sequence[str]) -> None:
    """Say that the ranks of a job of several kinds of nodes get equal shares, and what gives them others."""
    asked = [word for text in requests for word in ("--request", text)]
    script = ["SCRIPT"] if options.module else options.target
    warn(
        "the job has nodes of several kinds, and without --plan all of its ranks get equal shares of the batch; plan "
        f"for them with `{shlex.join(['tutti', 'plan', '--on', on, *asked, '--output', 'plan.json', *script])}`, and "
        "add --plan plan.json"
    )


def _check_range(scheduler: Scheduler, request: JobRequest, nodes: str, on: str) -> None:
    if not isinstance(scheduler, TakesRanges):
        raise LaunchError(f"--nnodes {nodes}: jobs of {on} have one number of nodes; give one")
    scheduler.check_range(request)


def _started(scheduler: Scheduler, request: JobRequest, on: str) -> str:
    """Submit a job, write its record, and return its number.

    Raises:
        KeyboardInterrupt: Ctrl-C came meanwhile; the job is cancelled.
    """
    with interrupts_held() as interrupts:
        job = scheduler.submit(request)
        _record(scheduler, request, on, job)
    if interrupts.came:
        _cancelled_again(request.folder, f"{on} job {job}")
    return job


def _record(scheduler: Scheduler, request: JobRequest, on: str, job: str, values: str = "") -> None:
    """Write the record of a job into its run folder, and remember that."""
    record = JobRecord(
        scheduler=on,
        job=job,
        name=request.name,
        nodes=request.nodes,
        nproc=request.nproc,
        submitted_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        log=scheduler.log(request, job),
        values=values,
    )
    write_record(request.folder, record)
    _remember(request.folder)


def _cancelled_again(folder: Path, job: str) -> NoReturn:
    """Cancel what was submitted while Ctrl-C came. Raises KeyboardInterrupt."""
    try:
        end_runs(folder, checkpoint=False)
        warn(f"interrupted: {job} is cancelled")
    except TuttiError as error:
        warn(f"interrupted after {job} was submitted: {error}")
    raise KeyboardInterrupt


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of the runs of an array, by number; the folder itself if it has none."""
    if (folder / RECORD).is_file():
        return [folder]
    found = [file.parent for file in folder.glob(f"*/{RECORD}") if file.parent.name.isdecimal()]
    return sorted(found, key=lambda run: int(run.name)) or [folder]


def _on_nodes(options: RunOptions, ranks: tuple[int | None, ...], nnodes: int | None) -> RunOptions:
    """Return the options with the number of nodes, and the ranks of those that the settings name.

    Raises:
        LaunchError: --nproc contradicts the list of hosts.
    """
    if not ranks:
        return replace(options, nnodes=nnodes or 1)
    counts = tuple(count for count in ranks if count is not None)
    given = options.nproc
    if counts and given is not None and (given * len(counts) if len(given) == 1 else given) != counts:
        asked = ",".join(map(str, given))
        raise LaunchError(
            f"--nproc {asked} contradicts the hosts, which have {','.join(map(str, counts))} ranks; leave one out"
        )
    return replace(options, nnodes=len(ranks), nproc=counts or given)


def _checked(options: RunOptions) -> tuple[int, ...] | None:
    """Check what can be checked before a job starts, and return the ranks of each node."""
    from tutti.launch.script_path import check_module, check_script

    if not options.target:
        raise ScriptError("no script was named; write `tutti submit train.py`")
    if options.rendezvous is not None or options.has_number:
        raise LaunchError(
            "the cluster numbers its nodes and says where they meet; leave --rendezvous and --node-rank out"
        )
    if options.module:
        check_module(options.script)
    else:
        check_script(Path(options.script))
    check_relax(options)
    check_nodes(replace(options, rendezvous="node0:1" if options.nnodes > 1 else None))
    check_restarts(replace(options, folder=options.folder or Path("runs")))  # the run folder is made later
    return ranks_per_node(options, given_plan(options), given_mesh(options))


def follow(folder: Path, screen: Any, ask: Callable[[], Answer]) -> int:
    """Show a submitted run until it has ended, and return its exit code.

    Args:
        folder: the run folder.
        screen: makes the watcher that shows what the first rank prints.
        ask: called on Ctrl-C: whether to leave the run alone, to stop it with a checkpoint, or to cancel it.

    Raises:
        LaunchError: the folder is of no submitted run, or the scheduler does not answer.
    """
    from tutti.launch.launcher import LaunchSpec
    from tutti.launch.rank_watch import Silent, Tail

    record = read_record(folder)
    scheduler = scheduler_for(record.scheduler)
    spec = LaunchSpec(target=record.name, folder=folder.resolve())
    status, printed = JobStatus(state="unknown"), Tail(Path(record.log))
    elsewhere = scheduler.collect(record.job)
    with Silent() if elsewhere else screen(spec) as watcher:
        while True:
            try:
                watcher.update()
                now = scheduler.status(record.job)
                if (now.state, now.reason) != (status.state, status.reason):
                    console.print(_says(record, now), style="dim", markup=False, soft_wrap=True)
                status = now
                if elsewhere:
                    scheduler.collect(record.job)
                    show(printed.read())
                if status.ended or status.state == "unknown":
                    break
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                answer = ask()
                if answer == "leave":
                    console.print(f"the job goes on; `tutti attach {short(folder)}` shows it again", markup=False)
                    return 0
                end_run(folder, checkpoint=answer == "stop")
    scheduler.collect(record.job)
    return _concluded(folder, record, status)


def _says(record: JobRecord, status: JobStatus) -> str:
    about = f" ({status.reason})" if status.reason else f" on {status.nodes}" if status.nodes else ""
    return f"{record.scheduler} job {record.job}: {status.state}{about}"


def _concluded(folder: Path, record: JobRecord, status: JobStatus) -> int:
    """Say how a run ended, and return its exit code."""
    code = status.exit_code if status.exit_code is not None else 1
    page = RunFolder(folder).report / "report.html"
    if status.state == "completed" and not code:
        if page.exists():
            console.print(f"report: {short(page)}", soft_wrap=True, markup=False)
        return 0
    if code == RESUMABLE:
        console.print(f"stopped with a checkpoint; go on with `tutti submit --resume {short(folder)}` and the script")
        return code
    tail = _tail(Path(record.log)).splitlines()[-20:]
    if tail:
        console.print("\n".join(tail), markup=False, soft_wrap=True, style="red")
    warn(f"{_says(record, status)}; the whole output is in {record.log}")
    return code or 1


def end_run(folder: Path, *, checkpoint: bool) -> JobRecord:
    """End a submitted run.

    Args:
        folder: the run folder.
        checkpoint: let the ranks write a checkpoint first.

    Raises:
        LaunchError: the folder is of no submitted run, the job has ended, or the scheduler does not answer.
    """
    record = read_record(folder)
    scheduler = scheduler_for(record.scheduler)
    status = scheduler.status(record.job)
    if status.ended or status.state == "unknown":
        raise LaunchError(f"{record.scheduler} job {record.job} of {short(folder)} has ended already ({status.state})")
    (folder / STAY_STOPPED).touch()
    if checkpoint and status.state == "running":
        scheduler.stop(record.job)
    else:
        scheduler.cancel(record.job)
    return record


def end_runs(folder: Path, *, checkpoint: bool) -> list[JobRecord]:
    """End a submitted run, or those of an array that have not ended.

    Args:
        folder: the run folder, or the one that has an array's.
        checkpoint: let the ranks write a checkpoint first.

    Returns:
        The records of those that are ended.

    Raises:
        LaunchError: there is no submitted run, all have ended, or the scheduler does not answer.
    """
    runs = runs_in(folder)
    going_on = [run for run in runs if len(runs) == 1 or not _is_over(read_record(run))]
    if not going_on:
        raise LaunchError(f"all {len(runs)} runs of {short(folder)} have ended already")
    return [end_run(run, checkpoint=checkpoint) for run in going_on]


def states(folders: Sequence[Path] = ()) -> SubmittedRuns:
    """Return the state of submitted runs.

    Args:
        folders: run folders; all that are known if there are none.
    """
    known = [run.resolve() for folder in folders for run in runs_in(Path(folder))] or _known()
    found = []
    for folder in known:
        record = read_record(folder)
        try:
            status = scheduler_for(record.scheduler).status(record.job)
        except TuttiError as error:
            status = JobStatus(state="unknown", reason=str(error))
        row = _last_step(folder)
        found.append(
            RunState(
                folder=short(folder),
                scheduler=record.scheduler,
                job=record.job,
                name=record.name,
                state=status.state,
                reason=status.reason,
                nodes=status.nodes,
                values=record.values,
                step=row.get("step"),
                total_steps=row.get("total_steps"),
                loss=row.get("loss"),
            )
        )
    return SubmittedRuns(runs=tuple(found))


def output(folder: Path, rank: int | None, *, follow: bool) -> Iterator[str]:
    """Yield what a submitted run prints.

    Args:
        folder: the run folder.
        rank: only what this rank prints.
        follow: go on until the job has ended.

    Raises:
        LaunchError: the folder is of no submitted run, or the rank has printed nothing.
    """
    from tutti.launch.rank_watch import Tail

    record = read_record(folder)
    own = RunFolder(folder).rank(rank or 0)
    files = [Path(record.log)] if rank is None else [own / "stdout.log", own / "stderr.log"]
    scheduler = scheduler_for(record.scheduler)
    if scheduler.collect(record.job) and rank is not None:
        raise LaunchError(f"the run folder lies in the cluster, and so does what rank {rank} prints; leave --rank out")
    if rank is not None and not follow and not own.is_dir():
        raise LaunchError(f"{short(folder)} has no rank {rank} yet, or never had one; `tutti status` shows its state")
    tails = [Tail(file, from_end=False) for file in files]
    while True:
        going_on = follow and not _is_over(record)
        scheduler.collect(record.job)
        yield from filter(None, (tail.read() for tail in tails))
        if not going_on:
            return
        time.sleep(POLL_S)


def _is_over(record: JobRecord) -> bool:
    status = scheduler_for(record.scheduler).status(record.job)
    return status.ended or status.state == "unknown"


def _last_step(folder: Path) -> dict[str, Any]:
    """Return the last row of a step in a run's metrics; empty before the first."""
    steps = (row for row in reversed(last_rows(RunFolder(folder).metrics)) if row.get("kind") == "step")
    return next(steps, {})


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as data:
            data.seek(max(0, file.stat().st_size - _TAIL_NBYTES))
            return data.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _register() -> Path:
    """Return the file that lists the folders of all submitted runs of this user."""
    return state_folder() / "submitted.txt"


def _remember(folder: Path) -> None:
    register = _register()
    try:
        register.parent.mkdir(parents=True, exist_ok=True)
        with register.open("a", encoding="utf-8") as lines:
            lines.write(f"{json.dumps(str(folder))}\n")
    except OSError as error:
        warn(f"{register} cannot be written ({error.strerror}), so `tutti status` shows this run only in its directory")


def _known() -> list[Path]:
    """Return the folders of the submitted runs that still exist, in the order of their submission."""
    folders: dict[Path, None] = {}
    with contextlib.suppress(OSError):
        for line in _register().read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                folders[Path(str(json.loads(line)))] = None
    folders |= dict.fromkeys(file.parent.resolve() for file in sorted(Path("runs").glob(f"*/{RECORD}")))
    return [folder for folder in folders if (folder / RECORD).is_file()]


def show(text: str) -> None:
    """Print output of a run on standard output."""
    sys.stdout.write(text)
    sys.stdout.flush()
