"""`tutti.run`: train according to a plan, on the ranks of this node. Other nodes run the same command."""

import contextlib
import inspect
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tutti.clusters.cluster_job import STAY_STOPPED
from tutti.clusters.schedulers import is_scheduler
from tutti.commands.messages import console, guarded_streams, messages, short, status, warn
from tutti.commands.run_conclusion import Conclusion, conclude, header_time
from tutti.commands.run_options import (
    TIMEOUT_S,
    RunOptions,
    check_nodes,
    check_relax,
    check_restarts,
    duration_s,
    environment,
    given_mesh,
    given_plan,
    joined_folder,
    options_from,
    own_count,
    placed_here,
    ranks_per_node,
)
from tutti.commands.stored_runs import mirrored, staged
from tutti.commands.values import (
    StrPath,
    compression_of,
    mesh_text,
    one_of,
    path_of,
    path_or,
    seconds_above_0,
    sharding_of,
    sync_of,
    texts_of,
    whole,
)
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.compression import Compression
from tutti.config.count_range import CountRange, node_counts, rank_counts
from tutti.config.plan import Plan, SyncPlan
from tutti.config.run_folder import RunFolder, RunHeader, is_store_address
from tutti.config.run_report import RunReport
from tutti.config.vocabulary import OnSlowRank, Relaxation
from tutti.errors import LaunchError, ScriptError, TrainingError, TuttiError

if TYPE_CHECKING:
    from tutti.commands.run_prediction import Beside, PredictionRequest
    from tutti.commands.submitted_job import SubmittedJob
    from tutti.launch.launcher import Launcher, LaunchSpec
    from tutti.launch.rank_watch import Watcher
    from tutti.launch.restarts import OnFailure, Recover, RestartPolicy

    Screen = Callable[[LaunchSpec], Watcher]

_PLANNING = ("tutti.profile.probe", "tutti.commands.planning")
"""Modules that the fork server loads once if the run is predicted or planned."""

_KINDS = {kind.__name__: kind for kind in (*TuttiError.__subclasses__(), TuttiError)}
"""The errors that a rank may have failed with, by name."""

PREDICTION_WAIT_S = 20.0
"""Seconds that a finished run waits for its prediction, which another process computes meanwhile."""


