"""Render reports as self-contained HTML: style and figures are inline, with no scripts and no external references."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2

from tutti.config.run_report import MetricCurve, Quantity, RankReport, RuleFinding, RuleOutcome, RunReport
from tutti.config.safe_text import plain_text
from tutti.config.several_runs import Comparison
from tutti.config.version import VERSION
from tutti.reporting.comparison import labels
from tutti.reporting.formatting import (
    CARRIED,
    EVIDENCE,
    PHASE_NAMES,
    alike,
    plural,
    prefixed,
    quality_text,
    show,
    show_interval,
    signed_percent,
    significant,
    split_unit,
)
from tutti.reporting.honesty_rules import TITLES
from tutti.reporting.measurements import exposed_phases, seen
from tutti.reporting.rank_timeline import RankTimeline
from tutti.reporting.report_figures import (
    MAX_BARS,
    checks_plot,
    communication_plot,
    curve_plot,
    memory_plot,
    stacked_plot,
)
from tutti.reporting.rule_outcomes import checked
from tutti.reporting.svg import Plot
from tutti.reporting.timeline_figure import timeline_plot

SEVERITIES = {"refuse": "Refused", "warn": "Warning", "note": "Note"}


def environment() -> jinja2.Environment:
    """Return the Jinja environment that all pages share: templates, formatting functions and style."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tutti", "reporting"),
        autoescape=True,
        finalize=lambda value: plain_text(value) if type(value) is str else value,  # markup of our own stays
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(
        show=show,
        alike=alike,
        split_unit=split_unit,
        interval=show_interval,
        percent=signed_percent,
        quality_text=quality_text,
        evidence=EVIDENCE,
        severities=SEVERITIES,
        phases=PHASE_NAMES,
        version=VERSION,
        style=files("tutti.reporting").joinpath("style.css").read_text(encoding="utf-8"),
    )
    return environment


def report_html(report: RunReport, timeline: RankTimeline | None = None) -> str:
    """Render the page of one run; with the timeline of its last steps, if its ranks have flight records."""
    timeline = timeline or RankTimeline()
    wall = report.time.wall.value

    def share(quantity: Quantity) -> str:
        return f"{(quantity.value or 0) / wall:.1%}".replace("%", " %") if wall else ""

    return (
        environment()
        .get_template("report.html")
        .render(
            r=report,
            badges=badges(report),
            learning=_learning_plots(report),
            where_time=_time_plots(report),
            prediction_plots=[plot for plot in (checks_plot(report), memory_plot(report)) if plot],
            boxes=boxes(report),
            rules=_rule_table(report),
            carried=CARRIED,
            communication_plot=communication_plot(report),
            timeline=timeline,
            timeline_plot=timeline_plot(timeline),
            exposed_phases=exposed_phases(report.communication),
            share=share,
            computing=_computing,
            in_rank=alike([_computing(rank) for rank in report.ranks]),
            **_key_figures(report),
        )
    )


def comparison_html(comparison: Comparison) -> str:
    """Render the page that compares several runs."""
    first = comparison.runs[0]
    to_target = all(run.quality.target.value is not None for run in comparison.runs)
    return (
        environment()
        .get_template("compare.html")
        .render(
            c=comparison,
            names=labels(comparison.runs),
            badges=_finding_badges(comparison.findings, comparison.outcomes),
            quality_name=_quality_name(first),
            time_name="time to target" if to_target else "wall time",
            rules=_rule_table(comparison),
            learning=_overlaid(comparison),
            where_time=[
                plot
                for plot in [
                    stacked_plot(
                        [
                            (name, run.time.breakdown)
                            for name, run in zip(labels(comparison.runs), comparison.runs, strict=True)
                        ],
                        title="Wall time by phase",
                        note="measured, with evaluation; shares within each run",
                        name="breakdown",
                    )
                ]
                if plot
            ],
        )
    )


