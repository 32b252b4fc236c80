"""Every plan of 2 and 4 ranks measured between two hosts of a lab, beside what was predicted and chosen. Needs root.

For each limit of the links the cluster is probed as a user would, plans are predicted and one is chosen; then every
plan runs for a few steps. Regret: how much longer than the best measured plan the chosen one takes.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plan_space
from tutti.cli.common import capture_script
from tutti.cli.planning import model_spec_of
from tutti.errors import PlanError
from tutti.lab import Lab
from tutti.plan import Request, choose
from tutti.predict import predict
from tutti.spec import codec
from tutti.spec.cluster import ClusterSpec
from tutti.spec.mesh_words import mesh_in_words
from tutti.spec.model import ModelSpec
from tutti.spec.plan import Plan

RANK = Path(__file__).with_name("plan_rank.py")
HOSTS = 2
MOST_FAILURES = 4
"""Launches of one case that may fail before the rest of its plans is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured. Of each plan at most `steps` steps are timed, fewer where they take more than `seconds`.

    `orders`: 1 for the planner's order of a mesh's axes, 2 for the reverse, too. `limit_s`: of the plans of one case.
    """

    rates: tuple[str, ...] = ("unlimited", "1gbit", "100mbit")
    ranks: tuple[str, ...] = ("2", "4")
    models: tuple[str, ...] = ("mlp", "cnn", "gpt")
    steps: int = 3
    seconds: int = 2
    orders: int = 1
    limit_s: int = 900


QUICK = Sizes(rates=("1gbit",), ranks=("2",), models=("mlp",), steps=2, seconds=1)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Returns {"clusters": .., "models": .., "cases": one for each limit, number of ranks and model, "summary": ..}."""
    described = {name: describe(name) for name in sizes.models}
    clusters, cases = {}, []
    for rate in sizes.rates:
        for ranks in map(int, sizes.ranks):
            with Lab(HOSTS, rates=rate, ranks_per_host=ranks // HOSTS) as lab, tempfile.TemporaryDirectory() as folder:
                say(f"{rate}, {ranks} ranks: probing")
                clusters[f"{rate}, {ranks} ranks"] = cluster = probe(lab, Path(folder))
                for name, (model, script) in described.items():
                    case = Case(rate=rate, ranks=ranks, workload=name, model=model, script=script, cluster=cluster)
                    cases.append(run_case(case, lab, Path(folder) / name, sizes))
                    say(in_words(cases[-1]))
    return {
        "hosts": HOSTS,
        "batches": plan_space.BATCHES,
        "clusters": {name: codec.to_data(one) for name, one in clusters.items()},
        "models": {name: codec.to_data(model) for name, (model, _) in described.items()},
        "cases": cases,
        "summary": summary(cases),
    }


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One limit, number of ranks and model. `script`: the plan that its script implies on one device."""

    rate: str
    ranks: int
    workload: str
    model: ModelSpec
    script: Plan
    cluster: ClusterSpec


# What is predicted and chosen


def describe(name: str) -> tuple[ModelSpec, Plan]:
    """The model's description and the plan that its script implies, as `tutti plan` finds them."""
    captured = capture_script(RANK, ("--workload", name, "--batch", str(plan_space.BATCHES[name])))
    return model_spec_of(captured, name=name), captured.plan


def probe(lab: Lab, folder: Path) -> ClusterSpec:
    """The lab as `tutti probe` measures it from all its ranks."""
    output = folder / "cluster.json"
    words = ("tutti.cli.main", "probe", "--quick", "--no-plot", "--output", str(output))
    done = lab.train("--folder", str(folder / "probe"), "-m", *words, cwd=folder, timeout_s=300)
    if not output.exists():
        raise SystemExit("the probe failed\n" + "\n".join(one.err for one in done))
    return codec.load(ClusterSpec, output)


def predicted(case: Case, plan: Plan) -> dict[str, Any]:
    """What predict says of a plan's step, or why it says nothing."""
    try:
        found = predict(case.model, case.cluster, plan)
    except Exception as error:  # what predict cannot cost, or fails at, is a finding; the other plans go on
        return {"not_predicted": reason(error)}
    step = found.step_time_s
    return {"predicted_s": step.value, "predicted_low_s": step.low, "predicted_high_s": step.high}


def chosen(case: Case) -> tuple[Plan | None, str]:
    """The planner's choice among all meshes of exactly these ranks, and what it says of it."""
    request = Request(script=case.script, degree=case.ranks, scope="all")
    try:
        choice = choose(case.model, case.cluster, request)
    except Exception as error:  # as above
        return None, reason(error)
    return choice.best, " ".join(choice.remarks)


def reason(error: Exception) -> str:
    """What an error says; of one that nobody raised on purpose, also its kind."""
    return str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"


# What is measured


def run_case(case: Case, lab: Lab, folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Predict, choose and measure all plans of one case."""
    named = plan_space.plans(case.workload, case.ranks, every_order=sizes.orders > 1)
    best, remarks = chosen(case)
    name = None
    if best is not None:
        name = next((name for name, plan in named.items() if plan == best), planners_name(best))
        named[name] = best
    found = measure_plans(lab, list(named.values()), case, folder, sizes)
    rows = [
        {"name": label, "plan": codec.to_data(plan), **predicted(case, plan), **row}
        for (label, plan), row in zip(named.items(), found, strict=True)
    ]
    return {
        "rate": case.rate,
        "ranks": case.ranks,
        "model": case.workload,
        "planner": {"name": name, "says": remarks},
        "plans": rows,
        **judged(rows, name),
    }


def planners_name(plan: Plan) -> str:
    """A name for a plan that only the planner thought of."""
    schedule = f" {plan.pipeline.schedule}" if plan.degree("stage") > 1 else ""
    level = f" level {plan.sharding.level}" if plan.degree("shard") > 1 else ""
    slices = plan.batch.num_microbatches
    return f"planner's: {mesh_in_words(plan.mesh)}{schedule}{level}, {slices} microbatch{'es' if slices > 1 else ''}"


def measure_plans(lab: Lab, plans: Sequence[Plan], case: Case, folder: Path, sizes: Sizes) -> list[dict[str, Any]]:
    """What became of each plan: its steps' seconds, why tutti refuses it, or that it failed. A plan that ends the ranks
    is passed over, and the others go on with new ones."""
    folder.mkdir()
    rows: dict[int, dict[str, Any]] = {}
    failures = 0
    while left := [number for number in range(len(plans)) if number not in rows]:
        output = folder / f"rows-{failures}.jsonl"
        words = launch_words(folder / f"run-{failures}", output, case, sizes)
        list_file = folder / "plans.json"
        list_file.write_text(json.dumps([(number, codec.to_data(plans[number])) for number in left]))
        error = trained(lab, [*words, f"--plans={list_file}"], folder, sizes.limit_s)
        begun = None
        for row in map(json.loads, output.read_text().splitlines() if output.exists() else []):
            number = row.pop("plan")
            if row.pop("begun", False):
                begun = number
            else:
                rows[number], begun = row, None
        left = [number for number in left if number not in rows]
        if left and error is None:
            error = "the ranks ended before this plan began"
        if left and error is not None:
            failures += 1
            rows[begun if begun is not None else left[0]] = {"failed": error}
            say(f"  failed: {plans[begun if begun is not None else left[0]].mesh}: {error.strip()[-300:]}")
        if failures > MOST_FAILURES:
            untried = {"failed": "not tried: too many plans of this case failed"}
            return [rows.get(number, untried) for number in range(len(plans))]
    return [rows[number] for number in range(len(plans))]


def launch_words(run_folder: Path, output: Path, case: Case, sizes: Sizes) -> list[str]:
    batch = plan_space.BATCHES[case.workload]
    return [
        *("--folder", str(run_folder), "--timeout", "60", str(RANK), "--workload", case.workload),
        *(f"--batch={batch}", f"--output={output}", f"--steps={sizes.steps}", f"--seconds={sizes.seconds}"),
    ]


def trained(lab: Lab, words: Sequence[str], cwd: Path, limit_s: float) -> str | None:
    """Run the list of plans on the lab's ranks; None, or what was said where it failed or took too long."""
    try:
        done = lab.train(*words, cwd=cwd, timeout_s=limit_s)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit_s:g} s"
    bad = [one for one in done if one.code]
    return "\n".join(one.err[-2000:] for one in bad) if bad else None


# What follows


def judged(rows: list[dict[str, Any]], planner: str | None) -> dict[str, Any]:
    """The best plan measured, the two that were chosen (by the planner, and as the shortest predicted of these), their
    regret, and the error of the predictions: (predicted - measured) / measured.
    """
    for row in rows:
        if "step_s" in row:
            row["measured_s"] = statistics.median(row["step_s"])
            if "predicted_s" in row:
                row["error"] = row["predicted_s"] / row["measured_s"] - 1
    measured = {row["name"]: row["measured_s"] for row in rows if "measured_s" in row}
    both = [row for row in rows if "error" in row]
    result: dict[str, Any] = {
        "measured": len(measured),
        "refused": [row["name"] for row in rows if "refused" in row],
        "failed": [row["name"] for row in rows if "failed" in row],
        "not_predicted": [row["name"] for row in rows if "not_predicted" in row],
    }
    if measured:
        best = min(measured, key=lambda name: measured[name])
        result |= {"best": best, "best_s": measured[best]}
        if planner in measured:
            result["planner_regret"] = measured[planner] / measured[best] - 1
        if both:
            first = min(both, key=lambda row: row["predicted_s"])
            result |= {
                "predicted_best": first["name"],
                "predicted_best_regret": first["measured_s"] / measured[best] - 1,
                "mean_absolute_error": statistics.fmean(abs(row["error"]) for row in both),
                "mean_error": statistics.fmean(row["error"] for row in both),
                "errors": len(both),
            }
    return result


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all cases: regrets, and errors of all plans together."""

    def of(key: str) -> list[float]:
        return [case[key] for case in cases if key in case]

    errors = [row["error"] for case in cases for row in case["plans"] if "error" in row]
    found: dict[str, Any] = {"cases": len(cases), "plans_measured": sum(of("measured")), "errors": len(errors)}
    for key in ("planner_regret", "predicted_best_regret"):
        if values := of(key):
            found[key] = {"median": statistics.median(values), "largest": max(values), "cases": len(values)}
    if errors:
        absolute = sorted(map(abs, errors))
        found["step_time_error"] = {
            "mean_absolute": statistics.fmean(absolute),
            "median_absolute": statistics.median(absolute),
            "p90_absolute": absolute[min(len(absolute) - 1, int(0.9 * len(absolute)))],
            "mean": statistics.fmean(errors),
        }
    return found


def in_words(case: dict[str, Any]) -> str:
    """One line of a case, while others still run."""
    return " | ".join(_cells(case))


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table: header and rows, one a case, and the summary."""
    header = ["case", "measured", "not predicted", "best", "planner", "regret", "by prediction", "regret", "|error|"]
    total = result["summary"]

    def median(key: str) -> str:
        return f"{total[key]['median']:.1%}" if key in total else ""

    error = total.get("step_time_error", {}).get("mean_absolute")
    last = ["median, mean error", str(total["plans_measured"]), "", "", "", median("planner_regret"), "",
            median("predicted_best_regret"), "" if error is None else f"{error:.1%}"]  # fmt: skip
    return header, [*map(_cells, result["cases"]), last]


def _cells(case: dict[str, Any]) -> list[str]:
    def part(key: str) -> str:
        return f"{case[key]:.1%}" if key in case else ""

    return [
        f"{case['rate']}, {case['ranks']} ranks, {case['model']}",
        f"{case['measured']} of {len(case['plans'])}",
        str(len(case["not_predicted"])),
        f"{case['best']} {1e3 * case['best_s']:.0f} ms" if "best" in case else "none",
        str(case["planner"]["name"] or "none"),
        part("planner_regret"),
        str(case.get("predicted_best", "none")),
        part("predicted_best_regret"),
        part("mean_absolute_error"),
    ]