def run(
    script: StrPath,
    arguments: Sequence[object] = (),
    *,
    module: bool = False,
    nproc: int | str | Sequence[int] | None = None,
    nnodes: int | str | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    timeout: float | None = None,
    on: str = "local",
    hosts: str | Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    plan: StrPath | Plan | None = None,
    mesh: str | Mapping[str, int] | None = None,
    compress: str | Compression | None = None,
    sync: str | SyncPlan | None = None,
    bucket_mb: float | str | None = None,
    shard: str | None = None,
    relax: Relaxation = "exact",
    cluster: StrPath | ClusterSpec | None = None,
    folder: StrPath | None = None,
    resume: StrPath | None = None,
    checkpoint_store: str | None = None,
    checkpoint_every: int | None = None,
    memory_checkpoint_every: int | None = None,
    predict: bool = True,
    frugal: bool = False,
    profile: int | None = None,
    share_device: bool = False,
    bind_cores: str = "auto",
    max_restarts: int = 0,
    on_failure: "OnFailure" = "replace",
    recover: "Recover" = "memory",
    min_ranks: int | None = None,
    on_slow_rank: OnSlowRank = "warn",
    grace: float = 30.0,
    time_limit: float | str | None = None,
    verbose: bool = False,
) -> RunReport | None:
    """Train a script on several ranks and return the report of the run.

    What the ranks print is in the run folder, in ranks/; `verbose` shows the first one's too.

    Args:
        script: the script, or with `module` the dotted name of a module.
        arguments: the script's own arguments.
        module: `script` is a module's name, as after `python -m`.
        nproc: ranks per node; a list for unequal nodes; a range such as "2:8" for one rank on each GPU, or core.
        nnodes: nodes that make this call together, 1 if None; a range such as "1:4" for as many as there are at each
            time. On a cluster the number of its nodes, all hosts if None.
        node_rank: the number of this node, from 0; None: 0, or with a range of nodes the next that is free.
        rendezvous: where nodes meet, as "HOST:PORT": node 0's host and a free port there.
        timeout: seconds that ranks wait for each other. None: 600, but ranks that do nothing within a step end after
            ten times the slowest step, at least 30 s.
        on: what starts the ranks: "local", or "slurm", "ssh" or "kubernetes", to which the run is submitted; the call
            then waits for its end, and an interrupt stops it with a checkpoint.
        hosts: run over ssh on these hosts, such as "node0:8,node1:8", a list of such texts, or a file of them.
        settings: of the cluster's job, such as {"partition": "gpu"}; tutti.toml has those of the project.
        plan: a Plan to follow, such as `tutti.plan(...).plan`, or a file of one.
        mesh: the ranks as a grid, such as {"replicate": 2, "split": 2} or "dp=2,tp=2".
        compress: codec of gradient reductions, such as "top-k,density=0.01".
        sync: how far replicas may differ, such as "local:8".
        bucket_mb: reduce gradients in buckets of this many MiB, or "auto".
        shard: settings of the shard axis, such as "level=2,engine=fsdp2".
        relax: how far training may deviate in order to send less, where the planner chooses.
        cluster: a ClusterSpec, or a file of one, for planning and predicting.
        folder: the run folder, or an address to keep it at ("s3://bucket/run"); runs/NAME-TIME if None.
        resume: continue from a run folder, a checkpoint, or the address of a store ("s3://bucket/prefix").
        checkpoint_store: upload checkpoints to this address; "none": nowhere, also if the run did before.
        checkpoint_every: save a checkpoint every so many steps.
        memory_checkpoint_every: save one in the memory of the nodes every so many steps, for restarts.
        predict: predict step time and memory, for the report.
        frugal: return freed memory to the system at once.
        profile: profile this many steps after a warm-up, into the run folder's profile/.
        share_device: ranks may compute on the same GPU; their times then say little.
        bind_cores: "auto" binds each rank to the cores near its GPU, and spreads ranks on CPUs over NUMA nodes;
            "none" leaves that to the system.
        max_restarts: start the ranks again up to so often after a failure, from the newest checkpoint.
        on_failure: "replace" a rank that failed, or "shrink": go on without it.
        recover: "memory" lets the other ranks live and go on from their state in memory, where they have all of it;
            "checkpoint" starts all ranks again.
        min_ranks: go on with fewer ranks, down to so many, where one cannot be started again.
        on_slow_rank: "warn" names a rank that is slower than the others; "rebalance" lowers its share of the batch.
        grace: seconds that ranks have to save a checkpoint when the run is stopped.
        time_limit: save a checkpoint and stop after this time: seconds, or a text such as "2h30m".
        verbose: show what `tutti run` shows.

    Returns:
        The report; None on nodes other than 0, and where the run folder lies in a cluster.

    Raises:
        TrainingError: a rank failed, or the run was stopped by its time limit.
        TuttiError: what `tutti run` would refuse, with the same sentence.
        KeyboardInterrupt: the run was stopped.
    """
    given = locals()
    if hosts is not None or is_scheduler(on):
        return _waited_for(submit_arguments(given), verbose=verbose)
    if settings is not None:
        raise LaunchError(f"settings are for a cluster's scheduler, and on={on!r}; leave them out, or give on='slurm'")
    options = options_of_run(**_as_options(given))
    with guarded_streams(), messages(shown=verbose):
        return report_of(trained(options, screen=screen(shown=verbose)))


