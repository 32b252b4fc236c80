"""`tutti plan`: the best plan for a script, or a described model, on a cluster; and why the others lost."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from tutti.cli.common import capture_script, cluster_for, console, emit
from tutti.cli.options import SCRIPT_CONTEXT, json_option
from tutti.errors import PlanError, ScriptError
from tutti.spec import codec
from tutti.spec.model import ModelSpec
from tutti.spec.plan import BatchPlan, Plan
from tutti.spec.words import Precision, Unit

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.plan import Choice, PrecisionPolicy

SHOWN = 10
"""Alternatives in the table; --json has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line of `tutti plan`."""

    target: tuple[str, ...]
    cluster: Path | None
    model: Path | None
    global_batch_size: int | None
    unit: Unit
    max_devices: int | None
    nproc: int | None
    precision: "PrecisionPolicy"
    allow_microbatches: bool
    output: Path | None
    mesh: str | None
    plan: Path | None
    explain: bool
    as_json: bool


@click.command(context_settings=SCRIPT_CONTEXT)
@click.option("--cluster", type=click.Path(path_type=Path), help="The machines; this one, measured, if not given.")
@click.option("--model", type=click.Path(path_type=Path), help="Plan for a ModelSpec file instead of a script.")
@click.option("--global-batch-size", type=click.IntRange(1), help="With --model: the batch of a step.")
@click.option("--unit", type=click.Choice(get_args(Unit)), default="samples", help="With --model: what it counts.")
@click.option("--max-devices", type=click.IntRange(1), help="Use at most so many ranks.")
@click.option("--nproc", type=click.IntRange(1), help="Use exactly so many ranks.")
@click.option(
    "--precision",
    type=click.Choice(["script", "auto", *get_args(Precision)]),
    default="script",
    show_default=True,
    help="Keep the script's; auto: choose, which may change the numbers; or exactly this one.",
)
@click.option("--allow-microbatches", is_flag=True, help="Let microbatches change where that changes results.")
@click.option("--mesh", metavar="AXIS=N,...", help="Exactly this mesh, such as replicate=2,split=2: nothing is chosen.")
@click.option("--plan", type=click.Path(path_type=Path), help="Explain this plan for SCRIPT.")
@click.option("--explain", is_flag=True, help="Show where every module lies, its bytes a rank and its collectives.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the plan to this file.")
@json_option
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def command(**given: Any) -> None:
    """Choose how to train SCRIPT: ranks, microbatches, precision, by predicted step time and memory.

    With --cluster no hardware is needed. Options of tutti come before SCRIPT, the script's own ARGUMENTS after it.
    """
    options = Options(**given)
    from tutti.cli.planning import write_spec

    if options.mesh is not None or options.plan is not None or options.explain:
        from tutti.cli.explain import explain_script

        explain_script(options)
        return
    choice = _choose(options)
    if options.output is not None:
        write_spec(choice.best, options.output)
    if options.as_json:
        emit(choice)
        return
    _show(choice, options)


def _choose(options: Options) -> "Choice":
    from tutti.cli.planning import plan_for
    from tutti.plan import Request, choose

    if bool(options.model) == bool(options.target):
        raise ScriptError("name one thing to plan for: a script (tutti plan train.py), or --model FILE")
    if options.model is not None:
        script = Plan(batch=_batch(options))
        model = codec.load(ModelSpec, options.model)
        cluster = cluster_for(options.cluster)
        request = Request(
            script=script,
            max_devices=options.max_devices,
            degree=options.nproc,
            precision=options.precision,
            allow_microbatches=options.allow_microbatches,
        )
        return choose(model, cluster, request)
    path = Path(options.target[0])
    with console.status("tracing the model on shapes"):
        captured = capture_script(path, options.target[1:])
    return plan_for(
        captured,
        cluster_for(options.cluster),
        name=path.stem,
        nproc=options.nproc,
        max_devices=options.max_devices,
        precision=options.precision,
        allow_microbatches=options.allow_microbatches,
    )


def _batch(options: Options) -> BatchPlan:
    if options.global_batch_size is None:
        raise PlanError("a ModelSpec has no batch; add --global-batch-size N (and --unit tokens if it counts tokens)")
    return BatchPlan(global_batch_size=options.global_batch_size, unit=options.unit)


def _show(choice: "Choice", options: Options) -> None:
    from rich.console import Console

    from tutti.plan import explain

    out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    out.print(explain(choice), markup=False, soft_wrap=True)
    out.print(table(choice))
    hidden = len(choice.alternatives) - SHOWN
    if hidden > 0:
        out.print(f"{hidden} more were considered; --json lists all", style="dim")
    for note in choice.prediction.notes[1:]:
        out.print(f"note: {note}", markup=False, soft_wrap=True, style="dim")
    if options.output is None:
        return
    script = " ".join(options.target) or "SCRIPT"
    console.print(f"plan written to {options.output}: tutti run --plan {options.output} {script}", soft_wrap=True)


def table(choice: "Choice") -> "Table":
    """The chosen plan and the nearest others. All numbers are predicted."""
    from rich.table import Table

    from tutti.plan import rows

    shown = Table(title="Plans by predicted step time", title_justify="left")
    for name in ("ranks", "microbatches"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("precision", no_wrap=True)
    for name in ("step", "exposed comm.", "memory a rank"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("verdict", overflow="fold")
    for row in rows(choice)[: SHOWN + 1]:
        ranks = f"{row.ranks} by speed" if row.shares == "by speed" else str(row.ranks)
        values = (ranks, str(row.microbatches), row.precision, row.step, row.exposed, row.memory, row.reason)
        style = "bold green" if row.chosen else None if row.fits else "red"
        shown.add_row(*values, style=style)
    return shown
