"""tutti's automatic choice for `pays`: the lab is probed at its rate; the planner chooses with `--relax relaxed`."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from pays_methods import AUTOS, METHODS
from pays_work import WORKS
from tutti.commands.capture import capture_script
from tutti.commands.planning import demanded, model_spec_of, search
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.compression import parse_compression
from tutti.config.mesh_axes import format_mesh
from tutti.config.plan import Plan
from tutti.config.sync_notation import format_relaxation, parse_sync, with_mode
from tutti.errors import PlanError
from tutti.lab import Lab
from tutti.planner import PlanRequest

SCRIPT = Path(__file__).with_name("pays_rank.py")
DIAL = "relaxed"


def choice(model: str, hosts: int, rate: str, listed: str, folder: Path) -> dict[str, Any]:
    """Return the planner's choice for some hosts at a rate, or why it chose nothing.

    The row has the plan, the method it equals (or a new name), its predicted step time and the planner's remarks.
    """
    captured = capture_script(SCRIPT, (f"--work={model}",))
    work = WORKS[model]
    request = PlanRequest(
        script=captured.plan,
        degree=hosts,
        scope=AUTOS[listed],
        demanded=demanded(captured),
        train_samples=work.most * work.batch,
        relax=DIAL,
    )
    row: dict[str, Any] = {"kind": "choice", "as": listed, "rate": rate, "dial": DIAL}
    try:
        result = search(model_spec_of(captured, name=model), cluster_at(hosts, rate, folder), request)
    except PlanError as error:
        return {**row, "failed": str(error)}
    plan, relaxation = result.best, result.relaxation
    name = name_of(plan, captured.plan, hosts)
    return {
        **row,
        "name": name,
        "says": relaxation.sentence if relaxation is not None else " ".join(result.remarks),
        "predicted_step_s": result.prediction.step_time_s.value,
        "exact": plan.sync.compress is None and plan.sync.mode == "synchronous",
        "period": plan.sync.relaxed.period or 1,
        "delay": plan.sync.relaxed.delay or 0,
        **begins(plan, folder / f"{model}-{hosts}-{rate}-{AUTOS[listed]}-first-plan.json"),
        "file": str(serialization.save(plan, folder / f"{model}-{hosts}-{rate}-{AUTOS[listed]}-plan.json")),
        "plan": serialization.to_data(plan),
    }


def begins(plan: Plan, file: Path) -> dict[str, Any]:
    """Return how many updates are made before the replicas diverge, and the file of the plan that makes all updates
    so.
    """
    after = plan.sync.relaxed.after or 0
    if not after:
        return {"begins": 0}
    return {"begins": after, "first_file": str(serialization.save(replace(plan, sync=plan.sync.at_first), file))}


def name_of(plan: Plan, script: Plan, hosts: int) -> str:
    """Return the name of the method with this plan, or the plan in words."""
    for method in METHODS.values():
        if method.side == "tutti" and alike(plan, by_hand(method.name, script, hosts)):
            return method.name
    strategy = format_relaxation(plan.sync) or plan.sync.mode
    slices = plan.batch.num_microbatches
    return f"tutti {format_mesh(plan.mesh)}, {strategy}" + (f", {slices} microbatches" if slices > 1 else "")


def by_hand(name: str, script: Plan, hosts: int) -> Plan:
    """Return the plan that `tutti run --nproc` makes of a method's variables."""
    words = dict(METHODS[name].words)
    plan = replace(script, mesh={"replicate": hosts})
    if "TUTTI_COMPRESS" in words:
        plan = plan.compressed(parse_compression(words["TUTTI_COMPRESS"]))
    return with_mode(plan, parse_sync(words["TUTTI_SYNC"])) if "TUTTI_SYNC" in words else plan


def alike(one: Plan, other: Plan) -> bool:
    """Return whether two plans compute and send the same. Settings of axes that the plans do not have are ignored."""
    return all(getattr(one, name) == getattr(other, name) for name in ("mesh", "sync", "layout", "precision", "batch"))


def cluster_at(hosts: int, rate: str, folder: Path) -> ClusterSpec:
    """Return the hosts with one rank each, as `tutti probe` measured them at a rate; they are probed once."""
    kept = folder / f"cluster-{hosts}-{rate}.json"
    if not kept.exists():
        with Lab(hosts, rates=rate) as lab, tempfile.TemporaryDirectory() as run:
            words = ("tutti.cli.main", "probe", "--quick", "--no-plot", "--output", str(kept))
            done = lab.train("--folder", str(Path(run) / "probe"), "-m", *words, cwd=Path(run), timeout_s=300)
        if not kept.exists():
            raise SystemExit("tutti probe failed on the lab's hosts\n" + "\n".join(host.err for host in done))
    return serialization.load(ClusterSpec, kept)