def submit_arguments(given: Mapping[str, Any], *, dry_run: bool = False) -> "SubmittedJob":
    """Submit a run for the arguments of `run`, and return it.

    Args:
        given: the arguments by name; `on` may be None for what tutti.toml says.
        dry_run: submit nothing.

    Raises:
        TuttiError: what `tutti submit` would refuse.
    """
    from tutti.clusters.profile_file import read_profile
    from tutti.commands.run_words import words_of_run
    from tutti.commands.submitted_job import submit_options

    on = given["on"] if given["on"] != "local" or given["hosts"] is None else None
    on = on or read_profile(Path.cwd()).launcher(given["hosts"]) or "slurm"
    options = options_of_run(**_as_options({**given, "on": "local", "nnodes": None}))
    defaults = {name: parameter.default for name, parameter in inspect.signature(run).parameters.items()}
    words, files = words_of_run(given, defaults)
    return submit_options(
        options,
        [*words, *(["-m"] if options.module else []), "--", *options.target],
        on=on,
        nnodes=None if given["nnodes"] is None else _nnodes(given["nnodes"]),
        hosts=given["hosts"],
        settings=given["settings"],
        files=files,
        dry_run=dry_run,
    )


def _waited_for(job: "SubmittedJob", *, verbose: bool) -> RunReport | None:
    """Wait for the end of a submitted run, and return its report; an interrupt stops it with a checkpoint."""
    from tutti.commands.submit import follow

    interrupted = False

    def stop() -> Literal["stop"]:
        nonlocal interrupted
        interrupted = True
        return "stop"

    try:
        if verbose:
            with guarded_streams():
                follow(job.folder, screen(shown=True), stop)
            if interrupted:
                raise KeyboardInterrupt
        return job.wait()
    except KeyboardInterrupt:
        with contextlib.suppress(TuttiError):
            job.cancel(checkpoint=True)
        raise


