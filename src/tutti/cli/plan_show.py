"""What `tutti plan` prints: the choice in words, a table of plans, other circumstances, the difference of two plans."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.cli.common import console, emit
from tutti.cli.outlook import (
    SCENARIO_COLUMNS,
    Scenario,
    exposed_words,
    scenario_rows,
    show_curve,
    show_trials,
    standard_output,
    trust_here,
)
from tutti.config import serialization
from tutti.config.plan import Plan
from tutti.planner import Choice, difference, explain, rows

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.cli.outlook import Planned
    from tutti.cli.plan_options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenarios:
    """What --what-if answers: the choice now, and each changed one."""

    now: Choice
    scenarios: tuple[Scenario, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What --diff answers; no sentences where both plans mean the same."""

    first: Plan
    second: Plan
    differences: tuple[str, ...]


def show_choice(planned: "Planned", options: "Options") -> None:
    """The choice in words, the table, its step as it falls, what the prediction stands on, and how to run the plan."""
    from tutti.cli.timeline_view import show_timeline

    choice, out = planned.choice, standard_output()
    out.print(explain(choice), markup=False, soft_wrap=True)
    out.print(table(choice, options.top))
    hidden = len(choice.alternatives) - options.top
    if hidden > 0:
        out.print(f"{hidden} more were considered; --top N shows more, --json lists all", style="dim")
    show_timeline(out, planned.timeline)
    if planned.scenarios:
        out.print(_scenarios(planned))
    if planned.scaling is not None:
        show_curve(out, planned.scaling)
    if planned.trials is not None:
        show_trials(out, planned.trials)
    trust = trust_here(choice.cluster)
    if trust:
        out.print(f"{trust} (measured; tutti report --history)", markup=False, soft_wrap=True)
    for note in choice.prediction.notes[1:]:
        out.print(f"note: {note}", markup=False, soft_wrap=True, style="dim")
    if options.output is None:
        return
    script = " ".join(options.target) or "SCRIPT"
    console.print(f"plan written to {options.output}: tutti run --plan {options.output} {script}", soft_wrap=True)


def table(choice: Choice, top: int) -> "Table":
    """The chosen plan and the nearest others. All numbers are predicted."""
    from rich.table import Table

    found = rows(choice)[: top + 1]
    shown = Table(title=f"Plans by predicted {_measure(choice)}", title_justify="left")
    shown.add_column("ranks", justify="right", no_wrap=True)
    shown.add_column("plan", overflow="fold")
    shown.add_column("micro-\nbatches", justify="right", no_wrap=True)
    shown.add_column("precision", no_wrap=True)
    exposed = exposed_words((choice.best, *(one.plan for one in choice.alternatives[:top])))
    for name in ("step", exposed.replace(" ", "\n", 1), "memory\na rank"):
        shown.add_column(name, justify="right", no_wrap=True)
    extra = choice.request.objective not in ("throughput", "memory")
    if extra:
        shown.add_column(choice.request.objective, justify="right", no_wrap=True)
    shown.add_column("verdict", overflow="fold", ratio=2)
    for row in found:
        ranks = f"{row.ranks} by speed" if row.shares == "by speed" else str(row.ranks)
        mesh = f"{row.mesh}\n{row.settings}" if row.settings else row.mesh
        values = [ranks, mesh, str(row.microbatches), row.precision, row.step, row.exposed, row.memory]
        values += [row.value] if extra else []
        style = "bold green" if row.chosen else None if row.fits else "red"
        shown.add_row(*values, row.reason, style=style)
    return shown


def _measure(choice: Choice) -> str:
    names = {"throughput": "step time", "memory": "memory of a rank", "time-to-quality": "time to quality"}
    return names.get(choice.request.objective, choice.request.objective)


def document(planned: "Planned") -> "Choice | Scenarios | Planned":
    """What --json prints: the choice, with the changed clusters' where they were asked for; all where there is more."""
    if planned.scaling is not None or planned.trials is not None:
        return planned
    return Scenarios(now=planned.choice, scenarios=planned.scenarios) if planned.scenarios else planned.choice


def _scenarios(planned: "Planned") -> "Table":
    """The best plan now beside the best one in each changed cluster; the cost where there are prices."""
    from rich.table import Table

    found = scenario_rows(planned)
    shown = Table(title="What if", title_justify="left")
    kept = [at for at, name in enumerate(SCENARIO_COLUMNS) if name != "cost" or any(cells[at] for cells in found)]
    for at in kept:
        name = SCENARIO_COLUMNS[at]
        text = name in ("cluster", "best plan", "against now")
        shown.add_column(name, overflow="fold", justify="left" if text else "right", no_wrap=not text)
    for cells in found:
        shown.add_row(*(cells[at] for at in kept))
    return shown


def show_difference(first: Path, second: Path, *, as_json: bool) -> None:
    """How two plan files differ, in plain words."""
    plans = serialization.load(Plan, first), serialization.load(Plan, second)
    found = difference(*plans, names=(first.name, second.name))
    if as_json:
        emit(Differences(first=plans[0], second=plans[1], differences=found))
        return
    out = standard_output()
    for sentence in found or (f"{first.name} and {second.name} mean the same",):
        out.print(sentence, markup=False, soft_wrap=True)
