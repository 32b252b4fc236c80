"""The summary of the rows of `pays`: time to quality in every cell, beside the floor and the best of the others."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pays_methods import AUTOS, CHECKED_ALIKE, METHODS, at_first, stood_for
from record import spread

Rows = list[dict[str, Any]]

AIMS = {"unlimited": None, "1gbit": 1.15, "100mbit": 1.3}
"""By limit, the largest ratio of a time to quality to the floor's that meets the aim."""


def summary(parts: dict[str, Rows], methods: Sequence[str]) -> dict[str, Any]:
    """Return {"cells": {"PART@RATE": {method: ..}}, "verdicts": .., "exact": .., "checked": ..}."""
    cells = {
        f"{part}@{times['rate']}": cell(rows, times, methods)
        for part, rows in parts.items()
        for times in times_of(rows)
    }
    return {
        "cells": cells,
        "verdicts": {name: verdict(entry, name.partition("@")[2]) for name, entry in cells.items()},
        "exact": {part: same_steps(rows) for part, rows in parts.items()},
        "checked": [entry for part, rows in parts.items() for entry in checks(part, rows, cells)],
    }


def times_of(rows: Rows) -> Rows:
    """Return step times by limit, with the peers' among them. Leaves out the floor measured again beside a peer."""
    times_by_limit = [
        {"rate": row["rate"], "step_s": dict(row["step_s"]), "sent_nbytes": dict(row["sent_nbytes"])}
        for row in rows
        if row["kind"] == "time" and "step_s" in row
    ]
    for row in rows:
        for times in times_by_limit:
            if row["kind"] == "peer" and row.get("rate") == times["rate"]:
                for kind in ("step_s", "sent_nbytes"):
                    times[kind][row["method"]] = row[kind][row["method"]]
    return times_by_limit


def steps_of(rows: Rows, method: str) -> list[int | None] | None:
    """Return the steps to quality, one for each seed (None: not reached). All exact methods use those of tutti's
    exact sums.
    """
    plans = {row["name"]: row for row in rows if row["kind"] == "choice" and "name" in row}
    source = stood_for(method, plans) or method
    steps_by_seed = {
        row["seed"]: row["steps"]
        for row in rows
        if row["kind"] == "quality" and row["method"] == source and row["rate"] == "unlimited" and "steps" in row
    }
    return [steps_by_seed[seed] for seed in sorted(steps_by_seed)] or None


