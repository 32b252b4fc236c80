"""Render reports for a terminal: facts, quality, time, predicted against measured values, and findings."""

import io

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tutti.config.prediction import Phase
from tutti.config.run_report import Quantity, RuleFinding, RuleOutcome, RunReport
from tutti.config.several_runs import Comparison
from tutti.reporting.comparison import labels
from tutti.reporting.fitted_table import FittedTable
from tutti.reporting.formatting import (
    CARRIED,
    PHASE_NAMES,
    plural,
    quality_text,
    show,
    show_interval,
    signed_percent,
)
from tutti.reporting.honesty_rules import TITLES
from tutti.reporting.rule_outcomes import checked
from tutti.terminal import PlainConsole

BAR_WIDTH = 52
UNBROKEN = "\N{NO-BREAK SPACE}"
_COLOURS: dict[Phase, str] = {
    "data": "yellow",
    "forward": "blue",
    "backward": "bright_blue",
    "exposed_communication": "red",
    "optimizer": "magenta",
    "evaluation": "green",
    "other": "bright_black",
}
_MARKS: dict[Phase, str] = {
    "data": "d",
    "forward": "F",
    "backward": "B",
    "exposed_communication": "c",
    "optimizer": "o",
    "evaluation": "e",
    "other": "·",
}
_SEVERITY = {"refuse": ("refused", "bold red"), "warn": ("warning", "yellow"), "note": ("note", "dim")}


def with_evidence(quantity: Quantity) -> str:
    """Format a quantity with its evidence: "1.41 s (measured)"."""
    return show(quantity) if quantity.value is None else f"{show(quantity)} ({quantity.evidence})"


def report_table(report: RunReport) -> RenderableType:
    """Build the report of one run for a rich console."""
    parts: list[RenderableType] = [Text(report.name, style="bold"), Text(report.headline), Text("")]
    parts += [_facts(report), Text(""), _time(report)]
    if report.communication:
        parts += [Text(""), _communication(report)]
    if report.experts:
        parts += [Text(""), _experts(report)]
    if report.checks:
        parts += [Text(""), _checks(report)]
    parts += [Text(""), findings_table(report.findings), Text(""), outcomes_table(report.outcomes)]
    return Padding(Group(*parts), (1, 2))


def _facts(report: RunReport) -> Table:
    """Build the table of key figures."""
    quality = report.quality
    table = Table.grid(padding=(0, 3))
    name = f"{quality.name} {quality.metric}".strip() or "quality"
    value = quality.test_value
    text = show(value) if value.value is None else f"{quality_text(value.value)} ({value.evidence}, last evaluation)"
    table.add_row(name, text)
    if quality.target.value is not None:
        reached = report.to_target
        took = f"reached after {show(reached.steps)}, {show(reached.epochs)}, {with_evidence(reached.time)}"
        table.add_row("target", f"{quality_text(quality.target.value)}: {took if quality.reached else 'missed'}")
    verdict, noise = report.verification, report.noise.critical_batch if report.noise else None
    for label, fact in (
        ("wall time", with_evidence(report.time.wall)),
        ("step time", f"{with_evidence(report.time.per_step)}, {report.time.per_step.note}"),
        ("throughput", with_evidence(report.throughput)),
        ("peak memory", with_evidence(report.memory_peak)),
        ("cost", with_evidence(report.device_seconds)),
        *(
            ()
            if report.energy.value is None
            else (("energy", f"{with_evidence(report.energy)}, {report.energy.note}"),)
        ),
        *(() if report.price.value is None else (("price", f"{with_evidence(report.price)}, {report.price.note}"),)),
        ("rate", _rate(report)),
        *(() if noise is None else (("critical batch", f"{with_evidence(noise)}, {noise.note}"),)),
        ("hardware", f"{plural(report.system.ranks.value or 1, 'rank')}, {report.system.device_model}"),
        *(
            (f"replicas' {name}", f"{with_evidence(quantity)}, {quantity.note}")
            for name, quantity in report.replicas.items()
        ),
        ("verified", "no" if verdict is None else verdict.sentence or ("PASS" if verdict.passed else "FAIL")),
    ):
        table.add_row(label, fact)
    return table


def _rate(report: RunReport) -> str:
    """Format the FLOP rate and its fraction of the peak."""
    flops = report.flops
    if flops.rate.value is None:
        return show(flops.rate)
    if flops.peak_fraction.value is None:
        return f"{with_evidence(flops.rate)}, {flops.dtype}"
    share = f"{show(flops.peak_fraction)} of the dense {flops.dtype} peak"
    return f"{with_evidence(flops.rate)}, {share} ({flops.peak.evidence})"


def _time(report: RunReport) -> RenderableType:
    """Build a bar of the wall time by phase, with a legend below it."""
    wall = report.time.wall.value or 0
    shares = {p: (q.value or 0) / wall for p, q in report.time.breakdown.items() if wall and q.value}
    bar, legend = Text(), Text()
    for phase, share in shares.items():
        bar.append(_MARKS[phase] * round(share * BAR_WIDTH), style=f"{_COLOURS[phase]} reverse")
        words = f"{_MARKS[phase]} {PHASE_NAMES[phase]} {share:.0%}".replace("%", " %").replace(" ", UNBROKEN)
        legend.append(words, style=_COLOURS[phase])
        legend.append("   ")
    total = Text(f"parts sum to {show(report.time.accounted)} of the wall time (measured)", style="dim")
    return Group(bar, legend, total)


