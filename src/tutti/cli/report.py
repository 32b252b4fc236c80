"""`tutti report RUN...`: the honest report of a run, or a comparison of several."""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tutti.cli.options import console, emit, json_option
from tutti.errors import ReportError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tutti.reporting.quality_metrics import QualityTarget


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), help="Folder to write to; RUN/report if not given."
)
@click.option("--target", metavar="NAME.METRIC=VALUE", help="A quality to reach, such as test.accuracy=0.9.")
@click.option("--history", is_flag=True, help="Show the errors of predictions over all runs in RUN... (default: runs).")
@click.option("--open/--no-open", "open_page", default=False, help="Open the page in a browser.")
@json_option
def command(
    runs: tuple[Path, ...], output: Path | None, target: str | None, history: bool, open_page: bool, as_json: bool
) -> None:
    """Report on RUN, a run folder (or a folder of them: the newest), or compare several with the first.

    One run: report.html, report.json and report.txt are written into its report folder. Several: compared on the
    terminal, and written as comparison.html, .json and .txt with --output. A speed-up is stated only where an honest
    report may state one; otherwise the reason is given instead. --history shows predictions beside measurements of all
    runs; --output writes it as history.html, .json and .txt.
    """
    from tutti.reporting.quality_metrics import parse_target

    if history:
        page = _history(runs or (Path("runs"),), output, as_json)
    elif not runs:
        raise ReportError("no run was named; write `tutti report RUN`, or `tutti report --history` for all of runs/")
    else:
        wanted = parse_target(target) if target is not None else None
        folders = [run_folder(path) for path in runs]
        single = len(folders) == 1
        page = _one(folders[0], wanted, output, as_json) if single else _several(folders, wanted, output, as_json)
    if page is not None:
        console.print(f"report: {page}", soft_wrap=True, markup=False)
    if open_page and page is not None:
        webbrowser.open(page.resolve().as_uri())


def _one(folder: Path, target: "QualityTarget | None", output: Path | None, as_json: bool) -> Path:
    from tutti.config.run_folder import RunFolder
    from tutti.reporting.report_files import write_report
    from tutti.reporting.terminal_report import report_table

    report = write_report(folder, target=target, output=output)
    if as_json:
        emit(report)
    else:
        _print(report_table(report))
    return (output or RunFolder(folder).report) / "report.html"


def _several(folders: list[Path], target: "QualityTarget | None", output: Path | None, as_json: bool) -> Path | None:
    from tutti.reporting.build_report import build_report
    from tutti.reporting.comparison import compare
    from tutti.reporting.report_files import write_comparison
    from tutti.reporting.terminal_report import comparison_table

    comparison = compare([build_report(folder, target=target) for folder in folders])
    if as_json:
        emit(comparison)
    else:
        _print(comparison_table(comparison))
    return write_comparison(comparison, output) if output is not None else None


def _history(paths: tuple[Path, ...], output: Path | None, as_json: bool) -> Path | None:
    from tutti.reporting.prediction_history import build_history, history_table, run_folders
    from tutti.reporting.report_files import write_history

    folders = run_folders(paths)
    if not folders:
        raise ReportError(f"there is no run folder in {', '.join(map(str, paths))}; name one that `tutti run` made")
    history = build_history(folders)
    if as_json:
        emit(history)
    else:
        _print(history_table(history), width=150)
    return write_history(history, output) if output is not None else None


def _print(table: "RenderableType", width: int = 110) -> None:
    """Print on standard error, as wide as the terminal, or `width` columns without one."""
    from rich.console import Console

    out = console if console.is_terminal else Console(stderr=True, highlight=False, width=width)
    out.print(table)


def run_folder(path: Path) -> Path:
    """Return the path if it is a run folder, else the newest run in it.

    Raises:
        ReportError: it is neither a run folder nor a folder of runs.
    """
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder; name a run folder, such as runs/train-20250101-120000")
    if (path / "run.json").is_file():
        return path
    folders = [header.parent for header in path.glob("*/run.json")]
    if not folders:
        raise ReportError(f"{path} has no run.json and no runs in it; name a folder that `tutti run` made")
    return max(folders, key=lambda folder: ((folder / "run.json").stat().st_mtime_ns, folder.name))
