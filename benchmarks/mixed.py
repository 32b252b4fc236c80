"""Two hosts of a lab, one with a slower processor: plans balanced for both beside plans with equal parts. Needs root.

The slow host is really slower: its matrix products run MKL's portable code, and its convolutions oneDNN's code for
SSE 4.1, which machines like this compute at a fifth to a half of the usual rate; memory and link are as fast.
Before each case both hosts are probed at the same time, as a user would do it, and the probe must distinguish their
speeds. One case has equal processors and a host of little memory, which the kernel enforces. Every chosen plan is
verified against one device.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mixed_rank import leave_groups
from plan_journal import outcomes
from tutti.commands.capture import capture_script
from tutti.commands.planning import model_spec_of
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName
from tutti.cost_model import predict
from tutti.lab import Lab
from tutti.planner import PlanRequest, choose

RANK = Path(__file__).with_name("mixed_rank.py")
BATCHES = {"mlp": 512, "cnn": 32, "gpt": 16}
"""The global batch of each model in samples: large enough that products take longer than work that does not depend on
a rank's share.
"""

SLOW, NOBODY = 1, -1
"""The rank with the slower processor; NOBODY: no rank has it, but fillers keep the cores busy."""

IMPOSSIBLE = (("cnn", "split"),)
"""Convolutions cannot be split."""

CAPPED, CAPPED_BATCH, CAP = "cnn", 512, 0.7
"""The case of little memory: its model, its batch, and its host's memory as a part of the prediction for equal shares.
A fifth of that prediction are pages of libraries, which the kernel counts for the process that reads them first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured: each plan `turns` times, in turns, with `steps` steps each."""

    models: tuple[str, ...] = ("mlp", "cnn", "gpt")
    axes: tuple[str, ...] = ("replicate", "stage", "split")
    rate: str = "unlimited"
    turns: int = 3
    steps: int = 12


QUICK = Sizes(models=("mlp",), axes=("replicate",), turns=1, steps=4)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure all cases. Returns {"cases": a row for each model and axis, with its cluster, "capped": .., "summary":
    ..}.
    """
    with Lab(2, rates=sizes.rate) as lab, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        cases = [
            run_case(lab, folder / f"{model}-{axis}", model, axis, sizes)  # type: ignore[arg-type]
            for model in sizes.models
            for axis in sizes.axes
            if (model, axis) not in IMPOSSIBLE
        ]
        capped = run_capped(lab, folder / "capped", probed(lab, folder / "equal", str(NOBODY)), sizes)
    return {
        "batches": BATCHES,
        "cases": cases,
        "capped": capped,
        "summary": summary(cases) | {"little memory": capped["summary"]},
    }


def probed(lab: Lab, folder: Path, slow: str) -> ClusterSpec:
    """Return both hosts as `tutti probe` measures them while rank `slow` has the slower processor."""
    folder.mkdir()
    output = folder / "cluster.json"
    words = ("--slow", slow, "probe", "--quick", "--no-plot", "--output", str(output))
    done = lab.train("--folder", str(folder / "run"), str(RANK), *words, cwd=folder, timeout_s=300)
    if not output.exists():
        raise SystemExit("tutti probe failed on the lab's hosts\n" + "\n".join(host.err for host in done))
    return serialization.load(ClusterSpec, output)


