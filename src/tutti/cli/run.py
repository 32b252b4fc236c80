"""`tutti run`: train by a plan, on the ranks of this node (and, told the same way, of others)."""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tutti.cli.options import SCRIPT_CONTEXT, bucket_option, compress_option, relax_option, sync_option
from tutti.errors import LaunchError, PlanError, ScriptError, TuttiError

if TYPE_CHECKING:
    from rich.console import Console

    from tutti.cli.beside import Beside, Wanted
    from tutti.launch.base import LaunchSpec
    from tutti.spec.compression import Compression
    from tutti.spec.plan import Plan, Sync
    from tutti.spec.words import Relax

_PLANNING = ("tutti.describe.probe", "tutti.cli.planning")
"""Loaded once, in the fork server, where a run is predicted or planned."""

PREDICTION_WAIT_S = 20.0
"""How long a finished run waits for its prediction, which was computed beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, as given."""

    target: tuple[str, ...]
    module: bool
    nproc: tuple[int, ...] | None
    nnodes: int
    node_rank: int
    rendezvous: str | None
    timeout_s: float
    plan: Path | None
    mesh: str | None
    compress: "Compression | None"
    bucket_mb: str | None
    relax: "Relax"
    sync: "Sync | None"
    cluster: Path | None
    folder: Path | None
    resume: Path | None
    checkpoint_every: int | None
    predict: bool
    frugal: bool
    as_json: bool

    @property
    def name(self) -> str:
        """What the run is called: the script's or module's name without its ending."""
        return self.script.rpartition(".")[2] if self.module else Path(self.script).stem

    @property
    def script(self) -> str:
        return self.target[0]

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.target[1:]


