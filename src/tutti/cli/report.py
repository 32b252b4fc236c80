"""`tutti report RUN...`: the honest report of a run, or a comparison of several."""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tutti.cli.options import PLACE, LocalPath, emit, json_option
from tutti.commands.messages import console
from tutti.errors import ReportError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tutti.config.run_report import RunReport
    from tutti.config.several_runs import Comparison, PredictionHistory


@click.command()
@click.argument("places", nargs=-1, type=PLACE, metavar="RUN|URL...")
@click.option(
    "--output", type=LocalPath(path_type=Path, file_okay=False), help="Folder to write to; RUN/report if not given."
)
@click.option("--target", metavar="NAME.METRIC=VALUE", help="A quality to reach, such as test.accuracy=0.9.")
@click.option(
    "--fact",
    "facts",
    multiple=True,
    metavar="NAME=VALUE",
    help="What only you know, such as tuning.trials=1; as Job(facts=...) in the script. May be repeated.",
)
@click.option("--history", is_flag=True, help="Show the errors of predictions over all runs in RUN... (default: runs).")
@click.option("--open/--no-open", "open_page", default=False, help="Open the page in a browser.")
@json_option
def command(
    places: tuple[Path | str, ...],
    output: Path | None,
    target: str | None,
    facts: tuple[str, ...],
    history: bool,
    open_page: bool,
    as_json: bool,
) -> None:
    """Report on RUN, a run folder (or a folder of them: the newest), or compare several with the first.

    One run: report.html, report.json and report.txt are written into its report folder. Several: compared on the
    terminal, and written as comparison.html, .json and .txt with --output. A speed-up is stated only where an honest
    report may state one; otherwise the reason is given instead. --history shows predictions beside measurements of all
    runs; --output writes it as history.html, .json and .txt.
    """
    from tutti.commands import report as reports
    from tutti.commands.stored_runs import run_here

    runs = tuple(run_here(place) for place in places)
    told = _parse_facts(facts)
    if history:
        page = _show_history(reports.history_of(runs or (Path("runs"),), output), output, as_json)
    elif len(runs) > 1:
        page = _show_several(reports.several(runs, reports.target_of(target), output, told), output, as_json)
    elif runs:
        page = _show_one(runs[0], reports.one(runs[0], reports.target_of(target), output, told), output, as_json)
    else:
        raise ReportError("no run was named; write `tutti report RUN`, or `tutti report --history` for all of runs/")
    if page is not None:
        console.print(f"report: {page}", soft_wrap=True, markup=False)
    if open_page and page is not None:
        webbrowser.open(page.resolve().as_uri())


def _parse_facts(texts: tuple[str, ...]) -> dict[str, str]:
    """Parse NAME=VALUE texts."""
    pairs = [text.partition("=") for text in texts]
    wrong = next((text for text, (name, _, value) in zip(texts, pairs, strict=True) if not name or not value), None)
    if wrong is not None:
        raise ReportError(f"--fact {wrong!r} is not NAME=VALUE; write for example --fact tuning.trials=1")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _show_one(run: Path, report: "RunReport", output: Path | None, as_json: bool) -> Path:
    from tutti.commands.report import run_folder_of
    from tutti.config.run_folder import RunFolder
    from tutti.reporting.terminal_report import report_table

    if as_json:
        emit(report)
    else:
        _print(report_table(report))
    return (output or RunFolder(run_folder_of(run)).report) / "report.html"


def _show_several(comparison: "Comparison", output: Path | None, as_json: bool) -> Path | None:
    from tutti.reporting.terminal_report import comparison_table

    if as_json:
        emit(comparison)
    else:
        _print(comparison_table(comparison))
    return output / "comparison.html" if output is not None else None


def _show_history(history: "PredictionHistory", output: Path | None, as_json: bool) -> Path | None:
    from tutti.reporting.prediction_history import history_table

    if as_json:
        emit(history)
    else:
        _print(history_table(history))
    return output / "history.html" if output is not None else None


def _print(table: "RenderableType") -> None:
    """Print a report on standard output, as wide as COLUMNS or the terminal, or 80 columns."""
    from tutti.cli.prediction_view import standard_output

    standard_output().print(table)
