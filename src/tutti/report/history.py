"""From many run folders to a History: how far predictions have been off, so that a user knows how far to trust them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median, quantiles

from tutti.config import codec
from tutti.config.cluster import ClusterSpec
from tutti.config.history import History, HistoryEntry, Trust
from tutti.config.quantity import Quantity
from tutti.config.report import RunReport
from tutti.config.report_measured import PredictionCheck
from tutti.config.run import RunFolder
from tutti.errors import ReportError, SpecError
from tutti.report.build import build_report
from tutti.report.timing import seen
from tutti.report.words import plural, signed_percent, significant

FEW = 5
"""Below so many runs, errors are told but no percentile of them."""


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Run folders among `paths` and directly within them. Raises ReportError for a path that is no folder."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise ReportError(f"{path} is not a folder; name run folders, or a folder of them such as runs")
        inside = sorted(header.parent for header in path.glob("*/run.json"))
        for folder in [path] if (path / "run.json").is_file() else inside:
            found[folder] = None
    return list(found)


def build_history(folders: Sequence[Path]) -> History:
    """What the runs in `folders` say of their predictions; those without one are named."""
    entries, left_out = [], []
    for folder in folders:
        if not RunFolder(folder).prediction.is_file():
            left_out.append(f"{folder.name}: it was not predicted")
            continue
        try:
            report = build_report(folder)
        except (ReportError, SpecError) as error:
            left_out.append(f"{folder.name}: {error}")
            continue
        entry = _entry(folder, report)
        if entry is None:
            left_out.append(f"{folder.name}: no step was measured")
        else:
            entries.append(entry)
    entries.sort(key=lambda entry: (entry.started_utc, entry.folder))
    clusters = list(dict.fromkeys(entry.cluster for entry in entries))
    trust = [trust_in(entries, "")] if entries else []
    if len(clusters) > 1:
        trust += [trust_in([entry for entry in entries if entry.cluster == name], name) for name in clusters]
    return History(entries=tuple(entries), trust=tuple(trust), left_out=tuple(left_out))


def _entry(folder: Path, report: RunReport) -> HistoryEntry | None:
    checks = {check.name: check for check in report.checks}
    step = checks.get("step time")
    if step is None or step.error.value is None:
        return None
    memory = checks.get("peak memory of a rank")
    return HistoryEntry(
        name=report.name,
        folder=str(folder),
        started_utc=report.started_utc,
        script=report.script,
        cluster=_cluster_name(folder),
        plan=report.plan or "",
        ranks=report.system.ranks,
        predicted_step=step.predicted,
        measured_step=step.measured,
        step_error=step.error,
        within=step.within,
        memory_error=_error(memory),
    )


def _error(check: PredictionCheck | None) -> Quantity:
    return Quantity(unit="ratio") if check is None else check.error


def _cluster_name(folder: Path) -> str:
    path = RunFolder(folder).cluster
    try:
        return codec.load(ClusterSpec, path).name if path.is_file() else ""
    except SpecError:
        return ""


def trust_in(entries: Sequence[HistoryEntry], cluster: str) -> Trust:
    """The errors of runs in numbers and in one sentence."""
    errors = [float(entry.step_error.value or 0.0) for entry in entries]
    sizes = sorted(abs(error) for error in errors)
    memory = [abs(float(e.memory_error.value)) for e in entries if e.memory_error.value is not None]
    within = sum(bool(entry.within) for entry in entries)
    most = quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) >= FEW else None
    bias, size = median(errors), median(sizes)
    where = f" on {cluster}" if cluster else ""
    way = "longer than" if bias < 0 else "less long than" if bias > 0 else "as long as"
    words = [
        f"{plural(len(entries), 'run')}{where}: steps took {way} predicted (median error {signed_percent(bias)})",
        f"the median size of the error is {significant(100 * size)} %",
    ]
    if most is not None:
        words.append(f"in nine of ten at most {significant(100 * most)} %")
    words.append(f"{within} of {len(entries)} were in the predicted interval")
    if memory:
        words.append(f"memory was off by {significant(100 * median(memory))} % in the median")
    return Trust(
        cluster=cluster,
        runs=len(entries),
        median=seen(size, "ratio", "of the sizes of errors of step times"),
        ninetieth=seen(most, "ratio", "nine of ten errors are at most so large"),
        bias=seen(bias, "ratio", "median of (predicted - measured) / measured"),
        within=within,
        memory_median=seen(median(memory) if memory else None, "ratio", "of the sizes of errors of peak memory"),
        sentence="; ".join(words) + ".",
    )
