"""`tutti calibrate RUN...`: fits a cluster's constants to the step times of past runs."""

from pathlib import Path

import click

from tutti.cli.options import LocalPath, emit, json_option
from tutti.commands.calibrate import calibrated
from tutti.commands.inputs import write_spec
from tutti.commands.messages import console

DISAGREE = 0.5
"""Mean error after the fit above which the runs are said to contradict each other."""


@click.command()
@click.argument("runs", nargs=-1, required=True, type=LocalPath(path_type=Path), metavar="RUN...")
@click.option("--cluster", type=LocalPath(path_type=Path), help="The cluster to correct; the runs' own if not given.")
@click.option("--output", type=LocalPath(path_type=Path, dir_okay=False), help="Write the new ClusterSpec here.")
@json_option
def command(runs: tuple[Path, ...], cluster: Path | None, output: Path | None, as_json: bool) -> None:
    """Fit a cluster's constants to the steps of past runs: rates of products and memory, cost of a call, links.

    RUN is a folder that tutti run made, or a folder of such folders. The old cluster file is not changed. The new one
    records which runs it was fitted to, when, and with which versions of torch and tutti: it is only as good as those.
    """
    fitted, fit = calibrated(runs, cluster)
    if output is not None:
        write_spec(fitted, output)
    if as_json:
        emit(fitted)
    if fit.after > DISAGREE:
        console.print(
            f"the runs contradict each other: the mean error after the fit is still {fit.after:.0%}; leave out runs "
            "that other programs disturbed, or measure again on a quiet machine",
            style="yellow",
            soft_wrap=True,
        )
    if not as_json:
        console.print(
            f"{fit.rows} runs: mean error of the predicted step {fit.before:.1%} before the fit, {fit.after:.1%} after",
            soft_wrap=True,
        )
        if output is not None:
            console.print(f"cluster written to {output}: use it with --cluster {output}", soft_wrap=True)
