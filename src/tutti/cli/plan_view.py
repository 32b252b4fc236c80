"""The output of `tutti plan`: the choice, a table of plans, changed clusters, and the difference of two plans."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

from tutti.cli.options import emit, run_command
from tutti.cli.prediction_view import (
    SCENARIO_COLUMNS,
    exposed_words,
    scenario_rows,
    show_curve,
    show_trials,
    standard_output,
    trust_here,
)
from tutti.commands.messages import console
from tutti.commands.planned import Scenario
from tutti.config import serialization
from tutti.config.plan import Plan
from tutti.config.prediction import ACTIVITY_LABELS, DEVICE_PARTS, Activity, Omission, Timeline, Track
from tutti.cost_model.cost_notes import nbytes, seconds
from tutti.planner import Choice, difference, explain, rows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tutti.commands.plan_options import PlanOptions
    from tutti.commands.planned import Planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenarios:
    """The JSON document of --what-if: the choice now, and the one for each changed cluster."""

    now: Choice
    scenarios: tuple[Scenario, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The JSON document of --diff; no sentences if both plans mean the same."""

    first: Plan
    second: Plan
    differences: tuple[str, ...]


def show_choice(planned: "Planned", options: "PlanOptions") -> None:
    """Print the choice, the table, the timeline of its step, the notes of the prediction, and how to run the plan."""

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
    if options.output is None or planned.pools:
        return
    words = f"plan written to {options.output}: {run_command(options.output, options.target)}"
    console.print(words, markup=False, soft_wrap=True)


def table(choice: Choice, top: int) -> "Table":
    """Return a table of the chosen plan and the nearest others. All numbers are predicted."""
    from tutti.reporting.fitted_table import FittedTable

    plan_rows = rows(choice)[: top + 1]
    shown = FittedTable(title=f"Plans by predicted {_measure(choice)}", title_justify="left")
    shown.below = ("verdict",)
    shown.add_column("ranks", justify="right", no_wrap=True)
    shown.add_column("plan", overflow="fold")
    shown.add_column("micro-\nbatches", justify="right", no_wrap=True)
    shown.add_column("precision", no_wrap=True)
    exposed = exposed_words((choice.best, *(other.plan for other in choice.alternatives[:top])))
    for name in ("step", exposed.replace(" ", "\n", 1), "memory\nper rank"):
        shown.add_column(name, justify="right", no_wrap=True)
    extra = choice.request.objective not in ("throughput", "memory")
    if extra:
        shown.add_column(choice.request.objective, justify="right", no_wrap=True)
    shown.add_column("verdict", overflow="fold", ratio=2)
    for row in plan_rows:
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
    """Return what --json prints: the choice, with the changed clusters if asked for, or all that is not shown alone."""
    if planned.scaling is not None or planned.trials is not None or planned.pools:
        return planned
    return Scenarios(now=planned.choice, scenarios=planned.scenarios) if planned.scenarios else planned.choice


def _scenarios(planned: "Planned") -> "Table":
    """Return a table of the best plan now and in each changed cluster; the cost only if there are prices."""
    from tutti.reporting.fitted_table import FittedTable

    every_row = scenario_rows(planned)
    shown = FittedTable(title="What if", title_justify="left")
    shown.below = ("compared with now",)
    columns = [
        at for at, name in enumerate(SCENARIO_COLUMNS) if name != "cost" or any(cells[at] for cells in every_row)
    ]
    for at in columns:
        name = SCENARIO_COLUMNS[at]
        text = name in ("cluster", "best plan", "compared with now")
        shown.add_column(name, overflow="fold", justify="left" if text else "right", no_wrap=not text)
    for cells in every_row:
        shown.add_row(*(cells[at] for at in columns))
    return shown


def show_difference(first: Path, second: Path, *, as_json: bool) -> None:
    """Print how two plan files differ, in plain words."""
    plans = serialization.load(Plan, first), serialization.load(Plan, second)
    sentences = difference(*plans, names=(first.name, second.name))
    if as_json:
        emit(Differences(first=plans[0], second=plans[1], differences=sentences))
        return
    out = standard_output()
    for sentence in sentences or (f"{first.name} and {second.name} mean the same",):
        out.print(sentence, markup=False, soft_wrap=True)


LETTERS: dict[Activity, tuple[str, str]] = {
    "data": ("d", "black on green"),
    "forward": ("f", "white on blue"),
    "backward": ("b", "black on bright_cyan"),
    "weights": ("w", "black on cyan"),
    "optimizer": ("u", "white on magenta"),
    "communication": ("=", "black on yellow"),
    "bubble": (".", "dim"),
    "waiting": ("-", "dim"),
    "other": ("o", "dim"),
}
"""The letter and style of each activity of a rank."""

HOLDERS: dict[str, tuple[str, str]] = {
    "parameters": ("P", "white on blue"),
    "gradients": ("G", "black on bright_cyan"),
    "optimizer": ("O", "white on magenta"),
    "activations": ("A", "black on green"),
    "communication": ("C", "black on yellow"),
    "buffers": ("B", "black on white"),
    "reserve": ("R", "white on bright_black"),
    "script": ("S", "black on bright_white"),
}
"""The letter and style of everything that holds memory."""

SHORTEST = 24
"""Letters of a step's drawing at least; what is told of a track goes below where both do not fit in a line."""

TOLD = 0.005
"""Activities below this fraction of a step are not listed beside a track."""