def cell(rows: Rows, times: dict[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """Return, for every method at one limit, its step time, its steps, and its time to quality if all seeds reached
    it.
    """
    entries: dict[str, Any] = {}
    failed = {row["method"]: row["failed"] for row in rows if "failed" in row}
    choices = {row["as"]: row for row in rows if row["kind"] == "choice" and row["rate"] == times["rate"]}
    for listed in methods:
        choice = choices.get(listed, {})
        name = choice.get("name", listed)
        if name in AUTOS:
            entries[listed] = {"failed": choice.get("failed", "not chosen")}
            continue
        steps = steps_of(rows, name)
        if not times["step_s"].get(name) or steps is None:
            entries[listed] = {"failed": failed.get(name, "not measured")}
            continue
        step_s = times["step_s"][name]
        entry: dict[str, Any] = {
            "step_s": statistics.median(step_s),
            "step_spread": spread(step_s),
            "blocks": len(step_s),
            "sent_nbytes": times["sent_nbytes"].get(name),
            "steps": steps,
        }
        reached = [count for count in steps if count is not None]
        if len(reached) == len(steps):
            begun = first_s(name, entry["step_s"], times["step_s"], choice.get("begins", 0))
            entry["to_quality_s"] = begun + statistics.median(reached) * entry["step_s"]
            entry["to_quality_range_s"] = [begun + count * entry["step_s"] for count in (min(reached), max(reached))]
        if listed in AUTOS:
            entry |= {"is": name, "predicted_step_s": choice["predicted_step_s"]}
        entries[listed] = entry
    floor = entries.get("floor", {}).get("to_quality_s")
    for entry in entries.values():
        if floor and "to_quality_s" in entry:
            entry["of_floor"] = entry["to_quality_s"] / floor
    return entries


def first_s(name: str, step_s: float, times: Mapping[str, Sequence[float]], begins: int = 0) -> float:
    """Return the additional seconds of a method's first updates, which are made in another way than the later ones.

    A chosen plan says with `begins` how many there are. Torch's methods make theirs like DDP, and count only if
    DDP was timed beside them.
    """
    begins, like = (METHODS[name].begins, "ddp") if name in METHODS else (begins, at_first(name))
    return begins * (statistics.median(times[like]) - step_s) if begins and times.get(like) else 0.0


def verdict(one: dict[str, Any], rate: str) -> dict[str, Any]:
    """Judge a cell by tutti's automatic choice, or by its best method if there was no choice.

    `regret` says how much longer each choice takes than tutti's best measured method.
    """
    reached = {name: row["to_quality_s"] for name, row in one.items() if "to_quality_s" in row}
    others = {name: s for name, s in reached.items() if name in METHODS and METHODS[name].side in ("torch", "peer")}
    ours = {name: s for name, s in reached.items() if name.startswith("tutti")}
    if not ours:
        return {}
    best = min(ours, key=lambda name: ours[name])
    judged = next((name for name in AUTOS if name in ours), best)
    result: dict[str, Any] = {"judged": one[judged].get("is", judged), "best_of_tutti": one[best].get("is", best)}
    result["regret"] = {name: ours[name] / ours[best] - 1 for name in AUTOS if name in ours}
    result["of_floor"] = one[judged].get("of_floor")
    aim = AIMS.get(rate)
    if aim is not None and result["of_floor"] is not None:
        result |= {"aim": aim, "met": result["of_floor"] <= aim}
    if others:
        result["best_of_others"] = other = min(others, key=lambda name: others[name])
        result["of_best_of_others"] = ours[judged] / others[other]
    if "ddp" in reached:
        result["of_ddp"] = ours[judged] / reached["ddp"]
    return result


def same_steps(rows: Rows) -> dict[str, Any]:
    """Compare methods that use tutti's steps with tutti's training of the first seed.

    Returns for each method the largest difference of held-out losses after equal numbers of steps.
    """
    looks = {
        row["method"]: row["looks"]
        for row in rows
        if row["kind"] == "quality" and row["seed"] == 0 and row["rate"] == "unlimited" and "looks" in row
    }
    comparisons = {}
    for name in CHECKED_ALIKE:
        if name in looks and "tutti plain" in looks:
            pairs = list(zip(looks[name], looks["tutti plain"], strict=False))
            comparisons[name] = {
                "looks": len(pairs),
                "same_number_of_steps": len(looks[name]) == len(looks["tutti plain"]),
                "largest_difference_of_losses": max(abs(a[1] - b[1]) for a, b in pairs),
            }
    return comparisons


def checks(part: str, rows: Rows, cells: dict[str, Any]) -> Rows:
    """Compare trainings in full at a limited rate with the product of steps and step time."""
    comparisons = []
    for row in rows:
        if row["kind"] != "quality" or row["rate"] == "unlimited" or "looks" not in row:
            continue
        cell_name = f"{part}@{row['rate']}"
        timed = cells.get(cell_name, {})
        step_s = timed.get(row["method"], {}).get("step_s")
        if step_s is None:
            continue
        steps = row["looks"][-1][0]
        ddp = timed.get("ddp", {}).get("step_s")
        product = steps * step_s + first_s(row["method"], step_s, {"ddp": [ddp] if ddp else []})
        comparisons.append({"cell": cell_name, "method": row["method"], "steps": steps, "run_s": row["train_s"],
                      "product_s": product, "run_of_product": row["train_s"] / product})  # fmt: skip
    return comparisons


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table: a line for every method of every cell."""
    header = ["cell", "method", "step ms", "spread", "sent KB", "steps by seed", "to quality s", "of floor"]
    table = []
    for name, methods in result["summary"]["cells"].items():
        for method, row in methods.items():
            if "failed" in row:
                table.append([name, method, row["failed"].splitlines()[-1][:40], *[""] * 5])
                continue
            steps = ", ".join("not reached" if count is None else str(count) for count in row["steps"])
            sent = row["sent_nbytes"]
            table.append([
                name, method, f"{1e3 * row['step_s']:.1f}", f"{row['step_spread']:.0%}",
                "" if sent is None else f"{sent / 1e3:.0f}", steps,
                f"{row['to_quality_s']:.2f}" if "to_quality_s" in row else "",
                f"{row['of_floor']:.2f}" if "of_floor" in row else "",
            ])  # fmt: skip
    return header, table
