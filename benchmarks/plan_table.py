"""The summary of the measured plans: regret of the choice, and errors of predictions by case and by kind of plan."""

import statistics
from collections.abc import Iterable
from typing import Any

from tutti.config.mesh_axes import parse_mesh

Row = dict[str, Any]

BEYOND = "*"
"""Marks cases with more ranks than cores."""


ERRORS = {
    "error": "step_time_error",
    "error_at_pace": "step_time_error_at_pace",
    "memory_error": "memory_error",
}
"""By entry of a plan, the name of its errors in the summary."""


def judged(rows: list[Row], planner: str | None) -> Row:
    """Return the judgement of a case, and add each row's error: (predicted - measured) / measured, of time and of
    memory.

    The judgement has the best measured plan, the planner's choice and the plan of shortest predicted time, with
    the regret of both, and the mean errors. If the machine's speed during the plans is known, it also has the
    error of predictions for that speed, and the planner's regret among times that are scaled to one speed by the
    ratio of the two predictions.
    """
    for row in rows:
        if "step_s" in row:
            row["measured_s"] = statistics.median(map(statistics.median, row.get("visits_s") or [row["step_s"]]))
            if "predicted_s" in row:
                row["error"] = row["predicted_s"] / row["measured_s"] - 1
            if "predicted_at_pace_s" in row:
                row["error_at_pace"] = row["predicted_at_pace_s"] / row["measured_s"] - 1
                row["measured_at_probes_pace_s"] = row["measured_s"] * row["predicted_s"] / row["predicted_at_pace_s"]
        if "peak_nbytes" in row and "predicted_peak_nbytes" in row:
            row["memory_error"] = row["predicted_peak_nbytes"] / row["peak_nbytes"] - 1
    measured = {row["name"]: row["measured_s"] for row in rows if "measured_s" in row}
    both = [row for row in rows if "error" in row]
    result: Row = {
        "measured": len(measured),
        "refused": [row["name"] for row in rows if "refused" in row],
        "failed": [row["name"] for row in rows if "failed" in row],
        "not_predicted": [row["name"] for row in rows if "not_predicted" in row],
    }
    if measured:
        best = min(measured, key=lambda name: measured[name])
        result |= {"best": best, "best_s": measured[best]}
        if planner in measured:
            result |= {"planner_s": measured[planner], "planner_regret": measured[planner] / measured[best] - 1}
        if both:
            first = min(both, key=lambda row: row["predicted_s"])
            result |= {
                "predicted_best": first["name"],
                "predicted_best_regret": first["measured_s"] / measured[best] - 1,
                "mean_absolute_error": statistics.fmean(abs(row["error"]) for row in both),
                "mean_error": statistics.fmean(row["error"] for row in both),
                "errors": len(both),
            }
        result |= _at_pace(rows, planner)
    return result


def _at_pace(rows: list[Row], planner: str | None) -> Row:
    """Return error and regret of the rows whose speed is known."""
    known = {row["name"]: row for row in rows if "error_at_pace" in row}
    if not known:
        return {}
    result: Row = {
        "mean_absolute_error_at_pace": statistics.fmean(abs(row["error_at_pace"]) for row in known.values()),
        "pace_parts": [
            min(row["pace_part"] for row in known.values()),
            max(row["pace_part"] for row in known.values()),
        ],
    }
    if planner in known:
        times = {name: row["measured_at_probes_pace_s"] for name, row in known.items()}
        result["planner_regret_at_pace"] = times[planner] / min(times.values()) - 1
    return result


def kind_of(plan_name: str) -> str:
    """Return the axes of a plan and its strategies: predictions of one kind have errors in common."""
    mesh, _, strategies = plan_name.partition(", ")
    axes = " x ".join(parse_mesh(mesh))
    words = [word for word in strategies.split(", ") if word and "microbatches" not in word]
    return ", ".join([axes, *(word.partition(" of ")[0] for word in words)])


def by_kind(cases: list[Row]) -> dict[str, Row]:
    """Return, for each kind of plan, the median of predicted / measured over all cases.

    `beside_replicas` is relative to the `replicate` plan of the same case, on which the machine's load and the
    probed rates have the same effect.
    """
    plain: dict[str, list[float]] = {}
    relative: dict[str, list[float]] = {}
    for case in cases:
        ratios = [(kind_of(row["name"]), 1 + row["error"]) for row in case["plans"] if "error" in row]
        replicas = [ratio for kind, ratio in ratios if kind == "replicate"]
        for kind, ratio in ratios:
            plain.setdefault(kind, []).append(ratio)
            if replicas:
                relative.setdefault(kind, []).append(ratio / replicas[0])
    return {
        kind: {
            "plans": len(values),
            "predicted_over_measured": statistics.median(values),
            "beside_replicas": statistics.median(relative[kind]) if kind in relative else None,
        }
        for kind, values in sorted(plain.items())
    }


