"""Write reports to files: JSON, HTML and text side by side."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import RenderableType

from tutti.config import serialization
from tutti.config.run_folder import RunFolder
from tutti.config.run_report import RunReport
from tutti.config.several_runs import Comparison, PredictionHistory
from tutti.errors import ReportError
from tutti.reporting.build_report import build_report
from tutti.reporting.html_report import comparison_html, report_html
from tutti.reporting.prediction_history import history_html, history_table
from tutti.reporting.quality_metrics import QualityTarget
from tutti.reporting.rank_timeline import RankTimeline, read_timeline
from tutti.reporting.terminal_report import as_text, comparison_table, report_table


def write_files(report: RunReport, folder: Path, timeline: RankTimeline | None = None) -> Path:
    """Write report.json, report.txt and report.html into `folder`; return the path of the page."""
    return _write(folder, "report", report, report_table(report), report_html(report, timeline))


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write comparison.json, comparison.txt and comparison.html into `folder`; return the path of the page."""
    return _write(folder, "comparison", comparison, comparison_table(comparison), comparison_html(comparison))


def write_history(history: PredictionHistory, folder: Path) -> Path:
    """Write history.json, history.txt and history.html into `folder`; return the path of the page."""
    return _write(folder, "history", history, history_table(history), history_html(history))


def _write(folder: Path, name: str, value: object, table: RenderableType, page: str) -> Path:
    """Write data, text and page, each file whole or not at all; return the path of the page."""
    files = {f"{name}.json": serialization.dumps(value), f"{name}.txt": as_text(table), f"{name}.html": page}
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            path = folder / file
            part = folder / f".{file}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(path)
    except OSError as error:
        raise ReportError(f"{path} cannot be written ({error.strerror}); name another folder with --output") from None
    return path


def write_report(
    folder: Path,
    *,
    target: QualityTarget | None = None,
    facts: Mapping[str, object] | None = None,
    output: Path | None = None,
) -> RunReport:
    """Build the report of a run folder and write report.json, report.html and report.txt.

    Args:
        folder: the run folder.
        target: the quality to reach.
        facts: what the user states about the run besides the script's own facts.
        output: where the files go; by default the folder's own report/.
    """
    report = build_report(folder, target=target, facts=facts)
    timeline = read_timeline(folder, (rank.rank for rank in report.ranks))
    write_files(report, output or RunFolder(folder).report, timeline)
    return report