def badges(report: RunReport) -> list[tuple[str, str]]:
    """Return the page's badges, as (kind of badge, text): status, verification, target and findings."""
    result = [("" if report.status == "completed" else "bad", report.status.capitalize())]
    verdict = report.verification
    if verdict is None:
        result.append(("warn", "Not verified against one device"))
    elif verdict.passed:
        result.append(("good", "Verified against one device"))
    elif not verdict.comparable:
        result.append(("warn", "Not comparable with one device"))
    else:
        result.append(("bad", "Verification failed"))
    if report.quality.reached is not None:
        result.append(("good", "Target reached") if report.quality.reached else ("bad", "Target missed"))
    return result + _finding_badges(report.findings, report.outcomes)


def _finding_badges(findings: Sequence[RuleFinding], outcomes: Sequence[RuleOutcome]) -> list[tuple[str, str]]:
    """Return a badge for refusals, one for warnings, and one for how many of the twelve rules could be checked."""
    count = Counter(finding.severity for finding in findings)
    result = []
    if count["refuse"]:
        result.append(("bad", f"{plural(count['refuse'], 'refusal')} by the rules"))
    if count["warn"]:
        result.append(("warn", plural(count["warn"], "warning")))
    number = checked(outcomes)
    return [*result, ("good" if number == len(outcomes) else "bad", f"{number} of {len(outcomes)} rules checked")]


def _quality_name(report: RunReport) -> str:
    """Return the heading of the quality: the evaluation and its metric."""
    quality = report.quality
    return f"{quality.name} {quality.metric}".strip().capitalize() or "Quality"


def _key_figures(report: RunReport) -> dict[str, str]:
    """Return the headings and small print of the key figures."""
    quality, reached = report.quality, report.to_target
    count = quality.eval_samples.value
    also = f"on {significant(count)} samples, at the end" if count else ""
    if quality.target.value is not None:
        also = f"target {quality_text(quality.target.value)}; {also}"
    steps = f"after {show(reached.steps)}, {show(reached.epochs)}" if reached.steps.value is not None else "missed"
    step = next((check for check in report.checks if check.name == "step time"), None)
    predicted = f"predicted {show(step.predicted)}" if step else "not predicted"
    fraction = report.flops.peak_fraction
    rate = f"{show(fraction)} of the {report.flops.dtype} peak" if fraction.value is not None else "steady steps"
    return {
        "quality_name": _quality_name(report),
        "quality_also": also,
        "time_also": steps,
        "wall_also": f"{show(report.steps)}, {show(report.epochs)}" if report.epochs.value else show(report.steps),
        "step_also": predicted,
        "throughput_also": rate,
        "cost_also": report.device_seconds.note,
    }


def _computing(rank: RankReport) -> Quantity:
    """Return the seconds that a rank computed: forward, backward and optimizer."""
    parts = [q.value or 0 for phase, q in rank.breakdown.items() if phase in ("forward", "backward", "optimizer")]
    return seen(sum(parts) if parts else None, "s", "forward, backward and optimizer")


def _learning_plots(report: RunReport) -> list[Plot]:
    """Draw loss and quality, each over wall time and over samples."""
    losses = [(curve, curve.name) for curve in report.curves if curve.metric == "loss"]
    metric = report.quality.metric
    qualities = [(curve, curve.name) for curve in report.curves if curve.metric == metric and metric != "loss"]
    quality_name = metric.capitalize() or "Quality"
    target = None if report.quality.target.value is None else float(report.quality.target.value)
    loss_target = target if metric == "loss" else None
    plots = [
        curve_plot(losses, over="time", title="Loss over wall time", name="loss-time", target=loss_target),
        curve_plot(losses, over="samples", title="Loss over samples", name="loss-samples", target=loss_target),
        curve_plot(qualities, over="time", title=f"{quality_name} over wall time", name="quality-time", target=target),
        curve_plot(
            qualities, over="samples", title=f"{quality_name} over samples", name="quality-samples", target=target
        ),
    ]
    return [plot for plot in plots if plot]


