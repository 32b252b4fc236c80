"""`tutti run`: train according to a plan, on the ranks of this node. Other nodes run the same command."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tutti.cli.options import SCRIPT_CONTEXT, ScriptCommand, bucket_option, compress_option, relax_option, sync_option
from tutti.cli.run_options import (
    RunOptions,
    check_nodes,
    check_relax,
    environment,
    given_mesh,
    given_plan,
    own_count,
    rank_counts,
    ranks_per_node,
)
from tutti.errors import LaunchError, ScriptError, TuttiError

if TYPE_CHECKING:
    from rich.console import Console

    from tutti.cli.run_prediction import Beside, PredictionRequest
    from tutti.config.plan import Plan
    from tutti.launch.launcher import Launcher, LaunchSpec

_PLANNING = ("tutti.profile.probe", "tutti.cli.planning")
"""Modules that the fork server loads once if the run is predicted or planned."""

PREDICTION_WAIT_S = 20.0
"""Seconds that a finished run waits for its prediction, which another process computes meanwhile."""


@click.command(cls=ScriptCommand, context_settings=SCRIPT_CONTEXT)
@click.option("--nproc", metavar="N[,N...]", callback=rank_counts, help="Ranks per node; a list for unequal nodes.")
@click.option("--nnodes", type=click.IntRange(1), default=1, help="Nodes that run this command together.")
@click.option("--node-rank", type=click.IntRange(0), default=0, help="The number of this node, from 0.")
@click.option("--rendezvous", metavar="HOST:PORT", help="Where nodes meet: node 0's host and a free port there.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0.1), default=600.0, show_default=True,
              metavar="SECONDS", help="How long ranks wait for each other.")  # fmt: skip
@click.option("--on", "launcher", metavar="NAME", default="local", show_default=True, help="What starts the ranks.")
@click.option("--plan", type=click.Path(path_type=Path), help="Run exactly this plan.")
@click.option("--mesh", metavar="AXIS=N,...", help="The ranks as a grid, such as replicate=2,split=2 (or dp=2,tp=2).")
@compress_option
@sync_option
@bucket_option
@relax_option
@click.option("--cluster", type=click.Path(path_type=Path), help="The cluster, for planning and predicting.")
@click.option("--folder", type=click.Path(path_type=Path), help="The run folder; runs/NAME-TIME if not given.")
@click.option("--resume", type=click.Path(path_type=Path), help="Continue from a run folder or a checkpoint.")
@click.option(
    "--checkpoint-every", type=click.IntRange(1), metavar="STEPS", help="Save a checkpoint every STEPS steps."
)
@click.option("--predict/--no-predict", default=True, help="Predict step time and memory, for the report.")
@click.option("--frugal", is_flag=True, help="Return freed memory to the system at once: uses less, somewhat slower.")
@click.option("--profile", type=click.IntRange(1), metavar="STEPS",
              help="Profile STEPS steps after a warm-up, into the run folder's profile/.")  # fmt: skip
@click.option("--progress/--no-progress", default=True, help="Show a progress bar on a terminal.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as after `python -m`.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.option(
    "--one-screen", is_flag=True, help="Nodes share a screen and a folder: only one of them prints a failure."
)
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def command(**given: Any) -> None:
    """Train SCRIPT on several ranks, according to a plan: given with --plan, implied by --nproc, or made now."""
    options = RunOptions(**given)
    if not options.target:
        raise ScriptError("no script was named; write `tutti run train.py`, or `tutti run -m package.module`")
    sys.exit(_run(options))


def _run(options: RunOptions) -> int:
    from tutti.launch.launch_environment import threads_per_rank
    from tutti.launch.script_path import check_module, check_script

    if options.module:
        check_module(options.script)
    else:
        check_script(Path(options.script))
    check_relax(options)
    check_nodes(options)
    from tutti.launch.launcher_registry import launcher_for
    from tutti.launch.local_launcher import warm

    launcher = launcher_for(options.launcher)

    warm(
        threads_per_rank(own_count(options)),
        preload=("tutti.cli.run_prediction", *_PLANNING) if options.predict else ("tutti.cli.run_prediction",),
    )
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    try:
        nproc = ranks_per_node(options, given_plan(options), given_mesh(options))
        _meet(options, console)
        spec = _launch_spec(options, nproc, console)
        return _train(options, spec, launcher, console)
    except KeyboardInterrupt:  # before the ranks were started; from then on the supervisor handles it
        console.print("stopped")
        return 130


def _meet(options: RunOptions, console: "Console") -> None:
    """Check that node 0's rendezvous port is free; on other nodes, wait until it is open."""
    if options.rendezvous is None or options.nnodes == 1:
        return
    from tutti.launch import network

    host, port = network.split_address(options.rendezvous)
    if options.node_rank == 0:
        network.check_host_is_here(host)
        network.check_port_free(port)
    else:
        console.print(f"waiting for node 0 at {options.rendezvous}", style="dim")
        network.wait_for_port(host, port, options.timeout_s)


