"""`tutti run`: train according to a plan, on the ranks of this node. Other nodes run the same command."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tutti.cli.options import SCRIPT_CONTEXT, ScriptCommand, bucket_option, compress_option, relax_option, sync_option
from tutti.commands.messages import console
from tutti.commands.run_options import RunOptions, rank_counts
from tutti.errors import LaunchError

if TYPE_CHECKING:
    from tutti.commands.run_conclusion import Conclusion


def _counts(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    try:
        return rank_counts(text)
    except LaunchError as error:
        raise click.BadParameter(str(error)) from None


@click.command(cls=ScriptCommand, context_settings=SCRIPT_CONTEXT)
@click.option("--nproc", metavar="N[,N...]", callback=_counts, help="Ranks per node; a list for unequal nodes.")
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
    from tutti.commands.run import screen, trained

    options = RunOptions(**given)
    try:
        ended = trained(options, screen=screen(shown=True, as_json=options.as_json, progress=options.progress))
    except KeyboardInterrupt:  # before the ranks were started; from then on the supervisor handles it
        console.print("stopped")
        sys.exit(130)
    failure = ended.outcome.failure
    if not options.one_screen or failure is None or failure.first in ended.spec.ranks:
        _show(ended)
    if options.as_json:
        print(json.dumps(_document(ended), indent=2))
    sys.exit(ended.exit_code)


def _show(ended: "Conclusion") -> None:
    """Print what went wrong, or where the report is."""
    from tutti.commands.run_conclusion import short

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
        "message": ended.message,
        "failed_ranks": list(failure.ranks) if failure else [],
        "report": str(ended.page) if ended.page else None,
    }