def _as_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `run` by the names that `options_of_run` has."""
    given = dict(arguments)
    script, words = given.pop("script"), texts_of(given.pop("arguments"))
    for name in ("verbose", "hosts", "settings"):
        given.pop(name, None)
    return {"target": (str(script), *words), "launcher": given.pop("on"), **given}


def _nproc(value: "int | str | Sequence[int] | None") -> tuple[int, ...] | CountRange | None:
    try:
        return rank_counts(value)
    except LaunchError as error:
        raise LaunchError(f"nproc={error}") from None


def _nnodes(value: int | str) -> int | CountRange | None:
    try:
        return node_counts(value)
    except LaunchError as error:
        raise LaunchError(f"nnodes={error}") from None


READ: dict[str, Callable[[Any], Any]] = {
    "nproc": _nproc,
    "nnodes": lambda value: 1 if value is None else _nnodes(value),
    "node_rank": lambda value: None if value is None else whole("node_rank", value, 0),
    "plan": lambda value: path_or("plan", Plan, value),
    "mesh": mesh_text,
    "compress": compression_of,
    "sync": sync_of,
    "bucket_mb": lambda value: buckets_of(value),
    "shard": sharding_of,
    "relax": lambda value: one_of("relax", value, get_args(Relaxation)),
    "cluster": lambda value: path_or("cluster", ClusterSpec, value),
    "folder": lambda value: value if is_store_address(value) else path_of("folder", value),
    "resume": lambda value: value if is_store_address(value) else path_of("resume", value),
    "checkpoint_every": lambda value: whole("checkpoint_every", value),
    "memory_checkpoint_every": lambda value: whole("memory_checkpoint_every", value),
    "profile": lambda value: whole("profile", value),
    "bind_cores": lambda value: one_of("bind_cores", value, ("auto", "none")),
    "max_restarts": lambda value: whole("max_restarts", value, 0),
    "min_ranks": lambda value: whole("min_ranks", value),
    "on_failure": lambda value: one_of("on_failure", value, ("replace", "shrink")),
    "recover": lambda value: one_of("recover", value, ("memory", "checkpoint")),
    "on_slow_rank": lambda value: one_of("on_slow_rank", value, get_args(OnSlowRank)),
}
"""How an argument of a function is read for the option of that name; others are taken as they are."""


def options_of_run(
    *, timeout: float | None, grace: float = 30.0, time_limit: float | str | None = None, **given: Any
) -> RunOptions:
    """Return the options of a run for the arguments of a function.

    Args:
        timeout: seconds that ranks wait for each other; None if nobody has stated a time.
        grace: seconds that ranks have to save a checkpoint when the run is stopped.
        time_limit: seconds, or a text, after which the run is stopped.
        given: the other options, by name.

    Raises:
        TuttiError: an argument has no value that the option may have.
    """
    read = {name: READ[name](value) if name in READ else value for name, value in given.items()}
    return options_from(
        timeout_s=TIMEOUT_S if timeout is None else seconds_above_0("timeout", timeout),
        adaptive_timeout=timeout is None,
        grace_s=seconds_above_0("grace", grace),
        time_limit_s=None if time_limit is None else duration_s(time_limit),
        **read,
    )


def buckets_of(value: float | str | None) -> str | None:
    """Return the size of buckets as text, after a check.

    Raises:
        TuttiError: it is not a size.
    """
    from tutti.config.option_syntax import with_bucket_size
    from tutti.config.plan import BatchPlan

    if value is None:
        return None
    text = value if isinstance(value, str) else f"{value:g}"
    with_bucket_size(Plan(batch=BatchPlan(global_batch_size=1)), text)
    return text


def screen(*, shown: bool, as_json: bool = False, progress: bool = True) -> "Screen":
    """Return what makes a run's watcher: one that shows the first rank's output, or one that shows nothing."""
    from tutti.launch.rank_watch import Silent, watcher_for

    if not shown:
        return lambda spec: Silent()
    return lambda spec: watcher_for(
        spec, stdout=sys.stderr if as_json else sys.stdout, console=console, progress=progress
    )


def report_of(ended: Conclusion) -> RunReport | None:
    """Return the report of a run that went well.

    Raises:
        TuttiError: it did not.
        KeyboardInterrupt: it was stopped.
    """
    if ended.outcome.status == "stopped":
        if ended.outcome.signal is None:
            raise TrainingError(ended.message or "stopped")
        raise KeyboardInterrupt
    if ended.message is not None:
        failure = ended.outcome.failure
        raise (ScriptError if failure is None else _KINDS.get(failure.error, TrainingError))(ended.message)
    if ended.report is None and ended.is_first:
        from tutti.reporting.build_report import build_report

        build_report(ended.spec.folder)  # raises what kept it from being written
    return ended.report and replace(ended.report, folder=str(ended.spec.folder))


def trained(options: RunOptions, *, screen: "Screen", make_script: Callable[[Path], str] | None = None) -> Conclusion:
    """Start the ranks of this node, watch them until they have ended, and write the report.

    Args:
        options: what to run.
        screen: where output of the ranks goes.
        make_script: writes the script to run into the run folder and returns its path; the options then have a name in
            the place of a script.

    Raises:
        TuttiError: the run cannot be started.
    """
    from tutti.launch.launch_environment import threads_per_rank
    from tutti.launch.script_path import check_module, check_script

    if not options.target:
        raise ScriptError("no script was named; write `tutti run train.py`, or `tutti run -m package.module`")
    if options.module:
        check_module(options.script)
    elif make_script is None:
        check_script(Path(options.script))
    check_relax(options)
    check_nodes(options)
    check_restarts(options)
    options, stored = staged(options)
    options = _beginning_again(placed_here(options))
    from tutti.launch.launcher_registry import launcher_for
    from tutti.launch.local_launcher import warming

    launcher = launcher_for(options.launcher)
    preload = _PLANNING if options.predict else ()
    with warming(threads_per_rank(own_count(options)), preload=("tutti.commands.run_prediction", *preload)):
        nproc = ranks_per_node(options, given_plan(options), given_mesh(options))
        _meet(options)
        spec = _launch_spec(options, nproc)
    if make_script is not None:
        spec = replace(spec, target=make_script(spec.folder))
    with mirrored(stored, spec.folder, options):
        return _train(options, spec, launcher, screen, None if stored is None else stored.address)


def _beginning_again(options: RunOptions) -> RunOptions:
    """Return the options without --resume where the run that it names has no checkpoint yet."""
    from tutti.launch.script_path import begins_again

    run = options.resume or options.folder
    if run is not None and run == options.folder and run == options.resume and not Path(run).exists():
        console.print(f"{run} does not exist yet: the run begins", markup=False, soft_wrap=True)
        return replace(options, resume=None)
    if isinstance(run, str) or _has_stored(run):
        return options
    other_node = options.resume is None and options.node_rank > 0  # node 0 may have begun in the folder just now
    if run is None or other_node or joined_folder(options) is not None or not begins_again(run):
        return options
    console.print(f"{run} has no checkpoint yet: the run begins again", markup=False, soft_wrap=True)
    return replace(options, resume=None, folder=options.folder or run)


def _has_stored(run: Path | None) -> bool:
    """Whether a run that has no checkpoint in its folder has one in its store."""
    if run is None or RunFolder(run).checkpoint_times():
        return False
    try:
        address = serialization.load(RunHeader, RunFolder(run).header).checkpoint_store
    except (TuttiError, OSError):
        return False
    if address is None:
        return False
    from tutti.checkpoint.store import CheckpointStore  # loads torch

    return bool(CheckpointStore(address).complete())


def _meet(options: RunOptions) -> None:
    """Check that node 0's rendezvous port is free; on other nodes, wait until it is open."""
    if options.rendezvous is None or options.nnodes == 1:
        return
    from tutti.launch import network
    from tutti.network_interfaces import resolve

    host, port = network.split_address(options.rendezvous)
    if options.node_rank == 0:
        network.check_host_is_here(host)
        network.check_port_free(port, host)
    elif options.one_screen:  # all nodes were started at once: ranks wait for rank 0 while they load
        resolve(host)
    else:
        console.print(f"waiting for node 0 at {options.rendezvous}", style="dim")
        network.wait_for_port(host, port, options.timeout_s)


