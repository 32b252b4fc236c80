"""Write reports to files: JSON, HTML and text beside each other."""

from pathlib import Path

from tutti.errors import ReportError
from tutti.report.history_page import history_html, history_table
from tutti.report.html import comparison_html, report_html
from tutti.report.tables import as_text, comparison_table, report_table
from tutti.spec import codec
from tutti.spec.comparison import Comparison
from tutti.spec.history import History
from tutti.spec.report import RunReport


def write_files(report: RunReport, folder: Path) -> Path:
    """Write report.json, report.html and report.txt into `folder`; returns the path of the page."""
    return _write(
        folder,
        {
            "report.json": codec.dumps(report),
            "report.txt": as_text(report_table(report)),
            "report.html": report_html(report),
        },
    )


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write comparison.json, comparison.html and comparison.txt into `folder`; returns the path of the page."""
    return _write(
        folder,
        {
            "comparison.json": codec.dumps(comparison),
            "comparison.txt": as_text(comparison_table(comparison)),
            "comparison.html": comparison_html(comparison),
        },
    )


def write_history(history: History, folder: Path) -> Path:
    """Write history.json, history.html and history.txt into `folder`; returns the path of the page."""
    return _write(
        folder,
        {
            "history.json": codec.dumps(history),
            "history.txt": as_text(history_table(history)),
            "history.html": history_html(history),
        },
    )


def _write(folder: Path, files: dict[str, str]) -> Path:
    """Write text files, each whole or not at all; the last one's path is returned."""
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = folder / name
            part = folder / f".{name}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(path)
    except OSError as error:
        raise ReportError(f"{path} cannot be written ({error.strerror}); name another folder with --output") from None
    return path