def _launch_spec(options: RunOptions, nproc: tuple[int, ...] | None, console: "Console") -> "LaunchSpec":
    """Create the run folder, plan if `nproc` is still open, and return what to start on this node."""
    from tutti.launch.launch_environment import threads_per_rank
    from tutti.launch.launcher import LaunchSpec
    from tutti.launch.script_path import run_folder

    folder = run_folder(options.folder, options.resume, options.name, options.node_rank)
    plan = options.plan.resolve() if options.plan is not None else None
    if nproc is None or options.relax != "exact":
        nproc = (_planned(options, folder, console).world_size,)
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
        threads=threads_per_rank(nproc[options.node_rank]),
        environment=environment(options, plan),
    )


def _planned(options: RunOptions, folder: Path, console: "Console") -> "Plan":
    """Return the best plan for this script on this machine, made in another process."""
    from tutti.cli.run_prediction import Beside
    from tutti.config import serialization
    from tutti.config.plan import Plan
    from tutti.config.run_folder import RunFolder

    if options.module:
        raise LaunchError("tutti run cannot make a plan for a module (-m); add --nproc N, or --plan FILE")
    wanted = replace(_wanted(options, folder, None), plans=True, ranks=own_count(options) if options.nproc else None)
    worker = Beside(wanted)
    try:
        _wait_ready(worker, console)
        with console.status("planning"):
            worker.result(say=lambda words: console.print(words, markup=False, soft_wrap=True))
    finally:
        worker.stop()
    return serialization.load(Plan, RunFolder(folder).plan)


def _wanted(options: RunOptions, folder: Path, world_size: int | None) -> "PredictionRequest":
    from tutti.cli.run_prediction import PredictionRequest
    from tutti.config.mesh_axes import parse_mesh

    return PredictionRequest(
        script=Path(options.script),
        arguments=options.arguments,
        folder=folder,
        cluster=options.cluster,
        plan=options.plan,
        mesh=parse_mesh(options.mesh) if options.mesh is not None else None,
        ranks=world_size,
        compress=options.compress,
        sync=options.sync,
        relax=options.relax,
    )


def _wait_ready(worker: "Beside", console: "Console") -> None:
    """Wait until the machine has been measured, if it never was, before anything else runs on it."""
    with console.status("planning") as status:
        measured: list[str] = []

        def say(words: str) -> None:
            if not measured:
                console.print("measuring this machine, once; `tutti probe` measures it more thoroughly", style="dim")
            measured.append(words)
            status.update(f"measuring: {words}")

        worker.ready(say)


def _train(options: RunOptions, spec: "LaunchSpec", launcher: "Launcher", console: "Console") -> int:
    from tutti.cli.run_conclusion import conclude, header_time
    from tutti.cli.run_prediction import beside
    from tutti.launch.rank_watch import watcher_for
    from tutti.launch.supervisor import interrupts, supervise

    console.print(_announcement(spec), style="dim", soft_wrap=True)
    before = header_time(spec)
    watcher = watcher_for(spec, stdout=sys.stderr if options.as_json else sys.stdout, console=console,
                          progress=options.progress)  # fmt: skip
    wanted = _wanted(options, spec.folder, spec.world_size) if _to_predict(options) else None
    with interrupts() as interrupted, beside(wanted) as worker:
        worker = _started(worker, console)
        outcome = supervise(
            lambda: launcher.start(spec),
            spec,
            watcher,
            interrupted,
            say=lambda words: console.print(words, style="dim"),
        )
        has_job = spec.node_rank > 0 or header_time(spec) != before
        if worker is not None and has_job and outcome.status == "completed":
            _await_prediction(worker, console)
    told_here = not options.one_screen or outcome.failure is None or outcome.failure.first in spec.ranks
    return conclude(spec, console, outcome, has_job=has_job, as_json=options.as_json, told_here=told_here)


def _to_predict(options: RunOptions) -> bool:
    """Return whether to predict beside the run.

    A run that was planned just now has a prediction already; machines without a description cannot be predicted.
    """
    described = options.cluster is not None or options.nnodes == 1
    stated = options.nproc is not None or options.plan is not None or options.mesh is not None
    stated = stated and options.relax == "exact"
    wanted = options.predict and not options.module
    return wanted and options.node_rank == 0 and stated and described


def _started(worker: "Beside | None", console: "Console") -> "Beside | None":
    """Return the worker once it knows the machine; None, after a warning, if it failed."""
    if worker is None:
        return None
    try:
        _wait_ready(worker, console)
    except TuttiError as error:
        console.print(f"no prediction: {error}", style="yellow", markup=False, soft_wrap=True)
        return None
    return worker


def _await_prediction(worker: "Beside", console: "Console") -> None:
    """Wait for the prediction. The report only gains from it, so a run without one is as valid."""
    try:
        worker.result(PREDICTION_WAIT_S)
    except TuttiError as error:
        console.print(f"no prediction: {error}", style="yellow", markup=False, soft_wrap=True)


def _announcement(spec: "LaunchSpec") -> str:
    from tutti.cli.run_conclusion import short

    ranks = f"{spec.world_size} rank{'s' if spec.world_size > 1 else ''}"
    place = f" on {spec.nodes} nodes, this is node {spec.node_rank}" if spec.nodes > 1 else ""
    threads = f"{spec.threads} thread{'s' if spec.threads > 1 else ''} each"
    return f"{Path(spec.target).name}: {ranks}{place}, {threads}; run folder {short(spec.folder)}"
