"""The output of `tutti plan` and `tutti predict` besides the table: timeline, scaling, trials and the HTML page."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.commands.plan_trials import words_in_full
from tutti.commands.planned import Planned, Scenario
from tutti.config.plan import Plan
from tutti.config.prediction import Activity, Prediction, ScalingCurve, Timeline, Trials
from tutti.cost_model.cost_notes import nbytes, seconds
from tutti.errors import ReportError
from tutti.planner import (
    Choice,
    difference,
    explain,
    plan_words,
    rows,
    training_cost_text,
)
from tutti.planner.objectives import money

if TYPE_CHECKING:
    from rich.console import Console

    from tutti.reporting.plan_page import KeyFigure, PageTable, PlanPage

RECENT = 30
"""Number of newest runs that count in the summary of past prediction errors."""

SCENARIO_COLUMNS = ("cluster", "best plan", "step", "memory per rank", "cost", "compared with now")


def scenario_rows(planned: Planned) -> list[tuple[str, ...]]:
    """Return the cells of `SCENARIO_COLUMNS` as text, first for the cluster as it is.

    The cost is empty without prices. It is that of the whole training, or of one step if nobody said how long training
    is.
    """
    table_rows: list[tuple[str, ...]] = []
    as_it_is = Scenario(change="as it is", choice=planned.choice)
    for other in (as_it_is, *planned.scenarios):
        choice = other.choice
        if choice is None:
            table_rows.append((other.change, "none", "", "", "", other.reason))
            continue
        step, memory = choice.prediction.step_time_s.value, choice.prediction.memory.total
        against = "" if choice is planned.choice else _against(planned.choice, choice)
        table_rows.append(
            (
                other.change,
                words_in_full(choice.best, choice.request),
                seconds(step),
                nbytes(memory),
                _cost(choice),
                against,
            )
        )
    return table_rows


def _cost(choice: Choice) -> str:
    totals = choice.totals
    if totals is None or totals.cost is None:
        return ""
    return money(totals.cost) + ("" if totals.steps is not None else " a step")


def _against(now: Choice, then: Choice) -> str:
    """Describe what the best plan then gains or loses compared with now, and how it differs."""
    parts = [f"{now.prediction.step_time_s.value / then.prediction.step_time_s.value:.2f}x as fast"]
    pairs = {"memory": (now.prediction.memory.total, then.prediction.memory.total)}
    if now.totals is not None and then.totals is not None:
        pairs["cost"] = (now.totals.cost or 0.0, then.totals.cost or 0.0)
    for what, (before, after) in pairs.items():
        if before > 0 and after > 0 and f"{after / before:.2f}" != "1.00":
            parts.append(f"{after / before:.2f}x the {what}")
    changed = "; ".join(difference(now.best, then.best, ("now", "then"))) or "the same plan"
    return f"{', '.join(parts)}; {changed}"


def trust_here(cluster: str, runs: Path = Path("runs")) -> str:
    """Return a sentence on the errors of past predictions for this cluster; empty if there are no such runs.

    Args:
        cluster: the cluster's name.
        runs: the folder of runs to look in.
    """
    from tutti.reporting.prediction_history import build_history, prediction_accuracy, run_folders

    if not runs.is_dir():
        return ""
    newest = sorted(run_folders([runs]), key=lambda folder: (folder / "run.json").stat().st_mtime_ns)[-RECENT:]
    entries = [entry for entry in build_history(newest).entries if entry.cluster == cluster]
    return f"So far in {runs}: {prediction_accuracy(entries, cluster).sentence}" if entries else ""


def show_curve(out: "Console", curve: ScalingCurve) -> None:
    """Print speed against devices as a table with bars. All numbers are predicted."""
    from tutti.reporting.fitted_table import FittedTable

    most = max((point.throughput_per_s for point in curve.points), default=0.0)
    shown = FittedTable(title="Speed against devices, predicted", title_justify="left")
    shown.below = ("", "best plan")
    for name in ("devices", "used", "step", f"{curve.unit}/s", "gain per\nextra device"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("best plan", overflow="fold")
    shown.add_column("", no_wrap=True)
    for point in curve.points:
        if point.step_time_s is None:
            shown.add_row(str(point.devices), "", "", "", "", point.reason, "", style="red")
            continue
        worth = "" if point.worth is None else f"{100 * point.worth:.0f} %"
        bar = "#" * max(1, round(20 * point.throughput_per_s / most))
        cells = (str(point.used), seconds(point.step_time_s.value), f"{point.throughput_per_s:,.0f}", worth, point.plan)
        style = "bold green" if point.devices == curve.pays_until else None
        shown.add_row(str(point.devices), *cells, bar, style=style)
    out.print(shown)
    out.print(f"{curve.sentence[0].upper()}{curve.sentence[1:]}", markup=False, soft_wrap=True)


def show_trials(out: "Console", trials: Trials) -> None:
    """Print predicted beside measured times, the fastest plan first, and whether the choice stands."""
    from tutti.reporting.fitted_table import FittedTable

    shown = FittedTable(title="Tried on this machine, the fastest first", title_justify="left")
    shown.below = ("plan",)
    shown.add_column("plan", overflow="fold")
    for name in ("predicted", "measured", "steps", "error of the\nprediction"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("in the\ninterval", no_wrap=True)
    order = sorted(range(len(trials.trials)), key=lambda at: trials.trials[at].measured_s or float("inf"))
    for at in order:
        trial = trials.trials[at]
        if trial.measured_s is None or trial.error is None:
            shown.add_row(trial.words, seconds(trial.predicted.value), trial.failure, "", "", "", style="red")
            continue
        style = "bold green" if at == trials.best else None
        spread = f"{seconds(trial.measured_s)}" + (
            f" ({_spread(trial.least_s, trial.most_s)})" if trial.steps > 1 else ""
        )
        within = "yes" if trial.within else "no"
        error = f"{100 * trial.error:+.0f} %"
        shown.add_row(trial.words, seconds(trial.predicted.value), spread, str(trial.steps), error, within, style=style)
    out.print(shown)
    out.print(trials.sentence, markup=False, soft_wrap=True)
    if trials.load > 0.5 * trials.cores:
        out.print(
            f"note: other programs ran at the same time (load {trials.load:.1f} on {trials.cores} cores), so these "
            "measurements are unreliable",
            style="yellow", soft_wrap=True,
        )  # fmt: skip


def _spread(least: float | None, most: float | None) -> str:
    return f"{seconds(least or 0.0)} to {seconds(most or 0.0)}"


def page_of_choice(planned: Planned, top: int, command: str) -> "PlanPage":
    """Return the HTML page of a choice.

    Args:
        planned: the choice, with everything else that was asked for.
        top: how many alternatives to show.
        command: the command that runs the plan.
    """
    from tutti.reporting.plan_page import PlanPage

    choice = planned.choice
    lead = explain(choice).splitlines()[0].partition(": ")[2]
    return PlanPage(
        name=f"{choice.model} on {choice.cluster}",
        lead=". ".join((f"{lead[0].upper()}{lead[1:]}", *training_cost_text(choice.totals))) + ".",
        keys=_keys(choice.best, choice.prediction, planned.timeline),
        prediction=choice.prediction,
        timeline=planned.timeline,
        remarks=choice.remarks,
        changes=choice.changes,
        tables=(_alternatives(choice, top), *_scenario_table(planned)),
        scaling=planned.scaling,
        trials=planned.trials,
        next_command=command,
    )


def page_of_plan(name: str, plan: Plan, prediction: Prediction, found: Timeline) -> "PlanPage":
    """Return the HTML page of one plan that was costed without a search.

    Args:
        name: the title: model and cluster.
        plan: what was costed.
        prediction: its cost.
        found: its timeline.
    """
    from tutti.reporting.plan_page import PlanPage

    batch = plan.batch
    words = plan_words(plan, common_names=True)
    lead = f"{words}, precision {plan.precision}, global batch {batch.global_batch_size} {batch.unit}."
    return PlanPage(
        name=name, lead=f"{lead[0].upper()}{lead[1:]}", keys=_keys(plan, prediction, found), prediction=prediction,
        timeline=found,
    )  # fmt: skip


def _keys(plan: Plan, prediction: Prediction, found: Timeline) -> "tuple[KeyFigure, ...]":
    from tutti.reporting.plan_page import KeyFigure

    time, memory = prediction.step_time_s, prediction.memory_nbytes
    tracks = sum(track.count for track in found.tracks)
    who = "rows shown" if found.tracks_left_out else "ranks"

    def idle(doing: Activity) -> str:
        mean = sum(track.count * track.seconds.get(doing, 0.0) for track in found.tracks) / tracks
        return f"{100 * mean / time.value:.1f} %"

    return (
        KeyFigure(name="Step time", value=seconds(time.value), also=f"{seconds(time.low)} to {seconds(time.high)}"),
        KeyFigure(name="Throughput", value=f"{prediction.throughput_per_s:,.0f}", also=f"{plan.batch.unit}/s"),
        KeyFigure(name="Memory of a rank", value=nbytes(memory.value), also="of the fullest rank, at its peak"),
        *_torch_keys(prediction),
        KeyFigure(name="Exposed comm.", value=idle("communication"), also=f"of the step, mean of the {who}"),
        KeyFigure(name="Bubbles", value=idle("bubble"), also=f"of the step, mean of the {who}"),
        KeyFigure(name="Sent by a rank", value=nbytes(prediction.sent_nbytes_per_rank), also="per step, at most"),
    )


def _torch_keys(prediction: Prediction) -> "tuple[KeyFigure, ...]":
    """Return the memory that torch will report on a GPU; nothing for a CPU."""
    from tutti.reporting.plan_page import KeyFigure

    if prediction.allocator is None:
        return ()
    allocated, reserved = prediction.allocator.allocated, prediction.allocator.reserved
    also = f"of it reserved by torch; {nbytes(allocated.value)} allocated"
    return (KeyFigure(name="Reserved", value=nbytes(reserved.value), also=also),)


def exposed_words(plans: Iterable[Plan]) -> str:
    """Return the heading for exposed communication; with pipeline stages, predictions count bubbles in it."""
    return "exposed comm. or bubble" if any(plan.degree("stage") > 1 for plan in plans) else "exposed comm."


def _alternatives(choice: Choice, top: int) -> "PageTable":
    from tutti.reporting.plan_page import PageTable, TableRow

    every_row, objective = rows(choice), choice.request.objective
    extra = [objective] if objective not in ("throughput", "memory") else []
    columns = [
        "ranks",
        "plan",
        "microbatches",
        "precision",
        "step",
        exposed_words((choice.best, *(other.plan for other in choice.alternatives[:top]))),
        "memory per rank",
        *extra,
        "verdict",
    ]
    shown = [
        TableRow(
            cells=(
                str(row.ranks), f"{row.mesh}; {row.settings}" if row.settings else row.mesh, str(row.microbatches),
                row.precision, row.step, row.exposed, row.memory, *([row.value] if extra else []), row.reason,
            ),
            kind="chosen" if row.chosen else "" if row.fits else "off",
        )
        for row in every_row[: top + 1]
    ]  # fmt: skip
    more = len(every_row) - len(shown)
    return PageTable(
        title="The alternatives",
        under="The chosen plan and the nearest others." + (f" {more} more were considered." if more else ""),
        columns=tuple(columns),
        rows=tuple(shown),
        right=frozenset({0, 2, 4, 5, 6, *([7] if extra else [])}),
    )


def _scenario_table(planned: Planned) -> "tuple[PageTable, ...]":
    from tutti.reporting.plan_page import PageTable, TableRow

    if not planned.scenarios:
        return ()
    return (
        PageTable(
            title="What if",
            under="The best plan for each changed cluster.",
            columns=SCENARIO_COLUMNS,
            rows=tuple(TableRow(cells=cells) for cells in scenario_rows(planned)),
            right=frozenset({2, 3, 4}),
        ),
    )


def write_page(page: "PlanPage", path: Path) -> None:
    """Write the page to a file.

    Raises:
        ReportError: the file cannot be written.
    """
    from tutti.reporting.plan_page import plan_html

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plan_html(page), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path} cannot be written ({error.strerror}); name another file with --html") from None


def standard_output() -> "Console":
    """Return the console for results that people read: as wide as COLUMNS or the terminal, or 80 columns."""
    from tutti.terminal import results_console

    return results_console()