def _counts(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """ "4" or "2,1" as numbers."""
    if text is None:
        return None
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number; give ranks per node, such as 4, or 2,1") from None
    if min(counts) < 1:
        raise click.BadParameter(f"{text}: every node has 1 rank or more")
    return counts


@click.command(context_settings=SCRIPT_CONTEXT)
@click.option("--nproc", metavar="N[,N...]", callback=_counts, help="Ranks per node; a list for unequal nodes.")
@click.option("--nnodes", type=click.IntRange(1), default=1, help="Nodes that run this command together.")
@click.option("--node-rank", type=click.IntRange(0), default=0, help="Which of them this one is.")
@click.option("--rendezvous", metavar="HOST:PORT", help="Where nodes meet: a free port of node 0.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0.1), default=600.0, show_default=True,
              metavar="SECONDS", help="How long ranks wait for each other.")  # fmt: skip
@click.option("--plan", type=click.Path(path_type=Path), help="Run exactly this plan.")
@click.option("--mesh", metavar="AXIS=N,...", help="The ranks as a grid, such as replicate=2,split=2.")
@compress_option
@sync_option
@bucket_option
@relax_option
@click.option("--cluster", type=click.Path(path_type=Path), help="The machines, for planning and predicting.")
@click.option("--folder", type=click.Path(path_type=Path), help="The run folder; runs/NAME-TIME if not given.")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on from a run folder or a checkpoint.")
@click.option("--checkpoint-every", type=click.IntRange(1), metavar="STEPS", help="Save a checkpoint every so often.")
@click.option("--predict/--no-predict", default=True, help="Predict step time and memory, for the report.")
@click.option("--frugal", is_flag=True, help="Give freed memory back at once: less of it, at some speed.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as after `python -m`.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def command(**given: Any) -> None:
    """Train SCRIPT on several ranks, by a plan: given, implied by --nproc, or made on the spot."""
    options = Options(**given)
    if not options.target:
        raise ScriptError("no script was named; write `tutti run train.py`, or `tutti run -m package.module`")
    sys.exit(_run(options))


def _run(options: Options) -> int:
    from tutti.launch.host import threads_per_rank
    from tutti.launch.script import check_module, check_script

    if options.module:
        check_module(options.script)
    else:
        check_script(Path(options.script))
    _check_relax(options)
    _check_nodes(options)
    from tutti.launch.local import warm

    warm(
        threads_per_rank(_own_count(options)),
        preload=("tutti.cli.beside", *_PLANNING) if options.predict else ("tutti.cli.beside",),
    )
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    try:
        nproc = _ranks_per_node(options, _given_plan(options), _given_mesh(options))
        _meet(options, console)
        spec = _launch_spec(options, nproc, console)
        return _train(options, spec, console)
    except KeyboardInterrupt:  # before the ranks were started; from then on it is the supervisor's
        console.print("stopped")
        return 130


def _check_nodes(options: Options) -> None:
    """Raises LaunchError where the words about nodes contradict each other; needs no network."""
    if options.node_rank >= options.nnodes:
        raise LaunchError(
            f"--node-rank {options.node_rank} of --nnodes {options.nnodes}; "
            f"node ranks run from 0 to {options.nnodes - 1}"
        )
    if options.nnodes > 1 and options.rendezvous is None:
        raise LaunchError(f"--nnodes {options.nnodes} needs a place to meet; add --rendezvous HOST:PORT (of node 0)")
    if options.nproc and len(options.nproc) not in (1, options.nnodes):
        raise LaunchError(
            f"--nproc lists {len(options.nproc)} nodes, but --nnodes is {options.nnodes}; give one number for all "
            "nodes or one for each"
        )
    if options.rendezvous is not None:
        from tutti.launch.network import split_address

        split_address(options.rendezvous)


def _own_count(options: Options) -> int:
    """Ranks on this node if the command line tells, else 1."""
    if not options.nproc:
        return 1
    return options.nproc[options.node_rank if len(options.nproc) > 1 else 0]


def _meet(options: Options, console: "Console") -> None:
    """With several nodes: node 0's port must be free, and the others wait until it is open."""
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


def _launch_spec(options: Options, nproc: tuple[int, ...] | None, console: "Console") -> "LaunchSpec":
    """Settle the run folder and, where `nproc` is still open, plan."""
    from tutti.launch.base import LaunchSpec
    from tutti.launch.host import threads_per_rank
    from tutti.launch.script import run_folder

    folder = run_folder(options.folder, options.resume, options.name, options.node_rank)
    environment: dict[str, str] = {}
    if nproc is None or options.relax != "exact":
        nproc = (_planned(options, folder, console).world_size,)
        environment["TUTTI_PLAN"] = str(folder / "plan.json")
    elif options.plan is not None:
        environment["TUTTI_PLAN"] = str(options.plan.resolve())
    if options.mesh is not None and "TUTTI_PLAN" not in environment:
        environment["TUTTI_MESH"] = options.mesh
    if options.compress is not None:
        from tutti.spec.compression import compression_in_words

        environment["TUTTI_COMPRESS"] = compression_in_words(options.compress)
    if options.sync is not None:
        from tutti.spec.sync_words import sync_in_words

        environment["TUTTI_SYNC"] = sync_in_words(options.sync)
    environment |= {"TUTTI_BUCKET_MB": options.bucket_mb} if options.bucket_mb is not None else {}
    if options.resume is not None:
        environment["TUTTI_RESUME"] = str(options.resume.resolve())
    if options.checkpoint_every is not None:
        environment["TUTTI_CHECKPOINT_EVERY"] = str(options.checkpoint_every)
    if options.frugal:
        environment |= {"TUTTI_FRUGAL": "1", "THP_MEM_ALLOC_ENABLE": "1"}  # torch's: huge pages, quicker to get
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
        environment=environment,
    )


def _planned(options: Options, folder: Path, console: "Console") -> "Plan":
    """The best plan for this script on this machine, made in a process beside this one."""
    from tutti.cli.beside import Beside
    from tutti.spec import codec
    from tutti.spec.plan import Plan
    from tutti.spec.run import RunFolder

    if options.module:
        raise LaunchError("a module cannot be planned for on the spot; add --nproc N, or --plan FILE")
    wanted = replace(_wanted(options, folder, None), plans=True, ranks=_own_count(options) if options.nproc else None)
    worker = Beside(wanted)
    try:
        _wait_ready(worker, console)
        with console.status("planning"):
            worker.result(say=lambda words: console.print(words, markup=False, soft_wrap=True))
    finally:
        worker.stop()
    return codec.load(Plan, RunFolder(folder).plan)


def _wanted(options: Options, folder: Path, world_size: int | None) -> "Wanted":
    from tutti.cli.beside import Wanted
    from tutti.spec.mesh_words import parse_mesh

    return Wanted(
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
    """Let the machine be measured, if it never was, before anything else runs on it."""
    with console.status("planning") as status:
        said: list[str] = []

        def say(words: str) -> None:
            if not said:
                console.print("measuring this machine, once; `tutti probe` measures it longer", style="dim")
            said.append(words)
            status.update(f"measuring: {words}")

        worker.ready(say)


def _given_plan(options: Options) -> "Plan | None":
    if options.plan is None:
        return None
    from tutti.spec import codec
    from tutti.spec.plan import Plan

    return codec.load(Plan, options.plan)


def _given_mesh(options: Options) -> int | None:
    """Ranks of the mesh that --mesh says, None without it."""
    if options.mesh is None:
        return None
    if options.plan is not None:
        raise LaunchError("--mesh and --plan both say how ranks are arranged; give one (a plan file has a mesh)")
    from tutti.spec.mesh_words import parse_mesh

    return math.prod(parse_mesh(options.mesh).values())


def _ranks_per_node(options: Options, plan: "Plan | None", mesh: int | None) -> tuple[int, ...] | None:
    """Ranks of every node, from --nproc, the plan or the mesh; None when they are to be planned."""
    wanted = plan.world_size if plan is not None else mesh
    place = str(options.plan) if plan is not None else f"--mesh {options.mesh}"
    if options.nproc is None:
        if wanted is None and options.nnodes == 1:
            return None
        if wanted is None:
            raise LaunchError(
                f"--nnodes {options.nnodes} needs the ranks per node; add --nproc N (or N,N,... per node)"
            )
        if wanted % options.nnodes:
            raise PlanError(
                f"{place}: {wanted} ranks do not share evenly among {options.nnodes} nodes; list the "
                "ranks of each node with --nproc N,N,..."
            )
        return (wanted // options.nnodes,) * options.nnodes
    nproc = options.nproc * options.nnodes if len(options.nproc) == 1 else options.nproc
    if wanted is not None and sum(nproc) != wanted:
        raise PlanError(
            f"{place}: its mesh has {wanted} ranks, but --nproc starts {sum(nproc)}; leave --nproc out, or make them "
            "agree"
        )
    return nproc


def _train(options: Options, spec: "LaunchSpec", console: "Console") -> int:
    from tutti.cli.beside import beside
    from tutti.cli.conclusion import conclude, header_time
    from tutti.launch.local import LocalLauncher
    from tutti.launch.supervise import interrupts, supervise
    from tutti.launch.watch import watcher_for

    console.print(_announcement(spec), style="dim", soft_wrap=True)
    before = header_time(spec)
    watcher = watcher_for(spec, stdout=sys.stderr if options.as_json else sys.stdout, console=console)
    wanted = _wanted(options, spec.folder, spec.world_size) if _to_predict(options) else None
    with interrupts() as interrupted, beside(wanted) as worker:
        worker = _started(worker, console)
        outcome = supervise(
            lambda: LocalLauncher().start(spec),
            spec,
            watcher,
            interrupted,
            say=lambda words: console.print(words, style="dim"),
        )
        has_job = spec.node_rank > 0 or header_time(spec) != before
        if worker is not None and has_job and outcome.status == "completed":
            _await_prediction(worker, console)
    return conclude(spec, console, outcome, has_job=has_job, as_json=options.as_json)


def _check_relax(options: Options) -> None:
    """Raises LaunchError where the dial is open and nothing is left to plan here."""
    if options.relax == "exact":
        return
    if options.plan is not None:
        raise LaunchError(f"--relax {options.relax} lets the planner choose, and --plan says the plan; leave one out")
    if options.nnodes > 1 or options.resume is not None:
        raise LaunchError(
            f"--relax {options.relax} plans on the spot, for this node alone and for a new run; make the plan first "
            "with `tutti plan --relax`, and run it with --plan"
        )


def _to_predict(options: Options) -> bool:
    """Whether to predict beside the run: not what was planned just now, or what runs on machines that nobody
    described."""
    described = options.cluster is not None or options.nnodes == 1
    stated = options.nproc is not None or options.plan is not None or options.mesh is not None
    stated = stated and options.relax == "exact"
    wanted = options.predict and not options.module
    return wanted and options.node_rank == 0 and stated and described


def _started(worker: "Beside | None", console: "Console") -> "Beside | None":
    """The worker once it knows the machine; None, and a remark, if it failed to."""
    if worker is None:
        return None
    try:
        _wait_ready(worker, console)
    except TuttiError as error:
        console.print(f"no prediction: {error}", style="yellow", markup=False, soft_wrap=True)
        return None
    return worker


def _await_prediction(worker: "Beside", console: "Console") -> None:
    """A prediction is a help for the report: without it the run is as good."""
    try:
        worker.result(PREDICTION_WAIT_S)
    except TuttiError as error:
        console.print(f"no prediction: {error}", style="yellow", markup=False, soft_wrap=True)


def _announcement(spec: "LaunchSpec") -> str:
    from tutti.cli.conclusion import short

    ranks = f"{spec.world_size} rank{'s' if spec.world_size > 1 else ''}"
    place = f" on {spec.nodes} nodes, this is node {spec.node_rank}" if spec.nodes > 1 else ""
    threads = f"{spec.threads} thread{'s' if spec.threads > 1 else ''} each"
    return f"{Path(spec.target).name}: {ranks}{place}, {threads}; run folder {short(spec.folder)}"
