"""Optimizer state in files on a disk: step, update and memory beside state in memory, and beside the prediction.

The cluster is measured first, with the disk, as `tutti probe --nvme-path` does. Ranks compute on CPUs, so both kinds
of plan copy parameters and gradients within one memory, and differ in the optimizer's state alone.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from harness import run_ranks
from tutti.config.plan import BatchPlan, Plan, ShardingPlan

BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Width and number of layers, steps of each run, and how often both are run in turn."""

    width: int = 4096
    layers: int = 8
    steps: int = 6
    runs: int = 3


QUICK = Sizes(width=1024, layers=4, steps=3, runs=1)

CASES = {
    "memory": ShardingPlan(offload="optimizer"),
    "disk": ShardingPlan(offload="optimizer", offload_device="nvme"),
}


def model_of(sizes: Sizes) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(sizes.width, sizes.width, bias=False), nn.ReLU()) for _ in range(sizes.layers)]
    return nn.Sequential(*layers, nn.Linear(sizes.width, 10))


def data_of(sizes: Sizes) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    count = BATCH * sizes.steps
    return TensorDataset(torch.randn(count, sizes.width, generator=generator), torch.arange(count) % 10)


def plan_of(case: str) -> Plan:
    return Plan(batch=BatchPlan(global_batch_size=BATCH), mesh={"replicate": 1}, sharding=CASES[case])


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure the cluster, then both cases in turn. Returns {case: {measured, predicted}} and the disk's rates."""
    from dataclasses import asdict

    from tutti.commands.probe import _with_disk
    from tutti.cost_model import predict
    from tutti.profile.probe import measure as probe
    from tutti.profile.probe.memory_rates import measure_disk

    (model,) = run_ranks(describe, 1, sizes, timeout_s=300)
    disk = measure_disk(Path.cwd(), 2**30)
    cluster = _with_disk(probe(quick=True), [disk])
    taken: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for _ in range(sizes.runs):
        for case, entries in taken.items():
            entries += run_ranks(train, 1, sizes, case, timeout_s=900)
    assert all(entry["values"] == taken["memory"][0]["values"] for entries in taken.values() for entry in entries)
    summary = {}
    for case, entries in taken.items():
        predicted = predict(model, cluster, plan_of(case))
        phases = ("step", "optimizer", "peak_nbytes")
        summary[case] = {
            "measured": {name: statistics.median(entry[name] for entry in entries) for name in phases},
            "measured_runs": [{name: entry[name] for name in phases} for entry in entries],
            "predicted": {
                "step": predicted.step_time_s.value,
                "step_interval": [predicted.step_time_s.low, predicted.step_time_s.high],
                "optimizer": predicted.phases["optimizer"],
                "peak_nbytes": predicted.memory.total,
                "disk_nbytes": predicted.memory.disk,
            },
        }
    return {
        "summary": summary,
        "disk": asdict(disk) | {"path": "."},
        "parameters": sum(module.parameters for module in model.modules),
    }


def describe(sizes: Sizes) -> Any:
    """Return the ModelSpec; runs in its own process."""
    import tutti
    from tutti.commands.describe import describe_captured
    from tutti.trainer.capture import capturing

    job = tutti.Job(global_batch_size=BATCH)
    model = model_of(sizes)
    with capturing() as capture:
        job.prepare(model, torch.optim.AdamW(model.parameters()), data_of(sizes), F.cross_entropy)
    return describe_captured(capture.captured, name="mlp")


def train(sizes: Sizes, case: str) -> dict[str, Any]:
    """Make some steps; returns the median times of a step and its update, the peak memory, and a digest of values."""
    import os
    import time

    import tutti
    from tutti.config import serialization
    from tutti.parallel.part_guards import reading_parts
    from tutti.trainer.metrics import read_rows
    from tutti.trainer.run_end import peak_memory_nbytes

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan_of(case), Path.cwd() / "plan.json"))
    job = tutti.Job(global_batch_size=BATCH, seed=1, progress=False)
    torch.manual_seed(0)
    model = model_of(sizes)
    model, _, loader = job.prepare(model, torch.optim.AdamW(model.parameters()), data_of(sizes), F.cross_entropy)
    times = []
    for batch in loader:
        began = time.perf_counter()
        float(job.step(batch))
        times.append(time.perf_counter() - began)
    metrics = read_rows(Path(os.environ["TUTTI_RUN_FOLDER"]) / "metrics.jsonl")
    updates = [row["phases"]["optimizer"] for row in metrics if "loss" in row and "phases" in row]
    with reading_parts():
        values = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
    return {
        "step": statistics.median(times[2:] or times),
        "optimizer": statistics.median(updates[2:] or updates),
        "peak_nbytes": peak_memory_nbytes(job.device),
        "values": values,
    }


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["state in", "step s", "predicted", "update s", "predicted", "peak MB", "predicted"]
    table = []
    for case, entry in result["summary"].items():
        got, said = entry["measured"], entry["predicted"]
        pairs = [(got["step"], said["step"]), (got["optimizer"], said["optimizer"])]
        cells = [f"{number:.3f}" for pair in pairs for number in pair]
        table.append([case, *cells, f"{got['peak_nbytes'] / 1e6:.0f}", f"{said['peak_nbytes'] / 1e6:.0f}"])
    return header, table
