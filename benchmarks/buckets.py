"""Step time by the size of gradient buckets, and the size that --bucket-mb auto chooses.

The run first chooses a size by itself; then the same ranks take turns with all sizes.
"""

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness import run_ranks
from workloads import WORKLOADS

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is timed: `repeats` turns of `steps` of each size in `mib`, after one step that is not counted."""

    ranks: int = 2
    steps: int = 6
    repeats: int = 3
    mib: tuple[str, ...] = ("1", "2", "4", "8", "16", "25", "100")
    workloads: tuple[str, ...] = ("mlp", "cnn")


QUICK = Sizes(steps=2, repeats=1, mib=("2", "25"), workloads=("mlp",))


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure all workloads.

    Returns:
        {"samples": {workload: {MiB: seconds}}, "summary": {workload: {"chosen_mib", "tried", "step_s"}}}.
    """
    samples, summary = {}, {}
    for name in sizes.workloads:
        times, chosen = run_ranks(measure_on_rank, sizes.ranks, name, sizes, timeout_s=600)[0]
        samples[name] = times
        medians = {size: statistics.median(seconds) for size, seconds in times.items()}
        summary[name] = {"chosen_mib": chosen["chosen_mib"], "tried": chosen["step_s"], "step_s": medians}
    return {"samples": samples, "summary": summary}


def measure_on_rank(name: str, sizes: Sizes) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the seconds of steps by size, and on rank 0 the row in which the run says what it chose."""
    import tutti
    from tutti.parallel.data import bucket_size_tuner
    from tutti.trainer.metrics import read_rows

    os.environ |= {"TUTTI_BUCKET_MB": "auto", "TUTTI_RUN_FOLDER": str(Path.cwd() / "run")}
    workload = WORKLOADS[name]
    job = tutti.Job(global_batch_size=workload.batch * sizes.ranks, seed=0)
    model, data = workload.model(), workload.data(workload.batch * sizes.ranks * 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    _, _, loader = job.prepare(model, optimizer, data, workload.loss)
    run = job._prepared
    assert run is not None
    choosing = bucket_size_tuner.WARM_UP + bucket_size_tuner.ROUNDS * (bucket_size_tuner.TIMED + 1) * (
        len(bucket_size_tuner.TRIED) + 1
    )
    batches = (batch for _ in job.epochs(10**6) for batch in loader)
    for _ in range(choosing):
        job.step(next(batches))
    times: dict[str, list[float]] = {size: [] for size in sizes.mib}
    for _ in range(sizes.repeats):
        for size, seconds in times.items():
            run.parallel.replica.rebuild_buckets(run.parallel.replica.order, None, int(float(size) * MIB))
            job.step(next(batches))
            for _ in range(sizes.steps):
                batch = next(batches)
                began = time.perf_counter()
                job.step(batch)
                seconds.append(time.perf_counter() - began)
    if job.rank:
        return times, {}
    written = [row for row in read_rows(run.output.folder.metrics) if row["kind"] == "buckets"]
    return times, written[-1]


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table: header and rows, times of a step in milliseconds."""
    table = []
    for name, entry in result["summary"].items():
        for size, seconds in entry["step_s"].items():
            tried = next((s for mib, s in entry["tried"].items() if float(mib) == float(size)), None)
            chosen = "chosen" if float(size) == entry["chosen_mib"] else ""
            table.append([f"{name}, {size} MiB", f"{1e3 * seconds:.2f}", f"{1e3 * tried:.2f}" if tried else "", chosen])
    return ["buckets of", "step (ms)", "measured by auto (ms)", ""], table
