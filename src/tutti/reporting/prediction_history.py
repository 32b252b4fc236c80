"""Compare the predictions of many runs with their measurements, so that a user knows how far to trust predictions."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median, quantiles

from matplotlib.ticker import FixedLocator, NullLocator
from rich.console import Group, RenderableType
from rich.text import Text

from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.run_folder import RunFolder
from tutti.config.run_report import PredictionCheck, Quantity, RunReport
from tutti.config.several_runs import HistoryEntry, PredictionAccuracy, PredictionHistory
from tutti.errors import ReportError, SpecError
from tutti.reporting.build_report import build_report
from tutti.reporting.fitted_table import FittedTable
from tutti.reporting.formatting import duration, plural, show, signed_percent, significant
from tutti.reporting.html_report import environment
from tutti.reporting.measurements import seen
from tutti.reporting.svg import INK, MUTED, PAPER, SERIES, Plot, inline, new_figure, styled

MIN_RUNS_FOR_PERCENTILE = 5
"""Minimum number of runs for a percentile of the errors."""


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders among `paths` and directly inside them.

    Raises:
        ReportError: a path is not a folder.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise ReportError(f"{path} is not a folder; name run folders, or a folder that contains them, such as runs")
        inside = sorted(header.parent for header in path.glob("*/run.json"))
        for folder in [path] if (path / "run.json").is_file() else inside:
            folders[folder] = None
    return list(folders)


def build_history(folders: Sequence[Path]) -> PredictionHistory:
    """Compare the predicted and measured step times of runs; list the runs that lack either one."""
    entries, left_out = [], []
    for folder in folders:
        if not RunFolder(folder).prediction.is_file():
            left_out.append(f"{folder.name}: it has no prediction")
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
    trust = [prediction_accuracy(entries, "")] if entries else []
    if len(clusters) > 1:
        trust += [prediction_accuracy([entry for entry in entries if entry.cluster == name], name) for name in clusters]
    return PredictionHistory(entries=tuple(entries), trust=tuple(trust), left_out=tuple(left_out))


def _entry(folder: Path, report: RunReport) -> HistoryEntry | None:
    """Build a history entry; None if the report has no measured step time."""
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
    """Return the error of a check; empty without one."""
    return Quantity(unit="ratio") if check is None else check.error


def _cluster_name(folder: Path) -> str:
    """Return the name of the cluster in a run folder; empty if it is missing or unreadable."""
    path = RunFolder(folder).cluster
    try:
        return serialization.load(ClusterSpec, path).name if path.is_file() else ""
    except SpecError:
        return ""


def prediction_accuracy(entries: Sequence[HistoryEntry], cluster: str) -> PredictionAccuracy:
    """Summarise the prediction errors of runs, as numbers and in one sentence.

    Args:
        entries: the runs; at least one.
        cluster: their cluster, for the text; empty for all clusters.
    """
    errors = [float(entry.step_error.value or 0.0) for entry in entries]
    sizes = sorted(abs(error) for error in errors)
    memory = [abs(float(e.memory_error.value)) for e in entries if e.memory_error.value is not None]
    within = sum(bool(entry.within) for entry in entries)
    most = quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) >= MIN_RUNS_FOR_PERCENTILE else None
    bias, size = median(errors), median(sizes)
    where = f" on {cluster}" if cluster else ""
    strategy = "longer than" if bias < 0 else "less time than" if bias > 0 else "as long as"
    clauses = [
        f"{plural(len(entries), 'run')}{where}: steps took {strategy} predicted (median error {signed_percent(bias)})",
        f"the median absolute error is {significant(100 * size)} %",
    ]
    if most is not None:
        clauses.append(f"nine of ten errors are at most {significant(100 * most)} %")
    clauses.append(f"{within} of {len(entries)} were in the predicted interval")
    if memory:
        clauses.append(f"the median absolute error of memory is {significant(100 * median(memory))} %")
    return PredictionAccuracy(
        cluster=cluster,
        runs=len(entries),
        median=seen(size, "ratio", "median of the absolute errors of step times"),
        ninetieth=seen(most, "ratio", "90th percentile of the absolute errors of step times"),
        bias=seen(bias, "ratio", "median of (predicted - measured) / measured"),
        within=within,
        memory_median=seen(median(memory) if memory else None, "ratio", "median of the absolute errors of peak memory"),
        sentence="; ".join(clauses) + ".",
    )


MAX_SHOWN = 60
"""Maximum number of runs in the figure; the newest are shown."""


@styled
def history_plot(history: PredictionHistory) -> Plot | None:
    """Draw the predicted step time of each run in percent of the measured one, with its predicted interval."""
    shown = [e for e in history.entries if e.predicted_step.value and e.measured_step.value][-MAX_SHOWN:]
    if not shown:
        return None
    figure, axes = new_figure(14.2, 4.4)
    axes.axhline(100, color=INK, linewidth=1.6)
    percents: list[float] = [100.0]
    for at, entry in enumerate(shown):
        truth = float(entry.measured_step.value or 1)
        centre = 100 * float(entry.predicted_step.value or 0) / truth
        low, high = (100 * float(end or 0) / truth for end in (entry.predicted_step.low, entry.predicted_step.high))
        percents.append(centre)
        if low > 0 and high > 0:
            percents += [low, high]
            axes.plot([at, at], [low, high], color=SERIES[0], linewidth=1.6, linestyle=(0, (3, 2)))
        axes.plot(
            [at], [centre], "o", markersize=8, markerfacecolor=PAPER, markeredgewidth=2,
            markeredgecolor=SERIES[0] if entry.within else SERIES[1],
        )  # fmt: skip
    reach = max(1.6, max(percents) / 100, 100 / min(percents)) * 1.15
    axes.set_yscale("log", base=2)
    axes.set_ylim(100 / reach, 100 * reach)
    axes.yaxis.set_major_locator(FixedLocator([100 * 2.0**power for power in range(-8, 9)]))
    axes.yaxis.set_major_formatter(lambda value, _: significant(value))
    axes.yaxis.set_minor_locator(NullLocator())
    step = -(-len(shown) // 12)
    axes.set_xticks(range(0, len(shown), step), [shown[at].started_utc[:10] for at in range(0, len(shown), step)])
    axes.set_xlim(-0.6, len(shown) - 0.4)
    axes.set(xlabel="runs, in order of their start", ylabel="predicted step time (% of measured)")
    axes.plot([], [], "o", markersize=8, markerfacecolor=PAPER, markeredgewidth=2, markeredgecolor=SERIES[0],
              label="measured within the predicted interval (dashed)")  # fmt: skip
    axes.plot([], [], "o", markersize=8, markerfacecolor=PAPER, markeredgewidth=2, markeredgecolor=SERIES[1],
              label="outside it")  # fmt: skip
    axes.plot([], [], color=MUTED, linewidth=1.6, label="prediction equals measurement")
    figure.legend(loc="outside upper left", ncols=3, columnspacing=1.4)
    alt_text = "Predicted step times in percent of measured ones. " + " ".join(
        f"{e.name}: predicted {duration(float(e.predicted_step.value or 0))}, "
        f"measured {duration(float(e.measured_step.value or 0))}."
        for e in shown
    )
    note = f"{plural(len(shown), 'run')}; above the line: predicted too slow, below it: too fast"
    return Plot(
        title="Accuracy of predictions",
        note=note,
        svg=inline(figure, "history", alt_text),
        alt_text=alt_text,
        wide=True,
    )


def history_html(history: PredictionHistory) -> str:
    """Render the page of the history."""
    whole = history.trust[0] if history.trust else None
    good = whole is not None and whole.within * 2 >= whole.runs
    return (
        environment()
        .get_template("history.html")
        .render(h=history, whole=whole, good=good, plot=history_plot(history), signed=signed_percent)
    )


def history_table(history: PredictionHistory) -> RenderableType:
    """Build the history as a table for a rich console, the newest run last."""
    shown = FittedTable(title="Predictions and measurements", title_justify="left")
    for name in ("run", "cluster", "plan"):
        shown.add_column(name, no_wrap=name != "plan")
    for name in ("predicted\nstep", "measured\nstep", "error", "memory\nerror"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("in the\ninterval", no_wrap=True)
    for entry in history.entries:
        error, memory = entry.step_error.value, entry.memory_error.value
        shown.add_row(
            entry.name, entry.cluster, entry.plan, show(entry.predicted_step), show(entry.measured_step),
            "" if error is None else signed_percent(error), "" if memory is None else signed_percent(memory),
            "" if entry.within is None else "yes" if entry.within else "no",
            style=None if entry.within else "yellow",
        )  # fmt: skip
    parts: list[RenderableType] = [shown, *(Text(trust.sentence) for trust in history.trust)]
    parts += [Text(f"left out: {reason}", style="dim") for reason in history.left_out]
    return Group(*parts)