def _communication(report: RunReport) -> RenderableType:
    """Build the table of communication per step, by axes and content."""
    title = Text(f"communication per step (measured, {report.communication[0].sent.note})", style="dim")
    table = FittedTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    headings = ("axes", "content", "exchanges", "sent", "in progress", "exposed", "hidden")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in headings[:2] else "right")
    for channel in report.communication:
        numbers = (channel.exchanges, channel.sent, channel.in_progress, channel.exposed, channel.hidden)
        table.add_row(channel.axes.replace("+", " and "), CARRIED[channel.carried], *map(_number, numbers))
    return Group(title, table)


def _experts(report: RunReport) -> Table:
    table = FittedTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("mixture of experts", "tokens' choices", "dropped", "share dropped", "balance loss"):
        table.add_column(heading, justify="left" if heading == "mixture of experts" else "right")
    for mixture in report.experts:
        table.add_row(
            mixture.name or "the model",
            *map(_number, (mixture.assigned, mixture.dropped, mixture.share, mixture.balance_loss)),
        )
    return table


def _number(quantity: Quantity) -> str:
    return "" if quantity.value is None else show(quantity)


def _checks(report: RunReport) -> Table:
    table = FittedTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("", "predicted", "interval", "measured", "error"):
        table.add_column(heading, justify="left" if heading in ("", "interval") else "right")
    for check in report.checks:
        error = "" if check.error.value is None else signed_percent(check.error.value)
        style = "red" if check.within is False else ""
        interval = show_interval(check.predicted)
        table.add_row(check.name, show(check.predicted), interval, show(check.measured), Text(error, style=style))
    return table


def findings_table(findings: tuple[RuleFinding, ...], names: list[str] | None = None) -> RenderableType:
    """Build the list of findings, the most severe first."""
    if not findings:
        return Text("No rule that could be checked objects.")
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        word, style = _SEVERITY[finding.severity]
        who = names[finding.run] if names and finding.run is not None else ""
        prefix = f"{who}: " if who not in finding.sentence else ""
        table.add_row(Text(word, style=style), Text(prefix + finding.sentence))
    return table


def outcomes_table(outcomes: tuple[RuleOutcome, ...]) -> RenderableType:
    """Build the list of rules that could not be checked, below how many could."""
    number = checked(outcomes)
    whole = number == len(outcomes)
    heading = f"{number} of the {len(outcomes)} rules of honest reporting could be checked"
    table = Table.grid(padding=(0, 2))
    for item in outcomes:
        if item.missing and item.outcome == "unstated":
            table.add_row(
                Text("not stated", style="bold red"), Text(f"{item.rule}. {TITLES[item.rule]}: {item.missing}.")
            )
    return Group(Text(f"{heading}{'' if whole else ':'}", style="green" if whole else "red"), table)


def comparison_table(comparison: Comparison) -> RenderableType:
    """Build the comparison for a rich console."""
    to_target = all(run.quality.target.value is not None for run in comparison.runs)
    quality = comparison.runs[0].quality
    table = FittedTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    time_name = "time to target" if to_target else "wall time"
    headings = ("run", f"{quality.name} {quality.metric}".strip() or "quality", time_name, "throughput", "cost")
    for heading in (*headings, "speed-up", "efficiency"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for row in comparison.rows:
        value = row.quality.value
        speed = "refused" if row.refusal else show(row.speedup)
        efficiency = "" if row.efficiency.value is None else show(row.efficiency)
        table.add_row(
            row.name,
            show(row.quality) if value is None else quality_text(value),
            show(row.time),
            show(row.throughput),
            show(row.device_seconds),
            Text(speed, style="red" if row.refusal else ""),
            efficiency,
        )
    parts: list[RenderableType] = [Text(comparison.headline), Text(""), table, Text("all values measured", style="dim")]
    if comparison.differences:
        parts += [Text(""), _differences(comparison)]
    parts += [Text(""), findings_table(comparison.findings, labels(comparison.runs))]
    parts += [Text(""), outcomes_table(comparison.outcomes)]
    return Padding(Group(*parts), (1, 2))


def _differences(comparison: Comparison) -> Table:
    table = FittedTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("what differs")
    for name in labels(comparison.runs):
        table.add_column(name)
    for difference in comparison.differences:
        table.add_row(difference.name, *difference.values)
    return table


def as_text(renderable: RenderableType, width: int = 110) -> str:
    """Render to plain text."""
    console = PlainConsole(
        file=io.StringIO(), width=width, color_system=None, legacy_windows=False, emoji=False, force_jupyter=False
    )
    console.print(renderable)
    file = console.file
    text = file.getvalue() if isinstance(file, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
