"""What a step of a Job costs the host beyond a plain loop: a model so small that nothing else counts, on one CPU core.

Both loops train the same model on the same data, and take turns within one process. The first steps, which check the
ranks and note samples, are left out.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tutti
from record import spread

BATCH, WIDTH, CLASSES = 32, 64, 10
FIRST = 220
"""Steps that are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """`turns` times `steps` steps of each loop."""

    turns: int = 12
    steps: int = 100


QUICK = Sizes(turns=2, steps=20)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Time both loops. Returns {"samples": {loop: [seconds of a turn's median step]}, "summary": ..}."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            samples = _samples(sizes, folder)
    finally:
        torch.set_num_threads(threads)
    return {"samples": samples, "summary": _summary(samples)}


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table's header and rows."""
    summary = result["summary"]
    table = [
        [name, *(f"{1e3 * value[key]:.3f}" for key in ("best_s", "median_s")), f"{value['spread']:.0%}"]
        for name, value in summary.items()
        if name != "difference"
    ]
    difference = summary["difference"]
    table.append(["difference", f"{1e3 * difference['best_s']:.3f}", f"{1e3 * difference['median_s']:.3f}", ""])
    return ["loop", "best turn ms", "median turn ms", "spread"], table


def _samples(sizes: Sizes, folder: str) -> dict[str, list[float]]:
    steps = FIRST + sizes.turns * sizes.steps
    loops = {"plain": _plain(_data(steps)), "Job": _job(_data(steps), folder)}
    samples: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        for _ in range(FIRST):
            next(loop)
    for _ in range(sizes.turns):
        for name, loop in loops.items():
            samples[name].append(statistics.median(next(loop) for _ in range(sizes.steps)))
    return samples


def _summary(samples: dict[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {"best_s": min(turns), "median_s": statistics.median(turns), "spread": spread(turns)}
        for name, turns in samples.items()
    }
    found["difference"] = {key: found["Job"][key] - found["plain"][key] for key in ("best_s", "median_s")}
    return found


def _data(steps: int) -> TensorDataset:
    return TensorDataset(torch.randn(BATCH * steps, WIDTH), torch.randint(0, CLASSES, (BATCH * steps,)))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def _plain(data: TensorDataset) -> Iterator[float]:
    """Yield the seconds of each step."""
    model, loss_fn = _model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = time.perf_counter()
    for inputs, targets in DataLoader(data, batch_size=BATCH, shuffle=True):
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        loss.item()
        yield time.perf_counter() - before
        before = time.perf_counter()


def _job(data: TensorDataset, folder: str) -> Iterator[float]:
    """Yield the seconds of each step."""
    job = tutti.Job(global_batch_size=BATCH, folder=os.path.join(folder, "run"), progress=False)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
    before = time.perf_counter()
    for batch in loader:
        job.step(batch)
        yield time.perf_counter() - before
        before = time.perf_counter()
