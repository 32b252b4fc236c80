"""The options of `tutti run`: the checks that they agree, and what the ranks are told of them.

Nothing here needs a network or imports anything heavy, because ranks are not started yet.
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.config.count_range import CountRange
from tutti.config.run_folder import RunFolder
from tutti.errors import LaunchError, PlanError

if TYPE_CHECKING:
    from tutti.config.cluster import ClusterSpec
    from tutti.config.compression import Compression
    from tutti.config.plan import Plan, SyncPlan
    from tutti.config.vocabulary import OnSlowRank, Relaxation
    from tutti.launch.restarts import OnFailure, Recover


TIMEOUT_S = 600.0
"""Seconds that ranks wait for each other, unless the user states another time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `tutti run` is asked for; `tutti.run` says what each option means.

    Attributes:
        least_nproc: fewest ranks of a node, where `nproc` is the most; None if their number is fixed.
        least_nodes: fewest nodes, where `nnodes` is the most; None if their number is fixed.
        has_number: whether somebody has numbered this node; in a range of nodes it else takes the next free number.
    """

    target: tuple[str, ...]
    module: bool = False
    nproc: tuple[int, ...] | None = None
    least_nproc: int | None = None
    nnodes: int = 1
    least_nodes: int | None = None
    node_rank: int = 0
    has_number: bool = False
    rendezvous: str | None = None
    timeout_s: float = TIMEOUT_S
    adaptive_timeout: bool = False
    launcher: str = "local"
    plan: "Path | Plan | None" = None
    mesh: str | None = None
    compress: "Compression | None" = None
    bucket_mb: str | None = None
    shard: str | None = None
    relax: "Relaxation" = "exact"
    sync: "SyncPlan | None" = None
    cluster: "Path | ClusterSpec | None" = None
    folder: Path | str | None = None
    resume: Path | str | None = None
    checkpoint_store: str | None = None
    checkpoint_every: int | None = None
    memory_checkpoint_every: int | None = None
    predict: bool = True
    frugal: bool = False
    profile: int | None = None
    share_device: bool = False
    bind_cores: str = "auto"
    max_restarts: int = 0
    min_ranks: int | None = None
    on_failure: "OnFailure" = "replace"
    recover: "Recover" = "memory"
    on_slow_rank: "OnSlowRank" = "warn"
    grace_s: float = 30.0
    time_limit_s: float | None = None
    progress: bool = True
    as_json: bool = False
    one_screen: bool = False

    @property
    def elastic(self) -> bool:
        """Whether the numbers of nodes or ranks may change while the run goes on."""
        return self.least_nodes is not None or self.least_nproc is not None

    @property
    def nodes(self) -> str:
        """The number of nodes as --nnodes has it."""
        return str(self.nnodes) if self.least_nodes is None else f"{self.least_nodes}:{self.nnodes}"

    @property
    def goes_on(self) -> bool:
        """Whether the run may go on after failures, or with other numbers of nodes."""
        return self.max_restarts > 0 or self.elastic

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


def options_from(
    *,
    nproc: tuple[int, ...] | CountRange | None = None,
    nnodes: int | CountRange | None = None,
    node_rank: int | None = None,
    **given: Any,
) -> RunOptions:
    """Return the options, of which the numbers of ranks and nodes may be ranges.

    Args:
        nproc: ranks per node.
        nnodes: number of nodes; None for 1.
        node_rank: the number of this node; None if it has none yet.
        given: the other options, as RunOptions has them.
    """
    options = RunOptions(node_rank=node_rank or 0, has_number=node_rank is not None, **given)
    if isinstance(nproc, CountRange):
        options = replace(options, nproc=(nproc.most,), least_nproc=nproc.least)
    else:
        options = replace(options, nproc=nproc)
    if isinstance(nnodes, CountRange):
        return replace(options, nnodes=nnodes.most, least_nodes=nnodes.least)
    return replace(options, nnodes=nnodes or 1)


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
        raise LaunchError(f"--nnodes {options.nodes} needs a rendezvous; add --rendezvous HOST:PORT (of node 0)")
    if options.least_nodes is not None and options.nproc and len(options.nproc) > 1:
        raise LaunchError("a range of nodes needs the same number of ranks on each; give --nproc one number or a range")
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


def check_restarts(options: RunOptions) -> None:
    """Check that the options about restarts agree.

    Raises:
        LaunchError: they contradict each other, or several nodes have no common folder.
    """
    if options.elastic and options.launcher != "local":
        raise LaunchError(
            f"a range of nodes or ranks needs the launcher local, and --on is {options.launcher}; give one number"
        )
    if not options.goes_on and (options.min_ranks is not None or options.on_failure != "replace"):
        name = "--min-ranks" if options.min_ranks is not None else "--on-failure"
        raise LaunchError(f"{name} says how a run goes on after a failure; allow it to with --max-restarts N")
    if options.memory_checkpoint_every is not None:
        if not options.goes_on:
            raise LaunchError(
                "--memory-checkpoint-every keeps checkpoints in memory for ranks that are started again; allow that "
                "with --max-restarts N"
            )
        if options.launcher != "local":
            raise LaunchError(
                "--memory-checkpoint-every needs the launcher local, whose ranks share the memory of its node; leave "
                f"it out, or --on {options.launcher}"
            )
    if options.goes_on and options.nnodes > 1 and _shared_folder(options) is None:
        several = "" if options.elastic else "--max-restarts with "
        several += f"--nnodes {options.nodes}"
        raise LaunchError(
            f"{several} goes on from checkpoints in a run folder that all nodes see; name it with --folder"
        )
    if options.max_restarts and options.nnodes > 1 and options.launcher != "local":
        raise LaunchError(
            f"--max-restarts with --nnodes {options.nnodes} needs the launcher local, which watches the ranks of its "
            f"node; leave out --max-restarts, or --on {options.launcher}"
        )


def _shared_folder(options: RunOptions) -> Path | None:
    """Return the run folder that the command names, if it does."""
    if isinstance(options.folder, Path):
        return options.folder
    resumed = options.resume
    return resumed if isinstance(resumed, Path) and RunFolder(resumed).header.exists() else None


def joined_folder(options: RunOptions) -> Path | None:
    """Return the run folder of node 0, in which this node only takes part: None where it has one of its own."""
    if options.node_rank == 0 or not options.goes_on:
        return None
    folder = _shared_folder(options)
    return None if folder is None else folder.resolve()


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(value: "str | float") -> float:
    """Return the seconds of 90, "90", "90s", "45m", "2h30m" or "1d".

    Raises:
        LaunchError: it is something else, or not above 0.

    Examples:
        >>> duration_s("2h30m")
        9000.0
    """
    text = str(value).strip().lower().replace(" ", "")
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", text)
    seconds = (
        sum(float(part or 0) * _UNITS_S[unit] for part, unit in zip(match.groups(), "dhms", strict=True))
        if match
        else 0
    )
    if not 0 < seconds < math.inf:
        raise LaunchError(f"{str(value)!r} is no duration above 0; write seconds, or such as 90s, 45m or 2h30m")
    return seconds


def placed_here(options: RunOptions) -> RunOptions:
    """Return the options with this node's number: node 0 is on the host of --rendezvous, others are numbered later.

    Raises:
        LaunchError: the host of the rendezvous is not known.
    """
    if options.has_number or options.rendezvous is None or options.least_nodes is None:
        return options
    from tutti.launch import network

    host, port = network.split_address(options.rendezvous)
    is_first = network.is_here(host) and network.is_port_free(port, host)
    return replace(options, node_rank=0 if is_first else 1)


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
    from tutti.config.shard_engine import with_sharding
    from tutti.config.sync_notation import with_mode

    given = options.plan if isinstance(options.plan, Plan) else serialization.load(Plan, options.plan)
    plan = with_sharding(with_mode(given.compressed(options.compress), options.sync), options.shard)
    check_plan(plan)
    return plan


def plan_place(options: RunOptions) -> str:
    """Return how messages name the plan."""
    return str(options.plan) if isinstance(options.plan, Path) else "the plan"


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
    place = plan_place(options) if plan is not None else f"--mesh {options.mesh}"
    if options.nproc is None:
        if wanted is None and options.nnodes == 1:
            return None
        if wanted is None:
            raise LaunchError(f"--nnodes {options.nodes} needs the ranks per node; add --nproc N (or N,N,... per node)")
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
    if options.shard is not None:
        variables["TUTTI_SHARD"] = options.shard
    if options.resume is not None:
        place = options.resume
        variables["TUTTI_RESUME"] = str(place.resolve()) if isinstance(place, Path) else place
    if options.checkpoint_store is not None:
        variables["TUTTI_CHECKPOINT_STORE"] = options.checkpoint_store
    if options.checkpoint_every is not None:
        variables["TUTTI_CHECKPOINT_EVERY"] = str(options.checkpoint_every)
    if options.memory_checkpoint_every is not None:
        variables["TUTTI_MEMORY_CHECKPOINT_EVERY"] = str(options.memory_checkpoint_every)
    if options.profile is not None:
        variables["TUTTI_PROFILE"] = str(options.profile)
    if options.max_restarts and options.recover == "memory" and options.launcher == "local" and options.nnodes == 1:
        variables["TUTTI_RECOVER"] = "memory"
    if options.on_slow_rank != "warn":
        variables["TUTTI_ON_SLOW_RANK"] = options.on_slow_rank
    given = given_plan(options)
    if options.share_device or (given is not None and given.share_device):
        variables["TUTTI_SHARE_DEVICE"] = "1"
    if options.bind_cores == "auto":
        from tutti.launch.launch_environment import stated_threads

        variables["TUTTI_BIND_CORES"] = "auto"
        if stated_threads() is not None:
            variables["TUTTI_THREADS_STATED"] = "1"
    if options.frugal:
        # torch reads the second one: it then allocates huge pages, which the system provides faster.
        variables |= {"TUTTI_FRUGAL": "1", "THP_MEM_ALLOC_ENABLE": "1"}
    return variables