def summary(cases: list[Row]) -> Row:
    """Return regrets and errors over all cases, and the same for cases with a core for every rank."""
    result = _total(cases)
    uncontended = [case for case in cases if not case.get("ranks_beyond_cores")]
    if uncontended and len(uncontended) < len(cases):
        result["with_a_core_for_each_rank"] = _total(uncontended)
    return result | {"by_kind": by_kind(cases)}


def _total(cases: list[Row]) -> Row:
    def of(key: str) -> list[float]:
        return [case[key] for case in cases if key in case]

    plans = [row for case in cases for row in case["plans"]]
    errors = [row["error"] for row in plans if "error" in row]
    result: Row = {
        "cases": len(cases),
        "plans": len(plans),
        "plans_measured": sum(of("measured")),
        "plans_refused": sum("refused" in row for row in plans),
        "plans_failed": sum("failed" in row for row in plans),
        "errors": len(errors),
    }
    for key in ("planner_regret", "planner_regret_at_pace", "predicted_best_regret"):
        if values := of(key):
            result[key] = {"median": statistics.median(values), "largest": max(values), "cases": len(values)}
    for key, name in ERRORS.items():
        if values := [row[key] for row in plans if key in row]:
            result[name] = spread_of(values)
    return result


def spread_of(errors: Iterable[float]) -> dict[str, float]:
    """Return mean, median and ninth decile of the errors' absolute values, and their mean with sign."""
    values = list(errors)
    absolute = sorted(map(abs, values))
    return {
        "mean_absolute": statistics.fmean(absolute),
        "median_absolute": statistics.median(absolute),
        "p90_absolute": absolute[min(len(absolute) - 1, int(0.9 * len(absolute)))],
        "mean": statistics.fmean(values),
    }


def say_case(case: Row) -> str:
    """Return one line about a case, to be printed while others still run."""
    return " | ".join(_cells(case))


def rows(result: Row) -> tuple[list[str], list[list[str]]]:
    """Return the table: header, a row for each case, and the summary."""
    header = ["case", "measured", "best", "planner's choice", "loss", "by prediction", "loss", "|error|", "error"]
    header += ["|error| at its pace", "loss at one pace"]
    total = result["summary"]
    table = [list(_cells(case)) for case in result["cases"]]
    uncontended = total.get("with_a_core_for_each_rank")
    table += [_last("median loss, mean error", total)]
    if uncontended is not None:
        table += [_last(f"the same without {BEYOND} (more ranks than cores)", uncontended)]
    return header, table


def _last(words: str, total: Row) -> list[str]:
    def median(key: str) -> str:
        return f"{total[key]['median']:.1%}" if key in total else ""

    error = total.get("step_time_error", {})
    signed = [f"{error[key]:.1%}" if key in error else "" for key in ("mean_absolute", "mean")]
    measured = f"{total['plans_measured']} of {total['plans']}"
    paced = total.get("step_time_error_at_pace", {})
    signed += [f"{paced['mean_absolute']:.1%}" if paced else "", median("planner_regret_at_pace")]
    return [words, measured, "", "", median("planner_regret"), "", median("predicted_best_regret"), *signed]


def _cells(case: Row) -> tuple[str, ...]:
    def part(key: str) -> str:
        return f"{case[key]:.1%}" if key in case else ""

    def timed(key: str, seconds: str, nothing: str) -> str:
        return f"{case[key]} {1e3 * case[seconds]:.0f} ms" if case.get(key) and seconds in case else nothing

    name = case["planner"]["name"]
    return (
        f"{case['rate']}, {case['ranks']} ranks{BEYOND if case['ranks_beyond_cores'] else ''}, {case['model']}",
        f"{case['measured']} of {len(case['plans'])}",
        timed("best", "best_s", "none"),
        f"{name} {1e3 * case['planner_s']:.0f} ms" if "planner_s" in case else str(name or "none"),
        part("planner_regret"),
        str(case.get("predicted_best", "none")),
        part("predicted_best_regret"),
        part("mean_absolute_error"),
        part("mean_error"),
        part("mean_absolute_error_at_pace"),
        part("planner_regret_at_pace"),
    )
