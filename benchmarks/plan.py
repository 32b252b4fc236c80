"""Every plan of 2 and 4 ranks between two hosts of a lab: measured times, predictions, and the planner's choice (root).

For each limit of the links and each model, the cluster is probed as a user would do it; then all plans are predicted
and one is chosen. Afterwards every plan runs for a few steps. Regret is how much longer the chosen plan takes than the
best measured one. Measurements are kept plan by plan, so --resume continues an interrupted run. A plan that fails
becomes a row that says why.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plan_space
import record
from plan_journal import Journal, opened, outcomes, over_visits
from plan_table import judged, rows, say_case, summary
from tutti.commands.capture import capture_script
from tutti.commands.planning import model_spec_of
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec, GemmRate
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.cost_model import predict
from tutti.errors import PlanError
from tutti.lab import Lab
from tutti.planner import PlanRequest, choose
from tutti.planner.scenarios import with_speed

__all__ = ["QUICK", "RESUMABLE", "Sizes", "measure", "rows"]

RANK = Path(__file__).with_name("plan_rank.py")
HOSTS = 2
FRUITLESS = 3
"""After this many launches in a row without a measurement, the rest of a case's plans is given up."""

RESUMABLE = True
"""Tells run.py that `measure` takes `resume`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        rates: limits of the links.
        ranks: numbers of ranks.
        models: names of workloads.
        steps: steps of each plan that are timed, at most.
        milliseconds: time for the timed steps of a plan. At least two steps are timed, or one if even that takes
            longer.
        visits: how often every plan is measured, minutes apart. Steps of one second only show the machine's state
            in that second.
        limit_s: seconds after which a plan is given up.
        patience_s: a first step that takes longer is the only one.
        again_s: seconds for repeating disturbed steps.
        full: 1 for the probe's longer measurement.
        only: prefix of the names of plans that are measured; empty for all.
    """

    rates: tuple[str, ...] = ("unlimited", "1gbit", "100mbit")
    ranks: tuple[str, ...] = ("2", "4")
    models: tuple[str, ...] = ("mlp", "cnn", "gpt")
    steps: int = 5
    milliseconds: int = 600
    visits: int = 3
    limit_s: int = 90
    patience_s: int = 6
    again_s: int = 8
    full: int = 0
    only: tuple[str, ...] = ()


QUICK = Sizes(rates=("1gbit",), ranks=("2",), models=("mlp",), steps=2, milliseconds=300, visits=1)


