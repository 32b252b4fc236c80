"""`tutti predict`: the cost of one plan, for a described model or a script, on a cluster."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tutti.cli.options import SCRIPT_CONTEXT, ScriptCommand, emit, json_option, timeout_option
from tutti.commands.messages import console
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from tutti.config.prediction import Prediction


@click.command(cls=ScriptCommand, context_settings=SCRIPT_CONTEXT)
@click.option("--model", type=click.Path(path_type=Path), help="A ModelSpec file, instead of a script.")
@click.option("--cluster", type=click.Path(path_type=Path), help="The cluster; this machine, measured, if not given.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the Prediction to this file.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page with the timeline of a step and its memory.",
)
@timeout_option
@json_option
@click.argument("plan", type=click.Path(path_type=Path))
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGUMENTS]... | NAME [SIZES]...]")
def command(
    plan: Path,
    target: tuple[str, ...],
    model: Path | None,
    cluster: Path | None,
    output: Path | None,
    html: Path | None,
    as_json: bool,
    timeout_s: float,
) -> None:
    """Predict step time and memory of PLAN for --model FILE or SCRIPT. With --cluster no hardware is needed."""
    from tutti.commands.predict import predicted

    intended, described, machines, prediction = predicted(plan, target, model, cluster, output, timeout_s)
    if html is not None:
        write_plan_page(described, machines, intended, html)
    if as_json:
        emit(prediction)
        return
    from tutti.cli.plan_view import show_timeline
    from tutti.cli.prediction_view import standard_output
    from tutti.commands.planned import ROWS
    from tutti.cost_model.rank_tracks import timeline

    out = standard_output()
    show(intended, prediction, out)
    show_timeline(out, timeline(described, machines, intended, most_tracks=ROWS))
    for note in prediction.notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True, style="dim")


def write_plan_page(model: ModelSpec, cluster: ClusterSpec, plan: Plan, path: Path) -> None:
    """Write the HTML page of one plan.

    Raises:
        ReportError: the page cannot be written.
    """
    from tutti.cli import prediction_view
    from tutti.commands.planned import ROWS
    from tutti.cost_model import predict
    from tutti.cost_model.rank_tracks import timeline

    step = timeline(model, cluster, plan, most_tracks=ROWS)
    page = prediction_view.page_of_plan(f"{model.name} on {cluster.name}", plan, predict(model, cluster, plan), step)
    prediction_view.write_page(page, path)
    console.print(f"page written to {path}", soft_wrap=True, markup=False)


def show(plan: Plan, prediction: "Prediction", out: "Console") -> None:
    """Print the prediction: two tables, and the rates."""
    from tutti.config.prediction import DEVICE_PARTS
    from tutti.cost_model.cost_notes import nbytes, seconds, torch_memory
    from tutti.reporting.fitted_table import FittedTable

    time, memory = prediction.step_time_s, prediction.memory
    out.print(f"Predicted step: {seconds(time.value)} ({seconds(time.low)} to {seconds(time.high)})")
    step = FittedTable()
    step.add_column("phase")
    step.add_column("predicted", justify="right")
    for phase, value in prediction.phases.items():
        words = phase.replace("_", " ")
        bubbles = phase == "exposed_communication" and plan.degree("stage") > 1
        step.add_row(f"{words} or bubble" if bubbles else words, seconds(value))
    held = FittedTable()
    held.add_column("held by")
    held.add_column("predicted", justify="right")
    for name in DEVICE_PARTS:
        held.add_row(name, nbytes(getattr(memory, name)))
    if memory.host:
        held.add_row("on the host", nbytes(memory.host))
    out.print(step)
    out.print(f"Predicted memory of a rank: {nbytes(memory.total)}")
    if prediction.allocator is not None:
        out.print(f"  {torch_memory(prediction.allocator)}")
    out.print(held)
    out.print(
        f"{prediction.throughput_per_s:,.0f} {plan.batch.unit}/s on {prediction.devices} ranks, "
        f"{prediction.model_flops_per_s / 1e9:,.1f} GFLOP/s; a rank sends at most "
        f"{nbytes(prediction.sent_nbytes_per_rank)} per step"
    )
    if not prediction.fits:
        out.print("this plan does not fit in memory", style="bold red")