def _launch_spec(options: RunOptions, nproc: tuple[int, ...] | None) -> "LaunchSpec":
    """Create the run folder, plan if `nproc` is still open, and return what to start on this node."""
    from tutti.launch.launch_environment import threads_per_rank
    from tutti.launch.launcher import LaunchSpec
    from tutti.launch.script_path import run_folder

    resume = options.resume if isinstance(options.resume, Path) else None
    joined = joined_folder(options)
    asked = options.folder if isinstance(options.folder, Path) else None  # an address was staged before
    folder = joined or run_folder(asked, resume, options.name, options.node_rank)
    plan = plan_file(options, folder)
    if nproc is None or options.relax != "exact":
        nproc = (_planned(options, folder).world_size,)
        plan = folder / "plan.json"
    return LaunchSpec(
        target=options.script,
        arguments=options.arguments,
        is_module=options.module,
        folder=folder,
        ranks_per_node=nproc,
        node_rank=options.node_rank,
        rendezvous=options.rendezvous if options.nnodes > 1 else None,
        timeout_s=options.timeout_s,
        adaptive_timeout=options.adaptive_timeout,
        threads=threads_per_rank(_slots(options, nproc[options.node_rank])),
        environment=environment(options, plan),
    )


def _slots(options: RunOptions, nproc: int) -> int:
    """Return how many of the ranks that this node may have it has slots for."""
    if options.least_nproc is None:
        return nproc
    from tutti.launch.slots import slots_here

    return max(1, slots_here(nproc, share_device=options.share_device))


def plan_file(options: RunOptions, folder: Path) -> Path | None:
    """Return the file of the plan to follow, which is written into the run folder if the plan has none."""
    if options.plan is None or isinstance(options.plan, Path):
        return options.plan.resolve() if options.plan is not None else None
    return serialization.save(options.plan, RunFolder(folder).plan)


def cluster_file(options: RunOptions, folder: Path) -> Path | None:
    """Return the file of the cluster, which is written into the run folder if the cluster has none."""
    if options.cluster is None or isinstance(options.cluster, Path):
        return options.cluster
    return serialization.save(options.cluster, RunFolder(folder).cluster)