def measure(sizes: Sizes, *, resume: bool = False) -> dict[str, Any]:
    """Measure all cases. Returns {"clusters": .., "models": .., "cases": one for each limit, number of ranks and
    model, "summary": ..}, among others.
    """
    begun = time.monotonic()
    journal = opened(record.QUICK_RESULTS / "plan-bench", sizes, resume=resume)
    described = {name: describe(name) for name in sizes.models}
    clusters, cases = {}, []
    for rate in sizes.rates:
        for ranks in map(int, sizes.ranks):
            with Lab(HOSTS, rates=rate, ranks_per_host=ranks // HOSTS) as lab, tempfile.TemporaryDirectory() as scratch:
                for name, (model, script) in described.items():
                    words, folder = case_words(rate, ranks, name), Path(scratch) / name
                    clusters[words] = cluster = probe(lab, folder, journal, words, sizes, usual(clusters.values()))
                    case = Case(rate=rate, ranks=ranks, workload=name, model=model, script=script, cluster=cluster)
                    cases.append(run_case(case, lab, folder, sizes, journal))
                    say(f"{say_case(cases[-1])} ({time.monotonic() - begun:.0f} s)")
    return {
        "hosts": HOSTS,
        "batches": plan_space.BATCHES,
        "resumed": resume,
        "took_s": time.monotonic() - begun,
        "clusters": {name: serialization.to_data(spec) for name, spec in clusters.items()},
        "models": {name: serialization.to_data(model) for name, (model, _) in described.items()},
        "scripts": {name: serialization.to_data(script) for name, (_, script) in described.items()},
        "cases": cases,
        "summary": summary(cases),
    }


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def case_words(rate: str, ranks: int, workload: str) -> str:
    return f"{rate}, {ranks} ranks, {workload}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One limit, number of ranks and model. `script` is the plan that the model's script implies on one device."""

    rate: str
    ranks: int
    workload: str
    model: ModelSpec
    script: Plan
    cluster: ClusterSpec

    @property
    def words(self) -> str:
        return case_words(self.rate, self.ranks, self.workload)


# What is predicted and chosen


def describe(name: str) -> tuple[ModelSpec, Plan]:
    """Return the model's description and the plan that its script implies, as `tutti plan` finds them."""
    captured = capture_script(RANK, ("--workload", name, "--batch", str(plan_space.BATCHES[name])))
    return model_spec_of(captured, name=name), captured.plan


def probe(lab: Lab, folder: Path, journal: Journal, words: str, sizes: Sizes, usual_pace: float) -> ClusterSpec:
    """Probe the lab with `tutti probe` from all its ranks, or return what was probed before an interruption.

    Every case is probed anew, because a machine may change its speed within minutes.

    Args:
        lab: the hosts.
        folder: for the probe's files.
        journal: where the cluster is kept.
        words: name of the case.
        sizes: what is measured.
        usual_pace: FLOP/s of products in the earlier probes, 0 if there are none.
    """
    kept = journal.cluster(words)
    if kept is not None:
        return kept
    folder.mkdir()
    clusters = []
    while len(clusters) < PROBES and not (clusters and steadiness(clusters[-1], usual_pace) > STEADY):
        say(f"{words}: probing")
        clusters.append(probe_once(lab, folder / f"probe-{len(clusters)}", sizes))
    cluster = max(clusters, key=lambda one: steadiness(one, usual_pace))
    journal.keep_cluster(words, cluster)
    return cluster


PROBES, STEADY = 4, 0.88
"""A cluster is probed up to PROBES times, until the lowest rate of a product is at least STEADY of the highest and the
usual one. Otherwise the machine changed its speed during the probe, or was slow for some minutes, and predictions would
describe no machine on which steps run."""


def steadiness(cluster: ClusterSpec, usual_pace: float) -> float:
    """Return the lowest float32 rate of one process's products, divided by the highest and the usual one."""
    rates = [rate.flops_per_s for rate in product_rates(cluster)]
    return min(rates) / max(*rates, usual_pace)


def usual(clusters: Iterable[ClusterSpec]) -> float:
    """Return the highest speed in any of the probes: FLOP/s of the product of median rate; 0 without probes."""
    paces = [statistics.median(rate.flops_per_s for rate in product_rates(cluster)) for cluster in clusters]
    return max(paces, default=0.0)


def product_rates(cluster: ClusterSpec) -> list[GemmRate]:
    (device,) = cluster.devices.values()
    return [rate for rate in device.gemm if rate.dtype == "float32" and rate.threads == 1]


def probe_once(lab: Lab, folder: Path, sizes: Sizes) -> ClusterSpec:
    folder.mkdir()
    output = folder / "cluster.json"
    effort = () if sizes.full else ("--quick",)
    arguments = ("tutti.cli.main", "probe", *effort, "--no-plot", "--output", str(output))
    done = lab.train("--folder", str(folder / "run"), "-m", *arguments, cwd=folder, timeout_s=300)
    if not output.exists():
        raise SystemExit("tutti probe failed on the lab's hosts\n" + "\n".join(host.err for host in done))
    return serialization.load(ClusterSpec, output)


def predicted(case: Case, plan: Plan) -> dict[str, Any]:
    """Return what the cost model predicts for a plan's step and memory, or why it predicts nothing."""
    try:
        prediction = predict(case.model, case.cluster, plan)
    except Exception as error:  # a plan that cannot be predicted is a result; the others continue
        return {"not_predicted": reason(error)}
    step = prediction.step_time_s
    return {
        "predicted_s": step.value,
        "predicted_low_s": step.low,
        "predicted_high_s": step.high,
        "predicted_phases": {name: value for name, value in prediction.phases.items() if value},
        "predicted_sent_nbytes": prediction.sent_nbytes_per_rank,
        "predicted_peak_nbytes": prediction.memory_nbytes.value,
    }


def predicted_at_pace(case: Case, plan: Plan, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the machine's speed while the plan ran, and a prediction for devices of that speed on the same links.

    Empty if either is unknown. The speed is a fraction of that in the probe. Virtual machines change their speed
    by a fifth from one minute to the next, and then a prediction from the probe describes another machine.
    """
    probed = usual([case.cluster])
    if not found.get("pace") or not probed:
        return {}
    part = statistics.median(found["pace"]) / probed
    step_s = predicted(replace(case, cluster=with_speed(case.cluster, part)), plan).get("predicted_s")
    return {} if step_s is None else {"pace_part": part, "predicted_at_pace_s": step_s}


def chosen(case: Case) -> tuple[Plan | None, str]:
    """Return the planner's choice among all meshes of exactly these ranks, and its remarks."""
    request = PlanRequest(script=case.script, degree=case.ranks, scope="all")
    try:
        choice = choose(case.model, case.cluster, request)
    except Exception as error:  # a failure is a result, as in `predicted`
        return None, reason(error)
    return choice.best, " ".join(choice.remarks)


def reason(error: Exception) -> str:
    """Return the message of an error; for an error that was not raised on purpose, also its type."""
    return str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"


def differing(plan: Plan, script: Plan) -> dict[str, Any]:
    """Return the fields in which a plan differs from the script's."""
    fields, other = serialization.to_data(plan), serialization.to_data(script)
    return {name: value for name, value in fields.items() if value != other[name]}


# What is measured


def run_case(case: Case, lab: Lab, folder: Path, sizes: Sizes, journal: Journal) -> dict[str, Any]:
    """Predict, choose and measure all plans of one case."""
    space = plan_space.space(case.model, case.cluster, case.script, case.workload, case.ranks)
    named = {name: entry.plan for name, entry in space.plans.items() if name.startswith(sizes.only or "")}
    best, remarks = chosen(case)
    name = None
    if best is not None:
        name = next((name for name, plan in named.items() if plan == best), plan_space.name_of(best))
        named[name] = best
    load, began = record.load(), time.monotonic()
    outcome_by_plan = measure_plans(lab, named, case, folder, sizes, journal)
    outcomes = [
        {
            "name": label,
            "stands_for": space.plans[label].stands_for if label in space.plans else 0,
            "plan": differing(plan, case.script),
            **predicted(case, plan),
            **outcome_by_plan[label],
            **predicted_at_pace(case, plan, outcome_by_plan[label]),
        }
        for label, plan in named.items()
    ]
    cores = len(os.sched_getaffinity(0))
    return {
        "rate": case.rate,
        "ranks": case.ranks,
        "cores": cores,
        "ranks_beyond_cores": case.ranks > cores,
        "model": case.workload,
        "load_at_start": load,
        "took_s": time.monotonic() - began,
        "planner": {"name": name, "says": remarks},
        "space": space.words(),
        "plans": outcomes,
        **judged(outcomes, name),
    }


def measure_plans(
    lab: Lab, plans: Mapping[str, Plan], case: Case, folder: Path, sizes: Sizes, journal: Journal
) -> dict[str, dict[str, Any]]:
    """Return the outcome of each plan over all visits. Every second visit runs the plans in reverse order."""
    visits = []
    for number in range(sizes.visits):
        order = dict(reversed(plans.items()) if number % 2 else plans.items())
        visit_folder, rows_file = folder / f"visit-{number}", journal.rows_file(f"{case.words}, visit {number}")
        visits.append(visit(lab, order, case, visit_folder, sizes, rows_file))
    return {name: over_visits([outcome_by_plan[name] for outcome_by_plan in visits]) for name in plans}


def visit(
    lab: Lab, plans: Mapping[str, Plan], case: Case, folder: Path, sizes: Sizes, rows_file: Path
) -> dict[str, dict[str, Any]]:
    """Return the outcome of each plan: its step times, why tutti refuses it, or how it failed.

    If the ranks end before all plans have run, new ranks continue with the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    launches = fruitless = 0
    error: str | None = None
    while True:
        outcome_by_plan = outcomes(rows_file, case.ranks)
        left = [name for name in plans if name not in outcome_by_plan]
        if not left or fruitless == FRUITLESS:
            break
        if error is not None:
            say(f"  {case.words}: the ranks ended before {len(left)} plans: {error.strip()[-300:]}")
        list_file = folder / f"plans-{launches}.json"
        list_file.write_text(
            json.dumps([(name, serialization.to_data(plans[name])) for name in left]), encoding="utf-8"
        )
        words = launch_words(folder / f"run-{launches}", list_file, case, sizes, rows_file)
        error = trained(lab, words, folder, 120 + sizes.limit_s * len(left))
        launches += 1
        fruitless = 0 if len(outcomes(rows_file, case.ranks)) > len(outcome_by_plan) else fruitless + 1
    untried = {"failed": f"not tried: {FRUITLESS} launches in a row measured nothing; the last said: {error}"}
    return {name: outcome_by_plan.get(name, untried) for name in plans}


def launch_words(run_folder: Path, list_file: Path, case: Case, sizes: Sizes, rows_file: Path) -> list[str]:
    batch = plan_space.BATCHES[case.workload]
    return [
        *("--folder", str(run_folder), "--timeout", "60", str(RANK), "--workload", case.workload),
        *(f"--batch={batch}", f"--output={rows_file}", f"--steps={sizes.steps}"),
        *(f"--seconds={sizes.milliseconds / 1000}", f"--limit={sizes.limit_s}", f"--plans={list_file}"),
        *(f"--patience={sizes.patience_s}", f"--again={sizes.again_s}"),
        f"--pace={usual([case.cluster])}",
    ]


def trained(lab: Lab, words: Sequence[str], cwd: Path, limit_s: float) -> str | None:
    """Run the list of plans on the lab's ranks. Returns None, or the error output if that failed or took too long."""
    try:
        done = lab.train(*words, cwd=cwd, timeout_s=limit_s)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit_s:g} s"
    bad = [host for host in done if host.code]
    return "\n".join(host.err[-2000:] for host in bad) if bad else None
