"""Write reports to files: JSON, HTML and text beside each other."""

from pathlib import Path

from rich.console import RenderableType

from tutti.config import codec
from tutti.config.comparison import Comparison
from tutti.config.history import History
from tutti.config.report import RunReport
from tutti.errors import ReportError
from tutti.report.history_page import history_html, history_table
from tutti.report.html import comparison_html, report_html
from tutti.report.tables import as_text, comparison_table, report_table


def write_files(report: RunReport, folder: Path) -> Path:
    """Write report.json, report.txt and report.html into `folder`; returns the path of the page."""
    return _write(folder, "report", report, report_table(report), report_html(report))


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write comparison.json, comparison.txt and comparison.html into `folder`; returns the path of the page."""
    return _write(folder, "comparison", comparison, comparison_table(comparison), comparison_html(comparison))


def write_history(history: History, folder: Path) -> Path:
    """Write history.json, history.txt and history.html into `folder`; returns the path of the page."""
    return _write(folder, "history", history, history_table(history), history_html(history))


def _write(folder: Path, name: str, value: object, table: RenderableType, page: str) -> Path:
    """Write the same as data, text and page, each file whole or not at all; the page's path is returned."""
    files = {f"{name}.json": codec.dumps(value), f"{name}.txt": as_text(table), f"{name}.html": page}
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