def _overlaid(comparison: Comparison) -> list[Plot]:
    """Draw the losses and qualities of all runs on shared axes."""
    names = labels(comparison.runs)
    judged = comparison.runs[0].quality

    def pick(wanted: str) -> list[tuple[MetricCurve, str]]:
        pairs = zip(comparison.runs, names, strict=True)
        return [(curve, name) for run, name in pairs for curve in run.curves if curve.name == wanted]

    name = f"{judged.name} {judged.metric}"
    target = None if judged.target.value is None else float(judged.target.value)
    plots = [
        curve_plot(pick(wanted), over=over, title=f"{wanted.capitalize()} over {words}", name=f"{key}-{over}",
                   target=value, by_run=True)
        for key, wanted, value in (("loss", "training loss", None), ("quality", name, target))
        for over, words in (("time", "wall time"), ("samples", "samples"))
    ]  # fmt: skip
    return [plot for plot in plots if plot]


def _time_plots(report: RunReport) -> list[Plot]:
    """Draw the run's wall time, the steps of every rank, and one step as predicted and measured."""
    ranks = [(f"rank {rank.rank}", rank.breakdown) for rank in report.ranks][:MAX_BARS]
    more = "" if len(report.ranks) <= MAX_BARS else f"; the first {MAX_BARS} of {len(report.ranks)} ranks"
    plots = [
        stacked_plot(
            [("run", report.time.breakdown)],
            title="Wall time by phase",
            note="measured on rank 0, with evaluation and checkpoints",
            name="breakdown",
            wall=float(report.time.wall.value or 0),
        ),
        stacked_plot(ranks, title="Steps by rank", note=f"measured{more}", name="ranks") if len(ranks) > 1 else None,
        stacked_plot(
            [("predicted", report.predicted_phases), ("measured", report.time.step_phases)],
            title="One step, predicted and measured",
            note="hatched: predicted; solid: measured; they add up to the step time",
            name="step",
            hatched=frozenset({0}),
            unit="time of a step",
        )
        if report.predicted_phases
        else None,
    ]
    return [plot for plot in plots if plot]


def _rule_table(report: RunReport | Comparison) -> list[dict[str, Any]]:
    """Return a row for each rule: its outcome, and what is not stated and how to state it."""
    rows = []
    for item in report.outcomes:
        codes = dict.fromkeys(
            f"{SEVERITIES[finding.severity].lower()} ({finding.code})"
            for finding in report.findings
            if finding.rule == item.rule
        )
        outcome = (
            ", ".join(codes)
            or {"kept": "no objection", "unstated": "not stated", "objection": "objection"}[item.outcome]
        )
        if item.outcome == "unstated" and codes:
            outcome += ", not stated"
        rows.append(
            {
                "number": item.rule,
                "title": TITLES[item.rule],
                "kind": "yes" if item.outcome == "kept" else "no",
                "outcome": outcome,
                "missing": item.missing,
            }
        )
    return rows


@dataclass(frozen=True, slots=True)
class Digest:
    """A hexadecimal digest; the page shows its first characters."""

    hash: str | None


Entry = tuple[str, Quantity | Digest | str | None]
Box = tuple[str, list[Entry]]


def boxes(report: RunReport) -> list[Box]:
    """Return the page's boxes of settings, in order.

    Returns:
        (title, entries) of each box; an entry is (name, value).
    """
    return [
        ("Hardware", _hardware(report)),
        ("Recipe", _recipe(report)),
        ("Data and work", _data(report)),
        ("Provenance", _provenance(report)),
    ]


def _hardware(report: RunReport) -> list[Entry]:
    system = report.system
    entries: list[Entry] = [
        ("device", system.device_model),
        ("ranks", system.ranks),
        ("hosts", system.hosts),
        ("cores used", system.cores_used),
        ("cores granted", system.cores_granted),
        ("year", system.year),
    ]
    entries += [(f"dense {dtype} peak", peak) for dtype, peak in system.peak_dense_flops.items()]
    for link in system.links:
        entries += [(f"{link.tier} latency", link.latency), (f"{link.tier} bandwidth", link.bandwidth)]
    versions = ", ".join(f"{name} {number}" for name, number in system.versions.items())
    sums = [("gradients are reduced through", system.sums)] if system.sums else []
    sums += [("attention over mesh.context", system.attention)] if system.attention else []
    return [*entries, ("backend", system.backend), *sums, ("platform", system.platform), ("versions", versions)]


