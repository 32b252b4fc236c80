"""Every plan of 2 and 4 ranks measured between two hosts of a lab, beside what was predicted and chosen. Needs root.

For each limit of the links and each model the cluster is probed as a user would, plans are predicted and one is chosen;
then every plan runs for a few steps. Regret: how much longer than the best measured plan the chosen one takes. What is
measured is kept plan by plan: --resume goes on with a run that was interrupted. A plan that fails is a row that says
why.
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
from tutti.cli.options import capture_script
from tutti.cli.planning import model_spec_of
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
"""Launches in a row that measured nothing before the rest of a case's plans is given up."""

RESUMABLE = True
"""run.py: `measure` takes `resume`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured. Of each plan at most `steps` steps are timed, fewer where they take more than `milliseconds`
    (but two, or one where even that takes longer); a first step above `patience_s` is the only one. `again_s`: for
    steps in place of disturbed ones. `limit_s`: after which a plan is given up. `visits`: how often every plan has its
    turn, minutes apart, for steps of one second say what the machine was like in that second.

    `full`: 1 for the probe's longer measurement. `only`: words that a plan's name begins with, all of them when empty.
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
    """Returns {"clusters": .., "models": .., "cases": one for each limit, number of ranks and model, "summary": ..}."""
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
        "clusters": {name: serialization.to_data(one) for name, one in clusters.items()},
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
    """One limit, number of ranks and model. `script`: the plan that its script implies on one device."""

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
    """The model's description and the plan that its script implies, as `tutti plan` finds them."""
    captured = capture_script(RANK, ("--workload", name, "--batch", str(plan_space.BATCHES[name])))
    return model_spec_of(captured, name=name), captured.plan


def probe(lab: Lab, folder: Path, journal: Journal, words: str, sizes: Sizes, usual_pace: float) -> ClusterSpec:
    """The lab as `tutti probe` measures it from all its ranks before each case (a machine may change its pace in the
    course of minutes), or as it was measured before an interruption. `usual_pace`: of the probes before."""
    kept = journal.cluster(words)
    if kept is not None:
        return kept
    folder.mkdir()
    found = []
    while len(found) < PROBES and not (found and steadiness(found[-1], usual_pace) > STEADY):
        say(f"{words}: probing")
        found.append(probe_once(lab, folder / f"probe-{len(found)}", sizes))
    cluster = max(found, key=lambda one: steadiness(one, usual_pace))
    journal.keep_cluster(words, cluster)
    return cluster


PROBES, STEADY = 4, 0.88
"""How often a cluster is probed until rates of products of all sizes are so near each other, and the usual pace: the
machine changed its own in between otherwise, or was in a slow spell of minutes, and a prediction would be of no machine
that steps run on."""


def steadiness(cluster: ClusterSpec, usual_pace: float) -> float:
    """The lowest float32 rate of one process' products, beside the highest and the usual one."""
    rates = [rate.flops_per_s for rate in product_rates(cluster)]
    return min(rates) / max(*rates, usual_pace)


def usual(clusters: Iterable[ClusterSpec]) -> float:
    """The highest pace that any of the probes found: FLOP/s of a product, in the middle of all sizes; 0 of none."""
    paces = [statistics.median(rate.flops_per_s for rate in product_rates(one)) for one in clusters]
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
        raise SystemExit("the probe failed\n" + "\n".join(one.err for one in done))
    return serialization.load(ClusterSpec, output)


def predicted(case: Case, plan: Plan) -> dict[str, Any]:
    """What predict says of a plan's step and memory, or why it says nothing."""
    try:
        found = predict(case.model, case.cluster, plan)
    except Exception as error:  # what predict cannot cost, or fails at, is a finding; the other plans go on
        return {"not_predicted": reason(error)}
    step = found.step_time_s
    return {
        "predicted_s": step.value,
        "predicted_low_s": step.low,
        "predicted_high_s": step.high,
        "predicted_phases": {name: value for name, value in found.phases.items() if value},
        "predicted_sent_nbytes": found.sent_nbytes_per_rank,
        "predicted_peak_nbytes": found.memory_nbytes.value,
    }