def show_timeline(out: "Console", found: Timeline) -> None:
    """Print the tracks of one predicted step, and the predicted memory of a rank of each track against its limit."""
    time = found.step_time_s
    label = max(len(_name(track, found)) for track in found.tracks)
    told = {id(track): _told(track, time.value) for track in found.tracks}
    beside = min(out.width, 160) - label - max(len(words) for words in told.values()) - 4
    width = beside if beside >= SHORTEST else max(SHORTEST, min(out.width, 160) - label - 2)  # else told below
    left = "" if found.left_out is None else f"; // stands for {found.left_out.microbatches} microbatches left out"
    out.print(
        f"One step, predicted: {seconds(time.value)} ({seconds(time.low)} to {seconds(time.high)}){left}",
        style="bold", markup=False, soft_wrap=True,
    )  # fmt: skip
    letters = ""
    for track in found.tracks:
        line = Text(f"{_name(track, found):<{label}}  ")
        step = drawn(track, found.left_out, time.value, width)
        letters += step.plain
        line.append_text(step)
        if beside >= SHORTEST:
            out.print(line.append(f"  {told[id(track)]}"), soft_wrap=True)
        else:
            out.print(line, soft_wrap=True)
            out.print(Padding(told[id(track)], (0, 0, 0, label + 2)))
    out.print(_legend({ACTIVITY_LABELS[doing]: look for doing, look in LETTERS.items() if look[0] in letters}))
    if found.tracks_left_out:
        out.print(f"{found.tracks_left_out} more rows are not shown", style="dim")
    _show_memory(out, found, label)


def _show_memory(out: "Console", found: Timeline, label: int) -> None:
    """Print the predicted memory of a rank of each track against its limit; names take `label` columns."""
    out.print("Memory of a rank, predicted", style="bold")
    words = {id(track): _used(track) for track in found.tracks}
    width = max(8, min(out.width, 160) - label - max(map(len, words.values())) - 4)
    seen = ""
    for track in found.tracks:
        line = Text(f"{_name(track, found):<{label}}  ")
        line.append_text(held(track, width))
        seen += line.plain[label:]
        over = track.memory.total > track.memory_limit_nbytes
        out.print(line.append(f"  {words[id(track)]}", style="red" if over else ""), soft_wrap=True)
    out.print(_legend({name: look for name, look in HOLDERS.items() if look[0] in seen}))


def _used(track: Track) -> str:
    over = track.memory.total > track.memory_limit_nbytes
    return f"{nbytes(track.memory.total)} of {nbytes(track.memory_limit_nbytes)}" + (": too much" if over else "")


def drawn(track: Track, left: Omission | None, step_s: float, width: int) -> Text:
    """Draw the step of a track in `width` letters, with // for what is left out.

    Each letter stands for an activity of the track in that letter's time. Of several, it is the one whose time so far
    exceeds its letters so far the most. So letters stay in proportion to seconds even where bars are narrow.

    Args:
        track: what to draw.
        left: the part of the step that is not drawn, if any.
        step_s: seconds of the whole step.
        width: number of letters.
    """
    line = Text()
    mark = 2 if left is not None else 0
    away = left.end_s - left.start_s if left is not None else 0.0
    letter_s = (step_s - away) / (width - mark)
    before = round(left.start_s / letter_s) if left is not None else width
    owed: dict[Activity, float] = {}
    for cell in range(width - mark):
        if cell == before:
            line.append("/" * mark, style="dim")
        later = away if cell >= before else 0.0
        shares = _shares(track, cell * letter_s + later, (cell + 1) * letter_s + later)
        for doing, share in shares.items():
            owed[doing] = owed.get(doing, 0.0) + share / letter_s
        chosen = max(shares, key=lambda doing: owed[doing], default=None)
        if chosen is None:
            line.append(" ")
            continue
        owed[chosen] -= 1.0
        letter, style = LETTERS[chosen]
        line.append(letter, style=style)
    return line


def _shares(track: Track, start_s: float, end_s: float) -> dict[Activity, float]:
    """Return the seconds that the track spends on each activity between two moments."""
    shares: dict[Activity, float] = {}
    for bar in track.bars:
        shared = min(bar.end_s, end_s) - max(bar.start_s, start_s)
        if shared > 0:
            shares[bar.doing] = shares.get(bar.doing, 0.0) + shared
    return shares


def held(track: Track, width: int) -> Text:
    """Draw the memory of a rank in `width` letters, one letter for each part, with | where it passes the limit.

    The width stands for the larger of memory and limit.
    """
    line = Text()
    whole = max(track.memory_limit_nbytes, track.memory.total)
    limit = round(width * track.memory_limit_nbytes / whole)
    total, end = 0.0, 0
    for name in DEVICE_PARTS:
        total += getattr(track.memory, name)
        letter, style = HOLDERS[name]
        for cell in range(end, round(width * total / whole)):
            line.append("|" if cell == limit else letter, style="bold red" if cell == limit else style)
        end = round(width * total / whole)
    line.append("." * (width - end), style="dim")
    return line


def _name(track: Track, found: Timeline) -> str:
    stages = {other.stage for other in found.tracks}
    return track.ranks + (f" (stage {track.stage})" if len(stages) > 1 else "")


def _told(track: Track, step_s: float) -> str:
    """Return the fractions of a step, such as "busy 74 %, exposed 5 %, bubble 20 %"."""
    parts = [("busy", track.busy_s)]
    words: dict[Activity, str] = {
        "data": "data", "communication": "exposed", "bubble": "bubble", "waiting": "waiting", "other": "other",
        "hidden": "hidden",
    }  # fmt: skip
    parts += [(word, track.seconds.get(doing, 0.0)) for doing, word in words.items()]
    return ", ".join(f"{word} {100 * lasts / step_s:.0f} %" for word, lasts in parts if lasts > TOLD * step_s)


def _legend(entries: dict[str, tuple[str, str]]) -> Text:
    line = Text("  ")
    for name, (letter, style) in entries.items():
        line.append(letter, style=style)
        line.append(f" {name}   ", style="dim")
    return line