def run_case(lab: Lab, folder: Path, name: str, axis: AxisName, sizes: Sizes) -> dict[str, Any]:
    """Measure the planner's plan of two ranks along `axis`, and the same plan with equal shares and with cuts by
    cost only.
    """
    folder.mkdir()
    cluster = probed(lab, folder / "probe", str(SLOW))
    if len(cluster.devices) != 2:
        raise SystemExit(f"the probe did not distinguish the slow host from the fast one: {list(cluster.devices)}")
    model, script = described(name, BATCHES[name])
    choice = choose(model, cluster, PlanRequest(script=script, degree=2, mesh={axis: 2}, scope="all"))
    by_name = {node.name: node for node in cluster.nodes}
    ordered = replace(cluster, nodes=tuple(by_name[node] for node in choice.nodes or by_name))
    even = replace(choice.best, shares=(), split_shares=(), pipeline=replace(choice.best.pipeline, cuts=()))
    plans = {"even": even, "balanced": choice.best}
    slow = [node.name for node in ordered.nodes].index(cluster.nodes[SLOW].name)
    predicted = {which: predict(model, ordered, plan).step_time_s.value for which, plan in plans.items()}
    seconds_by_plan: dict[str, list[float]] = {which: [] for which in plans}
    for turn in range(sizes.turns):
        for which, seconds in timed(lab, folder / str(turn), name, plans, slow, sizes).items():
            seconds_by_plan[which] += seconds
    measured = {which: statistics.median(seconds) for which, seconds in seconds_by_plan.items()}
    verdict = verified(folder, name, BATCHES[name], choice.best)
    row = {
        "model": name,
        "axis": axis,
        "cluster": serialization.to_data(cluster),
        "slow_rank": slow,
        "shares": list(choice.best.shares),
        "cuts": list(choice.best.pipeline.cuts),
        "split_shares": list(choice.best.split_shares),
        "plan": serialization.to_data(choice.best),
        "verified": verdict,
        "predicted_s": predicted,
        "measured_s": measured,
        "steps_s": seconds_by_plan,
        "gain_predicted": 1 - predicted["balanced"] / predicted["even"],
        "gain_measured": 1 - measured["balanced"] / measured["even"],
    }
    gains = f"{row['gain_predicted']:.1%} predicted, {row['gain_measured']:.1%}"
    print(f"{name}, {axis}: {gains}; predicted {predicted}, measured {measured}", file=sys.stderr)
    return row


def run_capped(lab: Lab, folder: Path, equal: ClusterSpec, sizes: Sizes) -> dict[str, Any]:
    """Train with equal shares and with the planner's, where the second host has too little memory for equal shares."""
    folder.mkdir()
    model, script = described(CAPPED, CAPPED_BATCH)
    even = replace(script, mesh={"replicate": 2})
    whole = predict(model, equal, even).memory.total
    cap = int(CAP * whole)
    node = equal.nodes[0]
    nodes = (replace(node, name="roomy", count=1), replace(node, name="small", count=1, memory_nbytes=cap))
    cluster = replace(equal, name="capped", nodes=nodes)
    request = PlanRequest(script=script, degree=2, mesh={"replicate": 2}, scope="all", keep_microbatches=True)
    choice = choose(model, cluster, request)
    order = list(choice.nodes or ("roomy", "small"))
    rows = steps_of(lab, folder / "run", CAPPED, CAPPED_BATCH, {"even": even, "balanced": choice.best}, sizes,
                    ("--cap", f"{order.index('small')}:{cap}"))  # fmt: skip
    leave_groups()
    result = {
        "model": CAPPED,
        "batch": CAPPED_BATCH,
        "memory_nbytes": cap,
        "shares": list(choice.best.shares),
        "predicted_nbytes": {"even": whole, "balanced": choice.prediction.memory.total},
        "verified": verified(folder, CAPPED, CAPPED_BATCH, choice.best),
        "rows": rows,
        "summary": {which: "trained" if "step_s" in row else row.get("failed") for which, row in rows.items()},
    }
    print(f"little memory: shares {result['shares']}, {result['summary']}", file=sys.stderr)
    return result


def described(name: str, batch: int) -> tuple[ModelSpec, Plan]:
    """Return the model's description and the plan that its script implies, as `tutti plan` finds them."""
    captured = capture_script(RANK.with_name("plan_rank.py"), ("--workload", name, "--batch", str(batch)))
    return model_spec_of(captured, name=name), captured.plan


