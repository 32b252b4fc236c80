"""The end of `tutti run`: its last message, the report and the exit code."""

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from tutti.config.run_folder import RunFolder
from tutti.errors import ScriptError
from tutti.launch.launcher import LaunchSpec
from tutti.launch.supervisor import Outcome, sentence


def short(path: Path) -> str:
    """Return the path relative to the current directory, if it is inside it."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def header_time(spec: LaunchSpec) -> int | None:
    """Return when the run folder's header was last written, or None. A Job that gets as far as training writes it."""
    try:
        return RunFolder(spec.folder).header.stat().st_mtime_ns
    except OSError:
        return None


def conclude(
    spec: LaunchSpec, console: Console, outcome: Outcome, *, has_job: bool, as_json: bool, told_here: bool = True
) -> int:
    """Write the report, print how the run went and return the exit code.

    Args:
        spec: what was started on this node.
        console: takes the message for the user.
        outcome: how the ranks ended.
        has_job: whether a Job got as far as training.
        as_json: print one JSON document on standard output too.
        told_here: whether to print the message here; else another node prints it on the same screen.
    """
    words: str | None = None
    code = outcome.exit_code
    if outcome.failure is not None:
        words = sentence(spec, outcome.failure)
        if outcome.failure.traceback:
            words += f"\nthe output of every rank: {short(spec.folder)}/ranks/"
    elif outcome.status == "stopped":
        words = "stopped"
    elif not has_job:
        words = (
            f"{Path(spec.target).name} ended without preparing a tutti.Job, so its ranks did not train together; make "
            "one and call job.prepare(...) (the README shows the three lines)"
        )
        code = ScriptError.exit_code
    if words is not None and has_job and any(RunFolder(spec.folder).checkpoints.glob("step-*")):
        words += f"\ncontinue from its last checkpoint with --resume {shlex.quote(short(spec.folder))}"
    report = _report(spec, console) if has_job and spec.node_rank == 0 and outcome.status == "completed" else None
    if words is not None and told_here:
        console.print(words, markup=False, soft_wrap=True, style="red" if outcome.status == "failed" else None)
    if words is None and report is not None:
        console.print(f"report: {short(report)}", soft_wrap=True)
    if as_json:
        print(json.dumps(_document(spec, outcome, code, words, report), indent=2))
    return code


def _document(spec: LaunchSpec, outcome: Outcome, code: int, words: str | None, report: Path | None) -> dict[str, Any]:
    failure = outcome.failure
    return {
        "status": outcome.status if code == outcome.exit_code else "failed",
        "exit_code": code,
        "folder": str(spec.folder),
        "world_size": spec.world_size,
        "message": words,
        "failed_ranks": list(failure.ranks) if failure else [],
        "report": str(report) if report else None,
    }


def _report(spec: LaunchSpec, console: Console) -> Path | None:
    """Write the report and return its page; None, after a warning, if it cannot be written. The run stays valid."""
    try:
        from tutti.reporting.report_files import write_report

        write_report(spec.folder)
    except Exception as error:  # the training is finished and saved: no error in the report may hide that
        again = shlex.join(["tutti", "report", short(spec.folder)])
        console.print(
            f"no report was written ({type(error).__name__}: {error}); try `{again}`",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
        return None
    return RunFolder(spec.folder).report / "report.html"