def _planned(options: RunOptions, folder: Path) -> "Plan":
    """Return the best plan for this script on this machine, made in another process."""
    from tutti.commands.run_prediction import Beside

    if options.module:
        raise LaunchError("tutti run cannot make a plan for a module (-m); add --nproc N, or --plan FILE")
    wanted = replace(_wanted(options, folder, None), plans=True, ranks=own_count(options) if options.nproc else None)
    worker = Beside(wanted)
    try:
        _wait_ready(worker)
        with status("planning"):
            worker.result(say=lambda words: console.print(words, markup=False, soft_wrap=True))
    finally:
        worker.stop()
    return serialization.load(Plan, RunFolder(folder).plan)


def _wanted(options: RunOptions, folder: Path, world_size: int | None) -> "PredictionRequest":
    from tutti.commands.run_prediction import PredictionRequest
    from tutti.config.mesh_axes import parse_mesh

    return PredictionRequest(
        script=Path(options.script),
        arguments=options.arguments,
        folder=folder,
        cluster=cluster_file(options, folder),
        nodes=options.nnodes,
        plan=plan_file(options, folder),
        timeout_s=options.timeout_s,
        mesh=parse_mesh(options.mesh) if options.mesh is not None else None,
        ranks=world_size,
        compress=options.compress,
        sync=options.sync,
        relax=options.relax,
    )


def _wait_ready(worker: "Beside") -> None:
    """Wait until the machine has been measured, if it never was, before anything else runs on it."""
    with status("planning") as shown:
        measured: list[str] = []

        def say(words: str) -> None:
            if not measured:
                console.print("measuring this machine, once; `tutti probe` measures it more thoroughly", style="dim")
            measured.append(words)
            if shown is not None:
                shown.update(f"measuring: {words}")

        worker.ready(say)


def _train(
    options: RunOptions, spec: "LaunchSpec", launcher: "Launcher", screen: "Screen", address: str | None
) -> Conclusion:
    from tutti.commands.run_prediction import beside
    from tutti.launch.memory_folder import memory_folder
    from tutti.launch.node_member import recovering
    from tutti.launch.restarts import fitting
    from tutti.launch.supervisor import interrupts, supervise

    def say(words: str) -> None:
        console.print(words, style="dim", markup=False, soft_wrap=True)

    policy, asked = _policy(options, spec), spec
    spec = fitting(asked, policy)
    words = _announcement(spec, on_this_host=options.launcher == "local", least_nodes=options.least_nodes)
    console.print(words, style="dim", soft_wrap=True)
    before = header_time(spec)
    watcher = screen(spec)
    # What an earlier run left in the folder stays if this one is refused.
    aside = spec.folder / ".prediction" if before is not None else spec.folder
    fits = spec.world_size == asked.world_size or (options.mesh is None and options.plan is None)
    wanted = _wanted(options, aside, spec.world_size) if fits and _to_predict(options) else None
    if wanted is not None:
        wanted = replace(wanted, nproc=spec.ranks_per_node)
        aside.mkdir(exist_ok=True)
    in_memory = memory_folder(options.memory_checkpoint_every is not None)
    with interrupts() as interrupted, beside(wanted) as worker, in_memory as variables:
        worker = _started(worker)
        stop_at_s = None if options.time_limit_s is None else time.time() + options.time_limit_s
        if stop_at_s is not None:
            variables = {**variables, "TUTTI_STOP_AT_S": repr(stop_at_s)}
        asked, spec = (replace(one, environment=one.environment | variables) for one in (asked, spec))
        numbered = options.has_number or options.least_nodes is None
        with recovering(asked, policy, interrupted, say, options.grace_s, stop_at_s, has_number=numbered) as recovery:
            outcome = supervise(
                launcher.start,
                spec,
                watcher,
                interrupted,
                grace_s=options.grace_s,
                stop_at_s=stop_at_s,
                say=say,
                recovery=recovery,
            )
        has_job = spec.node_rank > 0 or header_time(spec) != before
        if stop_at_s is not None and time.time() >= stop_at_s:  # a job that stops so does not go on by itself
            (spec.folder / STAY_STOPPED).touch()
        if worker is not None and has_job and outcome.status == "completed":
            _await_prediction(worker)
    if aside != spec.folder and aside.exists():
        for file in aside.iterdir() if has_job else ():
            file.replace(spec.folder / file.name)
        shutil.rmtree(aside, ignore_errors=True)
    is_first = spec.node_rank == 0
    return conclude(outcome.spec or spec, outcome, has_job=has_job, is_first=is_first, address=address)