def verified(folder: Path, name: str, batch: int, plan: Plan) -> dict[str, Any]:
    """Return the verdict of `tutti verify` on the plan: {"passed", "sentence"}."""
    file = serialization.save(plan, folder / "verified-plan.json")
    words = ("verify", "--json", "--steps", "1", "--plan", str(file))
    script = (str(RANK.with_name("plan_rank.py")), "--workload", name, "--batch", str(batch))
    command = [sys.executable, "-m", "tutti.cli.main", *words, *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode not in (0, 1):
        return {"passed": False, "sentence": done.stderr[-2000:]}
    answer = json.loads(done.stdout)
    return {"passed": done.returncode == 0, "sentence": answer["sentence"]}


def timed(
    lab: Lab, folder: Path, name: str, plans: Mapping[str, Plan], slow: int, sizes: Sizes
) -> dict[str, list[float]]:
    """Return the seconds of each plan's steps, one plan after the other."""
    outcome_by_plan = steps_of(lab, folder, name, BATCHES[name], plans, sizes, ("--slow", str(slow)))
    if any("step_s" not in row for row in outcome_by_plan.values()):
        raise SystemExit(f"{name}: {outcome_by_plan}")
    return {which: row["step_s"] for which, row in outcome_by_plan.items()}


def steps_of(
    lab: Lab,
    folder: Path,
    name: str,
    batch: int,
    plans: Mapping[str, Plan],
    sizes: Sizes,
    hosts: tuple[str, ...],
) -> dict[str, dict[str, Any]]:
    """Return the outcome of each plan, on hosts set up by the options `hosts` of mixed_rank.py."""
    folder.mkdir()
    list_file, output = folder / "plans.json", folder / "rows.jsonl"
    listed = [(which, serialization.to_data(plan)) for which, plan in plans.items()]
    list_file.write_text(json.dumps(listed), encoding="utf-8")
    words = ("--workload", name, f"--batch={batch}", f"--plans={list_file}", f"--output={output}")
    limits = (f"--steps={sizes.steps}", "--seconds=6", "--again=2")
    run = ("--folder", str(folder / "run"), "--timeout", "60", str(RANK), *hosts, "steps")
    done = lab.train(*run, *words, *limits, cwd=folder, timeout_s=300)
    outcome_by_plan = outcomes(output, 2)
    if len(outcome_by_plan) < len(plans):
        raise SystemExit(f"{name}: {outcome_by_plan}\n" + "\n".join(host.err[-2000:] for host in done))
    return outcome_by_plan


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, for each case, the part of the predicted gain that was measured."""
    return {
        f"{case['model']}, {case['axis']}": {
            "gain_predicted": case["gain_predicted"],
            "gain_measured": case["gain_measured"],
            "of_predicted": case["gain_measured"] / case["gain_predicted"] if case["gain_predicted"] else None,
        }
        for case in cases
    }


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table."""
    header = ["case", "shares or cuts", "even ms", "predicted", "balanced ms", "predicted", "gain", "predicted", "part"]
    header.append("verified")
    table = []
    for case in result["cases"]:
        figures = result["summary"][f"{case['model']}, {case['axis']}"]
        ms = [1e3 * case[kind][which] for which in ("even", "balanced") for kind in ("measured_s", "predicted_s")]
        part = "" if figures["of_predicted"] is None else f"{figures['of_predicted']:.0%}"
        parts = case["shares"] or case["cuts"] or case["split_shares"]
        table.append([
            f"{case['model']}, {case['axis']}", " ".join(map(str, parts)),
            *(f"{value:.1f}" for value in ms),
            f"{figures['gain_measured']:.1%}", f"{figures['gain_predicted']:.1%}", part,
            "yes" if case["verified"]["passed"] else "NO",
        ])  # fmt: skip
    capped = result["capped"]
    outcome = [f"{which}: {what[:60]}" for which, what in capped["summary"].items()]
    table.append(["little memory", " ".join(map(str, capped["shares"])), *outcome, *[""] * 5,
                  "yes" if capped["verified"]["passed"] else "NO"])  # fmt: skip
    return header, table
