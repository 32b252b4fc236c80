"""The end of `tutti run`: how it went in words, the report and the exit code."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from tutti.commands.messages import short, warn
from tutti.config.run_folder import RunFolder
from tutti.config.run_report import RunReport
from tutti.errors import ScriptError
from tutti.launch.failure import sentence, store_failure
from tutti.launch.launcher import LaunchSpec
from tutti.launch.supervisor import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """A run that has ended.

    Attributes:
        spec: what was started on this node.
        outcome: how the ranks ended.
        exit_code: the exit code of `tutti run`.
        message: what went wrong, in words; None if nothing did.
        report: the report; None without one.
        page: the report's page.
        is_first: whether it is the end on node 0, which writes the report.
    """

    spec: LaunchSpec
    outcome: Outcome
    exit_code: int
    message: str | None
    report: RunReport | None = None
    page: Path | None = None
    is_first: bool = True


def header_time(spec: LaunchSpec) -> int | None:
    """Return when the run folder's header was last written, or None. A Job that gets as far as training writes it."""
    try:
        return RunFolder(spec.folder).header.stat().st_mtime_ns
    except OSError:
        return None


def conclude(
    spec: LaunchSpec, outcome: Outcome, *, has_job: bool, is_first: bool = True, address: str | None = None
) -> Conclusion:
    """Write the report and say how the run went.

    Args:
        spec: what was started on this node.
        outcome: how the ranks ended.
        has_job: whether a Job got as far as training.
        is_first: whether this is node 0.
        address: of the store in which the run is kept; None if it is not.
    """
    place = address or short(spec.folder)
    words: str | None = None
    code = outcome.exit_code
    if outcome.failure is not None:
        words = sentence(spec, outcome.failure)
        if is_first:
            store_failure(spec, outcome.failure)
        if outcome.given_up:
            words += f"\n{outcome.given_up}"
        if outcome.failure.traceback:
            words += f"\nthe output of every rank: {short(spec.folder)}/ranks/"
    elif outcome.left:
        words = "this node has left, and the run goes on on the others; the same command lets it take part again"
    elif outcome.resumable and not RunFolder(spec.folder).checkpoint_times():
        words = f"the ranks ended with exit code {outcome.exit_code}, but wrote no checkpoint into {short(spec.folder)}"
    elif outcome.resumable:
        again = shlex.join(["tutti", "run", "--resume", place])
        words = f"stopped with a checkpoint (exit code {outcome.exit_code}); go on with `{again}` and the script"
    elif outcome.status == "stopped":
        words = "stopped"
    elif not has_job:
        words = (
            f"{Path(spec.target).name} ended without preparing a tutti.Job, so its ranks did not train together; make "
            "one and call job.prepare(...) (the README shows the three lines)"
        )
        code = ScriptError.exit_code
    if words is not None and has_job and not outcome.resumable and RunFolder(spec.folder).checkpoint_times():
        words += f"\ncontinue from its last checkpoint with --resume {shlex.quote(place)}"
    report = _report(spec) if has_job and is_first and outcome.status == "completed" else None
    page = RunFolder(spec.folder).report / "report.html" if report is not None else None
    return Conclusion(
        spec=spec, outcome=outcome, exit_code=code, message=words, report=report, page=page, is_first=is_first
    )


def _report(spec: LaunchSpec) -> RunReport | None:
    """Write the report and return it; None, after a warning, if it cannot be written. The run stays valid."""
    try:
        from tutti.reporting.report_files import write_report

        return write_report(spec.folder)
    except Exception as error:  # the training is finished and saved: no error in the report may hide that
        again = shlex.join(["tutti", "report", short(spec.folder)])
        warn(f"no report was written ({type(error).__name__}: {error}); try `{again}`")
        return None
