"""Checks while training: their share of the time of a run's first steps, and of as many later ones.

Two ranks train as usual, and the clock runs within each check: a difference of two runs would be lost in their spread.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from harness import run_ranks
from workloads import WORKLOADS


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """`repeats` runs of `steps` steps for each workload; "tiny" is two small layers."""

    ranks: int = 2
    steps: int = 1000
    repeats: int = 3
    workloads: tuple[str, ...] = ("tiny", "mlp")


QUICK = Sizes(steps=20, repeats=1, workloads=("tiny",))

CHECKS = ("guard_step", "guard_loss", "note_state", "check_state", "guard_update")
"""What trainer/step.py and, the last, trainer/update.py call; a step calls each of them once."""


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure all workloads. Returns {"samples": {workload: runs}, "summary": {workload: medians}}, in seconds."""
    samples = {
        name: [run_ranks(timed, sizes.ranks, name, sizes.steps, timeout_s=3600)[0] for _ in range(sizes.repeats)]
        for name in sizes.workloads
    }
    return {"samples": samples, "summary": {name: summary(runs) for name, runs in samples.items()}}


def summary(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return medians over runs; `later` is the share of as many steps with one checked step among them."""
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    later = medians["unchecked_s"] + medians["last_checked_s"]
    return {**medians, "share": medians["checks_s"] / medians["run_s"], "later_share": later / medians["run_s"]}


def timed(name: str, steps: int) -> dict[str, float]:
    """Train on this rank, and return the seconds of all steps and those of the checks within them."""
    import tutti
    from tutti.trainer import step as trainer_step
    from tutti.trainer import update as trainer_update

    torch.set_num_threads(1)
    spent: list[float] = []
    for check in CHECKS:
        caller = trainer_update if check == "guard_update" else trainer_step
        setattr(caller, check, partial(_clocked, getattr(caller, check), spent))
    model, data, loss, batch = _subject(name)
    with tempfile.TemporaryDirectory() as folder:
        job = tutti.Job(global_batch_size=2 * batch, folder=Path(folder) / "run", keep_checkpoints=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, _, loader = job.prepare(model, optimizer, data, loss)
        done, begin = 0, time.perf_counter()
        while done < steps:
            for share in loader:
                job.step(share)
                if (done := done + 1) == steps:
                    break
        run_s = time.perf_counter() - begin
    by_step = [sum(spent[at : at + len(CHECKS)]) for at in range(0, len(spent), len(CHECKS))]
    return {
        "run_s": run_s,
        "checks_s": sum(by_step),
        "first_s": by_step[0],
        "last_checked_s": by_step[999] if steps > 999 else by_step[min(9, steps - 1)],
        "unchecked_s": statistics.median(by_step) * steps,
    }


def _clocked(check: Callable[..., Any], spent: list[float], *args: Any) -> Any:
    begin = time.perf_counter()
    try:
        return check(*args)
    finally:
        spent.append(time.perf_counter() - begin)


def _subject(name: str) -> tuple[nn.Module, TensorDataset, Any, int]:
    if name != "tiny":
        workload = WORKLOADS[name]
        return workload.model(), workload.data(64 * workload.batch), workload.loss, workload.batch
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(1024, 64, generator=draw), torch.randint(10, (1024,), generator=draw))
    return tiny(), data, nn.CrossEntropyLoss(), 16


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table: header and rows."""
    header = ["workload", "run s", "checks ms", "first step ms", "share", "share later"]
    return header, [
        [
            name,
            f"{entry['run_s']:.2f}",
            f"{1e3 * entry['checks_s']:.1f}",
            f"{1e3 * entry['first_s']:.1f}",
            f"{entry['share']:.4f}",
            f"{entry['later_share']:.4f}",
        ]
        for name, entry in result["summary"].items()
    ]