def _policy(options: RunOptions, spec: "LaunchSpec") -> "RestartPolicy":
    """Return how the run goes on after failures, and with how many nodes and ranks."""
    from tutti.launch.restarts import RestartPolicy

    least = options.min_ranks
    if least is None and options.elastic:
        nodes = spec.nodes if options.least_nodes is None else options.least_nodes
        least = nodes * (options.least_nproc or spec.ranks_per_node[0])
    return RestartPolicy(
        max_restarts=options.max_restarts,
        min_ranks=least,
        on_failure=options.on_failure,
        least_nodes=options.least_nodes,
        least_nproc=options.least_nproc,
    )


def _to_predict(options: RunOptions) -> bool:
    """Return whether to predict beside the run.

    A run that was planned just now has a prediction already; machines without a description cannot be predicted, and
    ranks that share a device are not.
    """
    stated = options.nproc is not None or options.plan is not None or options.mesh is not None
    stated = stated and options.relax == "exact" and options.least_nodes is None
    wanted = options.predict and not options.module and not options.share_device
    if not (wanted and options.node_rank == 0 and stated):
        return False
    return options.cluster is not None or options.nnodes == 1 or _nodes_are_measured(options.nnodes)


def _nodes_are_measured(nnodes: int) -> bool:
    """Return whether the nodes of this Slurm job were measured together."""
    from tutti.environment import slurm_node_names

    if len(slurm_node_names()) != nnodes:
        return False
    from tutti.commands.inputs import kept_cluster

    try:
        return kept_cluster(nnodes) is not None
    except TuttiError as error:
        warn(f"no prediction: {error}")
        return False


def _started(worker: "Beside | None") -> "Beside | None":
    """Return the worker once it knows the machine; None, after a warning, if it failed."""
    if worker is None:
        return None
    try:
        _wait_ready(worker)
    except TuttiError as error:
        warn(f"no prediction: {error}")
        return None
    return worker


def _await_prediction(worker: "Beside") -> None:
    """Wait for the prediction. The report only gains from it, so a run without one is as valid."""
    try:
        worker.result(PREDICTION_WAIT_S)
    except TuttiError as error:
        warn(f"no prediction: {error}")


def _announcement(spec: "LaunchSpec", *, on_this_host: bool, least_nodes: int | None) -> str:
    from tutti.launch.launch_environment import granted_cores

    ranks = f"{spec.world_size} rank{'s' if spec.world_size > 1 else ''}"
    ranks += " that may share devices" if "TUTTI_SHARE_DEVICE" in spec.environment else ""
    place = f" on {spec.nodes} nodes, this is node {spec.node_rank}" if spec.nodes > 1 else ""
    if least_nodes is not None and spec.nodes > 1:
        ranks, place = f"up to {ranks}", f" on {least_nodes} to {spec.nodes} nodes"
    threads = f"{spec.threads} thread{'s' if spec.threads > 1 else ''} each"
    cores = granted_cores()
    if on_this_host and spec.ranks_per_node[spec.node_rank] > cores:
        threads += f" (no sooner than with {cores}: this host has {cores} core{'s' if cores > 1 else ''})"
    return f"{Path(spec.target).name}: {ranks}{place}, {threads}; run folder {short(spec.folder)}"