def predicted_at_pace(case: Case, plan: Plan, found: Mapping[str, Any]) -> dict[str, Any]:
    """The machine's pace while the plan ran, as a part of the probe's, and what predict says of a cluster whose devices
    have that pace, links as they were; nothing where either is not known. Virtual machines change theirs by a fifth
    from one minute to the next: what is predicted from the probe's minute is then of another machine."""
    probed = usual([case.cluster])
    if not found.get("pace") or not probed:
        return {}
    part = statistics.median(found["pace"]) / probed
    step_s = predicted(replace(case, cluster=with_speed(case.cluster, part)), plan).get("predicted_s")
    return {} if step_s is None else {"pace_part": part, "predicted_at_pace_s": step_s}


def chosen(case: Case) -> tuple[Plan | None, str]:
    """The planner's choice among all meshes of exactly these ranks, and what it says of it."""
    request = PlanRequest(script=case.script, degree=case.ranks, scope="all")
    try:
        choice = choose(case.model, case.cluster, request)
    except Exception as error:  # as above
        return None, reason(error)
    return choice.best, " ".join(choice.remarks)


def reason(error: Exception) -> str:
    """What an error says; of one that nobody raised on purpose, also its kind."""
    return str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"


def differing(plan: Plan, script: Plan) -> dict[str, Any]:
    """The fields of a plan that are not the script's."""
    own, other = serialization.to_data(plan), serialization.to_data(script)
    return {name: value for name, value in own.items() if value != other[name]}


# What is measured


def run_case(case: Case, lab: Lab, folder: Path, sizes: Sizes, journal: Journal) -> dict[str, Any]:
    """Predict, choose and measure all plans of one case."""
    space = plan_space.space(case.model, case.cluster, case.script, case.workload, case.ranks)
    named = {name: one.plan for name, one in space.plans.items() if name.startswith(sizes.only or "")}
    best, remarks = chosen(case)
    name = None
    if best is not None:
        name = next((name for name, plan in named.items() if plan == best), plan_space.name_of(best))
        named[name] = best
    load, began = record.load(), time.monotonic()
    found = measure_plans(lab, named, case, folder, sizes, journal)
    outcomes = [
        {
            "name": label,
            "stands_for": space.plans[label].stands_for if label in space.plans else 0,
            "plan": differing(plan, case.script),
            **predicted(case, plan),
            **found[label],
            **predicted_at_pace(case, plan, found[label]),
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
    """What became of each plan in all visits, of which every second one goes through them backwards."""
    visits = []
    for number in range(sizes.visits):
        order = dict(reversed(plans.items()) if number % 2 else plans.items())
        own, rows_file = folder / f"visit-{number}", journal.rows_file(f"{case.words}, visit {number}")
        visits.append(visit(lab, order, case, own, sizes, rows_file))
    return {name: over_visits([found[name] for found in visits]) for name in plans}


def visit(
    lab: Lab, plans: Mapping[str, Plan], case: Case, folder: Path, sizes: Sizes, rows_file: Path
) -> dict[str, dict[str, Any]]:
    """What became of each plan: its steps' seconds, why tutti refuses it, or how it failed. Where the ranks end before
    all plans have had their turn, the others go on with new ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    launches = fruitless = 0
    error: str | None = None
    while True:
        found = outcomes(rows_file, case.ranks)
        left = [name for name in plans if name not in found]
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
        fruitless = 0 if len(outcomes(rows_file, case.ranks)) > len(found) else fruitless + 1
    untried = {"failed": f"not tried: {FRUITLESS} launches in a row measured nothing; the last said: {error}"}
    return {name: found.get(name, untried) for name in plans}


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
    """Run the list of plans on the lab's ranks; None, or what was said where it failed or took too long."""
    try:
        done = lab.train(*words, cwd=cwd, timeout_s=limit_s)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit_s:g} s"
    bad = [one for one in done if one.code]
    return "\n".join(one.err[-2000:] for one in bad) if bad else None
