"""Sums in fewer bytes travel while backward goes on: by the order of events, whatever they take."""

import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.compression.reducer import CountedCollectives
from tutti.config import serialization
from tutti.config.compression import parse_compression
from tutti.config.plan import BatchPlan, Plan, SyncPlan
from tutti.parallel.compressed.comm_thread import RoundsWork

LAYERS = 6
PATIENCE_S = 20.0


class Waits(torch.autograd.Function):
    """The identity, whose backward waits for an event."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wait: Any) -> torch.Tensor:
        ctx.wait = wait
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.wait()
        return gradient, None


class Deep(nn.Module):
    """Linear layers; the backward of the first one waits."""

    def __init__(self, wait: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        self.wait = wait

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = Waits.apply(x, self.wait) if number == 0 else x
        return x


def overlapping(words: str) -> list[tuple[bool, bool]]:
    """By step: whether codes had been sent, and a sum was over, before the first layer had its gradient."""
    sent, over = threading.Event(), threading.Event()
    swap, finish = CountedCollectives.swap, RoundsWork.over

    def swapped(self: CountedCollectives, *arguments: Any) -> Any:
        works = swap(self, *arguments)
        sent.set()
        return works

    def ended(self: RoundsWork, error: BaseException | None = None) -> None:
        finish(self, error)
        over.set()

    CountedCollectives.swap, RoundsWork.over = swapped, ended  # type: ignore[method-assign]
    found: list[tuple[bool, bool]] = []
    plan = Plan(
        batch=BatchPlan(global_batch_size=8),
        mesh={"replicate": int(os.environ["WORLD_SIZE"])},
        sync=SyncPlan(bucket_nbytes=64, compress=parse_compression(words)),
    )
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=8)
    model = Deep(lambda: found.append((sent.wait(PATIENCE_S), over.wait(PATIENCE_S))))
    data = TensorDataset(torch.randn(24, 8), torch.randint(8, (24,)))
    model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, F.cross_entropy)
    for batch in loader:
        sent.clear()
        over.clear()
        job.step(batch)
    return found


def test_codes_are_sent_and_sums_are_over_before_backward_is() -> None:
    """A sum that waited for the end of backward would never come while backward waits for it."""
    for found in run_ranks(overlapping, 2, "one-bit"):
        assert found == [(True, True)] * 3
