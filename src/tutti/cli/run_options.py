"""The command line of `tutti run`: its options, the checks that they agree, and what the ranks are told of them.

Nothing here needs a network or imports anything heavy, because ranks are not started yet.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tutti.errors import LaunchError, PlanError

if TYPE_CHECKING:
    from tutti.config.compression import Compression
    from tutti.config.plan import Plan, SyncPlan
    from tutti.config.vocabulary import Relaxation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The command line, as given."""

    target: tuple[str, ...]
    module: bool
    nproc: tuple[int, ...] | None
    nnodes: int
    node_rank: int
    rendezvous: str | None
    timeout_s: float
    launcher: str
    plan: Path | None
    mesh: str | None
    compress: "Compression | None"
    bucket_mb: str | None
    relax: "Relaxation"
    sync: "SyncPlan | None"
    cluster: Path | None
    folder: Path | None
    resume: Path | None
    checkpoint_every: int | None
    predict: bool
    frugal: bool
    profile: int | None
    progress: bool
    as_json: bool
    one_screen: bool

    @property
    def name(self) -> str:
        """The run's name: the script's or module's name without its suffix."""
        return self.script.rpartition(".")[2] if self.module else Path(self.script).stem

    @property
    def script(self) -> str:
        return self.target[0]

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.target[1:]


def rank_counts(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Parse "4" or "2,1" into numbers of ranks."""
    if text is None:
        return None
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number; give ranks per node, such as 4, or 2,1") from None
    if min(counts) < 1:
        raise click.BadParameter(f"{text}: every node needs 1 rank or more")
    return counts


def check_nodes(options: RunOptions) -> None:
    """Check that the options about nodes agree, without using the network.

    Raises:
        LaunchError: they contradict each other.
    """
    if options.node_rank >= options.nnodes:
        raise LaunchError(
            f"--node-rank {options.node_rank} is too large for --nnodes {options.nnodes}; "
            f"node ranks run from 0 to {options.nnodes - 1}"
        )
    if options.nnodes > 1 and options.rendezvous is None:
        raise LaunchError(f"--nnodes {options.nnodes} needs a rendezvous; add --rendezvous HOST:PORT (of node 0)")
    if options.nproc and len(options.nproc) not in (1, options.nnodes):
        raise LaunchError(
            f"--nproc lists {len(options.nproc)} nodes, but --nnodes is {options.nnodes}; give one number for all "
            "nodes or one for each"
        )
    if options.rendezvous is not None:
        from tutti.launch.network import split_address

        split_address(options.rendezvous)


def check_relax(options: RunOptions) -> None:
    """Check that there is something to plan if --relax lets the planner choose.

    Raises:
        LaunchError: the plan is given already, or the run needs a plan that cannot be made here.
    """
    if options.relax == "exact":
        return
    if options.plan is not None:
        raise LaunchError(
            f"--relax {options.relax} lets the planner choose, but --plan already gives the plan; leave one out"
        )
    if options.nnodes > 1 or options.resume is not None:
        raise LaunchError(
            f"--relax {options.relax} plans only for a new run on one node; make the plan first with "
            "`tutti plan --relax`, and run it with --plan"
        )


def own_count(options: RunOptions) -> int:
    """Return the number of ranks on this node if the command line has one, else 1."""
    if not options.nproc:
        return 1
    return options.nproc[options.node_rank if len(options.nproc) > 1 else 0]


def given_plan(options: RunOptions) -> "Plan | None":
    """Return the plan of --plan, with the codec and mode of the command line; None without --plan.

    Raises:
        PlanError: no model can run with this plan. It is refused before ranks are started.
    """
    if options.plan is None:
        return None
    from tutti.config import serialization
    from tutti.config.plan import Plan
    from tutti.config.refusals import check_plan
    from tutti.config.sync_notation import with_mode

    plan = with_mode(serialization.load(Plan, options.plan).compressed(options.compress), options.sync)
    check_plan(plan)
    return plan


def given_mesh(options: RunOptions) -> int | None:
    """Return the number of ranks in --mesh, or None without it."""
    if options.mesh is None:
        return None
    if options.plan is not None:
        raise LaunchError("--mesh and --plan both set the mesh; give only one (a plan file has a mesh)")
    from tutti.config.mesh_axes import parse_mesh

    return math.prod(parse_mesh(options.mesh).values())


def ranks_per_node(options: RunOptions, plan: "Plan | None", mesh: int | None) -> tuple[int, ...] | None:
    """Return the ranks of every node.

    Args:
        options: the command line, for --nproc and --nnodes.
        plan: the plan of --plan, if given.
        mesh: the number of ranks in --mesh, if given.

    Returns:
        One number for each node, or None if the planner is to choose.

    Raises:
        LaunchError: several nodes, and nothing says how many ranks each has.
        PlanError: --nproc contradicts the plan or the mesh, or their ranks do not divide evenly among the nodes.
    """
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
                f"{place}: {wanted} ranks do not divide evenly among {options.nnodes} nodes; list the "
                "ranks of each node with --nproc N,N,..."
            )
        return (wanted // options.nnodes,) * options.nnodes
    nproc = options.nproc * options.nnodes if len(options.nproc) == 1 else options.nproc
    if wanted is not None and sum(nproc) != wanted:
        raise PlanError(
            f"{place}: its mesh has {wanted} ranks, but --nproc starts {sum(nproc)}; leave --nproc out, or make the "
            "two agree"
        )
    return nproc


def environment(options: RunOptions, plan: Path | None) -> dict[str, str]:
    """Return the environment variables that pass the ranks their options.

    Args:
        options: the command line.
        plan: the plan file that ranks follow, if any.
    """
    variables: dict[str, str] = {}
    if plan is not None:
        variables["TUTTI_PLAN"] = str(plan)
    elif options.mesh is not None:
        variables["TUTTI_MESH"] = options.mesh
    if options.compress is not None:
        from tutti.config.compression import format_compression

        variables["TUTTI_COMPRESS"] = format_compression(options.compress)
    if options.sync is not None:
        from tutti.config.sync_notation import format_sync

        variables["TUTTI_SYNC"] = format_sync(options.sync)
    if options.bucket_mb is not None:
        variables["TUTTI_BUCKET_MB"] = options.bucket_mb
    if options.resume is not None:
        variables["TUTTI_RESUME"] = str(options.resume.resolve())
    if options.checkpoint_every is not None:
        variables["TUTTI_CHECKPOINT_EVERY"] = str(options.checkpoint_every)
    if options.profile is not None:
        variables["TUTTI_PROFILE"] = str(options.profile)
    if options.frugal:
        # torch reads the second one: it then allocates huge pages, which the system provides faster.
        variables |= {"TUTTI_FRUGAL": "1", "THP_MEM_ALLOC_ENABLE": "1"}
    return variables
