"""Exchanges of a step under `space` and `expert`: time in flight, exposed time, and time hidden behind computation.

The times are those of a run's own timers on rank 0. Convolutions compute their interior while halos are in flight.
The same ranks also take turns in which they wait for the halos first, which shows the gain. Experts compute the
tokens of their own rank while the others are in flight; nothing hides the results on their way back.
"""

import itertools
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp import _block
from harness import run_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is timed: in each of `launches`, `repeats` blocks of `steps` of each variant, after `warmup` steps."""

    ranks: int = 2
    launches: int = 3
    steps: int = 4
    warmup: int = 4
    repeats: int = 5
    cases: tuple[str, ...] = ("space", "expert")


QUICK = Sizes(launches=1, steps=2, warmup=2, repeats=2)

WAYS = {"space": ("interior while halos travel", "waiting for halos"), "expert": ("own tokens while others travel",)}
Rows = list[dict[str, Any]]


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure all cases. Returns {"samples": {case: {variant: step rows}}, "summary": {case: {variant: {"step_s",
    "lanes"}}}}.
    """
    samples: dict[str, dict[str, Rows]] = {}
    for name in sizes.cases:
        launches = [
            run_ranks(measure_on_rank, sizes.ranks, name, sizes, n, timeout_s=600)[0] for n in range(sizes.launches)
        ]
        samples[name] = {strategy: [row for launch in launches for row in launch[strategy]] for strategy in WAYS[name]}
    summaries = {
        name: {strategy: summary(step_rows) for strategy, step_rows in strategies.items()}
        for name, strategies in samples.items()
    }
    return {"samples": samples, "summary": summaries}


def summary(found: Rows) -> dict[str, Any]:
    """Return medians over steps; `hidden` is the part of the time in flight during which rank 0 did not wait."""
    branches: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        for entry in row["communication"]:
            branches.setdefault(entry["carried"], []).append(entry)
    return {
        "step_s": statistics.median(row["wall_s"] for row in found),
        "lanes": {carried: _branch(entries) for carried, entries in branches.items() if _timed(entries)},
    }


def _timed(entries: Rows) -> bool:
    return all(entry["in_progress_s"] is not None for entry in entries)


def _branch(entries: Rows) -> dict[str, Any]:
    in_progress = statistics.median(entry["in_progress_s"] for entry in entries)
    exposed = statistics.median(sum(entry["exposed_s"].values()) for entry in entries)
    return {
        "exchanges": statistics.median(entry["count"] for entry in entries),
        "nbytes": statistics.median(entry["nbytes"] for entry in entries),
        "in_progress_s": in_progress,
        "exposed_s": exposed,
        "hidden": max(0.0, 1 - exposed / in_progress) if in_progress else 0.0,
    }


def measure_on_rank(name: str, sizes: Sizes, launch: int) -> dict[str, Rows]:
    """Return the rows of a case's steps by variant, as the run wrote them; empty on ranks other than 0."""
    from tutti.comm.world import join_world
    from tutti.host_memory import keep_freed_memory
    from tutti.trainer.metrics import read_rows

    world = join_world()
    keep_freed_memory()
    folder = Path.cwd() / "run"
    os.environ |= {"TUTTI_MESH": f"{name}={sizes.ranks}", "TUTTI_RUN_FOLDER": str(folder)}
    model, loop = LOOPS[name]()
    _block(loop, sizes.warmup)
    strategies = WAYS[name]
    order: list[str] = []
    for repeat in range(sizes.repeats):
        for strategy in strategies if (repeat + launch) % 2 else strategies[::-1]:
            if name == "space":
                model.forward.space.overlap = strategy == strategies[0]  # type: ignore[union-attr, assignment]
            _block(loop, sizes.steps)
            order += [strategy] * sizes.steps
    if world.rank:
        return {strategy: [] for strategy in strategies}
    steps = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "step"][-len(order) :]
    kept = [{key: row[key] for key in ("wall_s", "phases", "communication")} for row in steps]
    return {
        strategy: [row for row, taken in zip(kept, order, strict=True) if taken == strategy] for strategy in strategies
    }


# The models


def volumes() -> tuple[nn.Module, Iterator[None]]:
    """Five 3-D convolutions with 16 channels on volumes of 48 x 32 x 32, two volumes in a step."""
    widths = (1, 16, 16, 16, 16, 2)
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Conv3d(a, b, 3, padding=1), nn.ReLU())]
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(16, 1, 48, 32, 32, generator=draw), torch.randint(2, (16, 48, 32, 32), generator=draw)
    )
    return _job(nn.Sequential(*layers[:-1]), data, batch=2)


class Mixtures(nn.Module):
    """Two mixtures of 4 experts of width 256, hidden width 1024, top-2."""

    def __init__(self) -> None:
        from tutti.nn import MixtureOfExperts

        super().__init__()
        self.blocks = nn.ModuleList(MixtureOfExperts(256, 1024, 4, top_k=2) for _ in range(2))
        self.out = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def tokens() -> tuple[nn.Module, Iterator[None]]:
    """The two mixtures on 1024 tokens in a step."""
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(8192, 256, generator=draw), torch.randint(10, (8192,), generator=draw))
    return _job(Mixtures(), data, batch=1024)


LOOPS = {"space": volumes, "expert": tokens}


def _job(model: nn.Module, data: TensorDataset, batch: int) -> tuple[nn.Module, Iterator[None]]:
    import tutti

    job = tutti.Job(global_batch_size=batch, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, _, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy)

    def loop() -> Iterator[None]:
        for _ in job.epochs(1_000_000):
            for samples in loader:
                job.step(samples)
                yield

    return model, loop()


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table: header and rows, times of a step in milliseconds."""
    table = []
    for strategies in result["summary"].values():
        for strategy, entry in strategies.items():
            table.append([strategy, f"{1e3 * entry['step_s']:.1f}", "", "", "", "", ""])
            table += [
                [
                    f"  {carried}",
                    "",
                    f"{branch['exchanges']:g}",
                    f"{branch['nbytes'] / 1e3:.1f}",
                    f"{1e3 * branch['in_progress_s']:.2f}",
                    f"{1e3 * branch['exposed_s']:.2f}",
                    f"{branch['hidden']:.0%}",
                ]
                for carried, branch in entry["lanes"].items()
            ]
    return ["variant", "step ms", "exchanges", "kB", "in flight ms", "exposed ms", "hidden"], table