def _recipe(report: RunReport) -> list[Entry]:
    recipe, batch = report.recipe, report.batch
    return [
        ("optimizer", recipe.optimizer),
        ("learning rate", recipe.lr),
        ("learning-rate rule", recipe.lr_rule or "none"),
        ("scheduler", recipe.scheduler or "none"),
        ("clipping norm", recipe.clip_norm if recipe.clip_norm.value is not None else "none"),
        ("global batch", batch.global_size),
        ("batch per rank", batch.local_size),
        ("microbatch per rank", batch.micro_size),
        ("last batch", recipe.last_batch),
        *_noise(report),
        ("precision", recipe.precision),
        ("gradient reductions", recipe.compress or "exact"),
        ("seed", recipe.seed),
        ("plan", report.plan),
        *((f"replicas' {name}", value) for name, value in report.replicas.items()),
    ]


def _noise(report: RunReport) -> list[Entry]:
    """Return the entries of the gradient noise scale; empty if it was not measured."""
    noise = report.noise
    return [] if noise is None else [("critical batch", noise.critical_batch), ("noise measured in", noise.measured)]


def _data(report: RunReport) -> list[Entry]:
    data, flops = report.data, report.flops
    return [
        ("training data", f"{data.name} ({data.kind})"),
        ("training samples", data.train_samples),
        ("training SHA-256", Digest(data.train_sha256)),
        ("hash covers", data.hash_covers),
        ("evaluation data", data.test_name),
        ("evaluation SHA-256", Digest(data.test_sha256)),
        ("samples in both", data.train_test_overlap),
        ("input shape", data.input_shape),
        (
            "native shape",
            f"{data.native_shape}, because {data.shape_reason}" if data.shape_reason else data.native_shape,
        ),
        ("data at start", f"{data.start_state}: {data.state_reason}" if data.state_reason else data.start_state),
        ("waiting for data", report.time.load_wait),
        ("samples trained on", report.samples_seen),
        ("FLOPs per sample", flops.model_per_sample),
        ("FLOP rate", flops.rate),
        ("fraction of peak", flops.peak_fraction),
        ("bytes sent per rank and step", report.sent_per_step),
    ]


def _with_reason(value: str | None, reason: str) -> str | None:
    return f"{value}: {reason}" if value and reason else value


def _provenance(report: RunReport) -> list[Entry]:
    dirty = {True: "yes", False: "no"}.get(report.git_dirty) if report.git_dirty is not None else None
    stop = report.stop
    ended = f"{stop.rule} {prefixed(stop.value.value, '').strip()}" if stop.rule and stop.value.value else stop.rule
    return [
        ("script", report.script),
        ("commit", Digest(report.git_commit)),
        ("uncommitted changes", dirty),
        ("configuration SHA-256", Digest(report.config_sha256)),
        ("packages SHA-256", Digest(report.env_lock_sha256)),
        ("stopped by", ended),
        ("stopped early", stop.early_reason or None),
        ("scope", report.scope),
        ("energy", report.energy),
        ("price", report.price),
        ("generations", report.time.generations),
        ("tuning trials", report.tuning.trials),
        ("baseline", report.baseline.system),
        ("verification", report.verification.sentence if report.verification else None),
        *_verified(report),
    ]


def _verified(report: RunReport) -> list[Entry]:
    """Return the entries of the verification; empty if the run was not verified."""
    verdict = report.verification
    if verdict is None:
        return []
    return [
        ("largest difference", verdict.largest),
        ("tolerance", verdict.tolerance),
        ("verified steps", verdict.steps),
        ("arithmetic", verdict.arithmetic),
    ]
