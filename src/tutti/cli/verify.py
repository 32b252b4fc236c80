"""`tutti verify`: compares N ranks with one device and names the first difference."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tutti.cli.options import (
    SCRIPT_CONTEXT,
    ScriptCommand,
    compress_option,
    emit,
    json_option,
    script_arguments,
    shard_option,
    share_option,
)
from tutti.commands.verify import VerifyOptions, verdict_of

if TYPE_CHECKING:
    from tutti.config.verdict import Verdict

NOT_COMPARABLE = 3
"""Exit code of a verification that found no fault, but could not compare everything."""


@click.command(cls=ScriptCommand, context_settings=SCRIPT_CONTEXT)
@click.option(
    "--nproc", type=click.IntRange(1), metavar="N", help="Ranks to compare with one device; 2 if nothing sets them."
)
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Steps to compare; 3 if nothing is said.")
@click.option(
    "--epochs", type=click.IntRange(1), metavar="N",
    help="Compare all steps of N epochs instead, and evaluations. Every step is saved on disk meanwhile.",
)  # fmt: skip
@click.option(
    "--resume-at", type=click.IntRange(1), metavar="N",
    help="Compare N steps; then resume the ranks from their checkpoint of step N, and compare as many as --steps says.",
)  # fmt: skip
@click.option("--plan", type=click.Path(path_type=Path), help="Verify this plan: its ranks, microbatches and shares.")
@click.option("--mesh", metavar="AXIS=N,...", help="Verify ranks in this grid, such as dp=2,tp=2.")
@compress_option
@shard_option
@click.option(
    "--arithmetic",
    type=click.Choice(["auto", "double", "script"]),
    default="auto",
    show_default=True,
    help="double: float64 throughout; script: the script's own dtypes; auto: float64 if the script can.",
)
@click.option(
    "--tolerance", type=click.FloatRange(0, min_open=True), help="Relative tolerance; by default that of the dtype."
)
@click.option("--folder", type=click.Path(path_type=Path), help="Write verify.json into this run folder.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the verdict to this file.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0.1), default=300.0, show_default=True, metavar="SECONDS",
    help="How long ranks wait for each other, and how long the script may show no progress.",
)  # fmt: skip
@share_option
@json_option
@script_arguments
def command(**given: Any) -> None:
    """Check that SCRIPT computes the same on N ranks as on one device.

    Both start every step from the same state, on the same global batches, with the same random numbers. Exit code 0:
    they agree. Exit code 1: they do not, and the first module and tensor that differ are named with the likely cause.
    Exit code 3: they cannot be compared, because they draw different random numbers.
    """
    options = VerifyOptions(**given)
    verdict = verdict_of(options)
    if options.as_json:
        emit(verdict)
    else:
        _show(verdict)
    sys.exit(0 if verdict.passed else 1 if verdict.comparable else NOT_COMPARABLE)


def _show(verdict: "Verdict") -> None:
    """Print the verdict on standard output."""
    from tutti.terminal import results_console

    out = results_console()
    word, _, rest = verdict.sentence.partition(":")
    colour = "green" if verdict.passed else "red" if verdict.comparable else "yellow"
    out.print(f"[bold {colour}]{word}[/]:", end="")
    out.print(rest, markup=False, soft_wrap=True)
    if verdict.cause is not None:
        out.print(f"Remedy: {verdict.cause.remedy}", markup=False, soft_wrap=True)
    for note in verdict.notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True, style="dim")
