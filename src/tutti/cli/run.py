"""`tutti run`: train according to a plan, on the ranks of this node. Other nodes run the same command."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tutti.cli.options import (
    GIVEN,
    PLACE,
    SCRIPT_CONTEXT,
    ScriptCommand,
    bucket_option,
    compress_option,
    hosts_option,
    nnodes_option,
    relax_option,
    request_option,
    shard_option,
    share_option,
    sync_option,
)
from tutti.cli.submit import default_launcher, submitted_and_followed
from tutti.clusters.schedulers import is_scheduler
from tutti.commands.messages import console, guarded_streams
from tutti.commands.run_options import TIMEOUT_S, duration_s, options_from
from tutti.config.count_range import CountRange, rank_counts
from tutti.errors import LaunchError

if TYPE_CHECKING:
    from tutti.commands.run_conclusion import Conclusion
    from tutti.launch.failure import Failure


def _counts(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[int, ...] | CountRange | None:
    try:
        return rank_counts(text)
    except LaunchError as error:
        raise click.BadParameter(str(error)) from None


def _duration(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    try:
        return duration_s(text) if text is not None else None
    except LaunchError as error:
        raise click.BadParameter(str(error)) from None


@click.command(cls=ScriptCommand, context_settings=SCRIPT_CONTEXT)
@click.option("--nproc", metavar="N[,N...]|MIN:MAX", callback=_counts,
              help="Ranks per node; a list for unequal nodes; a range for one on each GPU, or core.")  # fmt: skip
@nnodes_option
@click.option("--node-rank", type=click.IntRange(0),
              help="The number of this node, from 0; with a range of nodes the next that is free.")  # fmt: skip
@click.option("--rendezvous", metavar="HOST:PORT", help="Where nodes meet: node 0's host and a free port there.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0.1), metavar="SECONDS",
              help="How long ranks wait for each other; if not given 600, less if none does anything.")  # fmt: skip
@click.option(
    "--on",
    "launcher",
    metavar="NAME",
    help="What starts the ranks: local, or slurm, ssh, mpi, kubernetes or ray (see `tutti submit`).",
)
@request_option
@hosts_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="With --on slurm, ssh, mpi, kubernetes or ray: show what would run, and start nothing.",
)
@click.option("--plan", type=click.Path(path_type=Path), help="Run exactly this plan.")
@click.option("--mesh", metavar="AXIS=N,...", help="The ranks as a grid, such as replicate=2,split=2 (or dp=2,tp=2).")
@compress_option
@sync_option
@bucket_option
@shard_option
@relax_option
@click.option("--cluster", type=click.Path(path_type=Path), help="The cluster, for planning and predicting.")
@click.option("--folder", type=PLACE, metavar="FOLDER|URL", help="The run folder; runs/NAME-TIME if not given.")
@click.option("--resume", type=PLACE, metavar="RUN|URL", help="Continue from a run folder, a checkpoint, or a store.")
@click.option("--checkpoint-store", metavar="URL",
              help="Upload checkpoints to an object store, such as s3://bucket/prefix.")  # fmt: skip
@click.option(
    "--checkpoint-every", type=click.IntRange(1), metavar="STEPS", help="Save a checkpoint every STEPS steps."
)
@click.option("--memory-checkpoint-every", type=click.IntRange(1), metavar="STEPS",
              help="Save one in the nodes' memory every STEPS steps, for restarts (--max-restarts).")  # fmt: skip
@click.option("--predict/--no-predict", default=True, help="Predict step time and memory, for the report.")
@click.option("--frugal", is_flag=True, help="Return freed memory to the system at once: uses less, somewhat slower.")
@click.option("--profile", type=click.IntRange(1), metavar="STEPS",
              help="Profile STEPS steps after a warm-up, into the run folder's profile/.")  # fmt: skip
@share_option
@click.option("--bind-cores", type=click.Choice(["auto", "none"]), default="auto", show_default=True,
              help="Bind each rank to the cores near its GPU, or spread ranks over NUMA nodes.")  # fmt: skip
@click.option("--max-restarts", type=click.IntRange(0), default=0, show_default=True, metavar="N",
              help="Start the ranks again up to N times after a failure, from the newest checkpoint.")  # fmt: skip
@click.option("--on-failure", type=click.Choice(["replace", "shrink"]), default="replace", show_default=True,
              help="Replace a rank that failed, or go on without it.")  # fmt: skip
@click.option("--recover", type=click.Choice(["memory", "checkpoint"]), default="memory", show_default=True,
              help="After a failure, go on from what other ranks have in memory, or from a checkpoint.")  # fmt: skip
@click.option("--min-ranks", type=click.IntRange(1), metavar="M",
              help="Go on with fewer ranks, down to M, where one cannot be started again.")  # fmt: skip
@click.option("--on-slow-rank", type=click.Choice(["warn", "rebalance"]), default="warn", show_default=True,
              help="Name a rank that is slower than the others, or lower its share of the batch, too.")  # fmt: skip
@click.option("--grace", "grace_s", type=click.FloatRange(min=0.1), default=30.0, show_default=True, metavar="SECONDS",
              help="How long ranks have to save a checkpoint when the run is stopped.")  # fmt: skip
@click.option("--time-limit", "time_limit_s", metavar="DURATION", callback=_duration,
              help="Save a checkpoint and stop after this time, such as 90s or 2h30m.")  # fmt: skip
@click.option("--progress/--no-progress", default=True, help="Show a progress bar on a terminal.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as after `python -m`.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.option(
    "--one-screen", is_flag=True, help="Nodes share a screen and a folder: only one of them prints a failure."
)
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def command(**given: Any) -> None:
    """Train SCRIPT on several ranks, according to a plan: given with --plan, implied by --nproc, or made now."""
    hosts, dry_run = given.pop("hosts"), given.pop("dry_run")
    on = given.pop("launcher") or default_launcher(hosts)
    if is_scheduler(on):
        sys.exit(submitted_and_followed(click.get_current_context().meta[GIVEN]))
    from tutti.commands.run import screen, trained  # which a submission does not wait for

    if hosts is not None or dry_run:
        name = "--hosts" if hosts is not None else "--dry-run"
        raise LaunchError(f"{name} is for other hosts, and --on is {on}; leave it out, or add --on ssh")
    if given.pop("requests"):
        raise LaunchError(f"--request is for a cluster's scheduler, and --on is {on}; leave it out, or add --on slurm")
    stated = given.pop("timeout_s")
    timeout_s = TIMEOUT_S if stated is None else stated
    options = options_from(timeout_s=timeout_s, adaptive_timeout=stated is None, launcher=on, **given)
    with guarded_streams():
        try:
            ended = trained(options, screen=screen(shown=True, as_json=options.as_json, progress=options.progress))
        except KeyboardInterrupt:  # before the ranks were started; from then on the supervisor handles it
            console.print("stopped")
            sys.exit(130)
        failure = ended.outcome.failure
        if not options.one_screen or failure is None or _prints_failure(ended, failure):
            _show(ended)
        if options.as_json:
            print(json.dumps(_document(ended), indent=2))
    sys.exit(ended.exit_code)


def _prints_failure(ended: "Conclusion", failure: "Failure") -> bool:
    """Whether this node prints the failure; with --one-screen only one node does."""
    from tutti.launch.failure import LOST_NODE

    lost = failure.error == LOST_NODE and (
        ended.is_first or failure.first == 0
    )  # if node 0 is lost, every node prints it
    return lost or failure.first in ended.spec.ranks


def _show(ended: "Conclusion") -> None:
    """Print what went wrong, or where the report is."""
    from tutti.commands.messages import short

    if ended.message is not None:
        style = "red" if ended.outcome.status == "failed" else None
        console.print(ended.message, markup=False, soft_wrap=True, style=style)
    elif ended.page is not None:
        console.print(f"report: {short(ended.page)}", soft_wrap=True, markup=False)


def _document(ended: "Conclusion") -> dict[str, Any]:
    outcome, failure = ended.outcome, ended.outcome.failure
    return {
        "status": outcome.status if ended.exit_code == outcome.exit_code else "failed",
        "exit_code": ended.exit_code,
        "folder": str(ended.spec.folder),
        "world_size": ended.spec.world_size,
        "restarts": outcome.restarts,
        "resumable": outcome.resumable,
        "message": ended.message,
        "failed_ranks": list(failure.ranks) if failure else [],
        "report": str(ended.page) if ended.page else None,
    }
