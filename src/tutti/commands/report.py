"""`tutti.report`: the honest report of a run, or a comparison of several."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from tutti.commands.stored_runs import run_here
from tutti.commands.values import StrPath, needed_path, path_of
from tutti.config.run_folder import is_store_address
from tutti.config.run_report import RunReport
from tutti.config.several_runs import Comparison, PredictionHistory
from tutti.config.stated_facts import check_names
from tutti.errors import ReportError

if TYPE_CHECKING:
    from tutti.reporting.quality_metrics import QualityTarget


@overload
def report(
    run: StrPath,
    /,
    *,
    target: str | None = None,
    facts: Mapping[str, object] | None = None,
    output: StrPath | None = None,
) -> RunReport: ...


@overload
def report(
    first: StrPath,
    second: StrPath,
    /,
    *more: StrPath,
    target: str | None = None,
    facts: Mapping[str, object] | None = None,
    output: StrPath | None = None,
) -> Comparison: ...


@overload
def report(*runs: StrPath, history: Literal[True], output: StrPath | None = None) -> PredictionHistory: ...


def report(
    *runs: StrPath,
    target: str | None = None,
    facts: Mapping[str, object] | None = None,
    history: bool = False,
    output: StrPath | None = None,
) -> RunReport | Comparison | PredictionHistory:
    """Report on a run, compare several with the first, or show the errors of predictions over all runs.

    Args:
        runs: run folders, folders of runs, of which the newest is taken, or addresses of runs in object stores.
        target: a quality to reach, such as "test.accuracy=0.9".
        facts: what only you know, such as {"tuning.trials": 1}, besides what the script stated in Job(facts=...).
        history: return predictions beside measurements of all runs in `runs` (by default of the folder "runs").
        output: folder to write JSON, text and page to; the run's own report folder for one run, and none for several.

    Raises:
        TuttiError: what `tutti report` would refuse, with the same sentence.
    """
    if facts is not None:
        check_names(facts, "report(facts=...)")
    folders, folder = tuple(run_here(_place(run)) for run in runs), path_of("output", output)
    if history:
        return history_of(folders or (Path("runs"),), folder)
    if not folders:
        raise ReportError("no run was named; write `tutti report RUN`, or `tutti report --history` for all of runs/")
    wanted = target_of(target)
    if len(folders) == 1:
        made = one(folders[0], wanted, folder, facts)
        return replace(made, folder=str(run_folder_of(folders[0]).resolve()))
    return several(folders, wanted, folder, facts)


def _place(run: StrPath) -> Path | str:
    return run if isinstance(run, str) and is_store_address(run) else needed_path("run", run)


def target_of(text: str | None) -> "QualityTarget | None":
    """Return the quality of "test.accuracy=0.9". Raises ReportError if it is not understood."""
    from tutti.reporting.quality_metrics import parse_target

    return parse_target(text) if text is not None else None


def one(
    path: Path, target: "QualityTarget | None", output: Path | None, facts: Mapping[str, object] | None = None
) -> RunReport:
    """Write the report of a run, and return it."""
    from tutti.reporting.report_files import write_report

    return write_report(run_folder_of(path), target=target, facts=facts, output=output)


def several(
    paths: Sequence[Path],
    target: "QualityTarget | None",
    output: Path | None,
    facts: Mapping[str, object] | None = None,
) -> Comparison:
    """Compare runs with the first, and write the comparison if a folder is named."""
    from tutti.reporting.build_report import build_report
    from tutti.reporting.comparison import compare
    from tutti.reporting.report_files import write_comparison

    comparison = compare([build_report(run_folder_of(path), target=target, facts=facts) for path in paths])
    if output is not None:
        write_comparison(comparison, output)
    return comparison


def history_of(paths: tuple[Path, ...], output: Path | None) -> PredictionHistory:
    """Return predictions beside measurements of all runs, and write them if a folder is named.

    Raises:
        ReportError: there are no runs.
    """
    from tutti.reporting.prediction_history import build_history, run_folders
    from tutti.reporting.report_files import write_history

    folders = run_folders(paths)
    if not folders:
        raise ReportError(f"there is no run folder in {', '.join(map(str, paths))}; name one that `tutti run` made")
    history = build_history(folders)
    if output is not None:
        write_history(history, output)
    return history


def run_folder_of(path: Path) -> Path:
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
