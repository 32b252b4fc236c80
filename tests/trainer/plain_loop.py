"""The same training twice: a plain loop of PyTorch on one device, and a Job on this rank by a plan."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti
from tutti.config import serialization
from tutti.config.plan import BatchPlan, LayoutRule, Plan

Trained = tuple[list[float], dict[str, torch.Tensor]]
"""The losses of all steps, and the state dict at the end."""


def plain(build: Callable[[], nn.Module], x: torch.Tensor, batch: int, microbatches: int = 1) -> Trained:
    """Train on one device with SGD, one epoch in the order of the data; the last batch may be short."""
    torch.manual_seed(0)
    model, y = build(), torch.arange(len(x)) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for start in range(0, len(x), batch):
        inputs, target = x[start : start + batch], y[start : start + batch]
        optimizer.zero_grad()
        total = 0.0
        ends = [len(inputs) * number // microbatches for number in range(1, microbatches)]
        for part, wanted in zip(inputs.tensor_split(ends), target.tensor_split(ends), strict=True):
            loss = F.cross_entropy(model(part), wanted) * len(part) / len(inputs)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def by_plan(
    build: Callable[[], nn.Module],
    x: torch.Tensor,
    batch: int,
    mesh: Mapping[str, int],
    microbatches: int = 1,
    recompute: str = "",
    **plan: Any,
) -> Trained:
    """Train on this rank by a plan."""
    layout = (LayoutRule(), LayoutRule(modules=recompute, recompute=True)) if recompute else (LayoutRule(),)
    size = BatchPlan(global_batch_size=batch, num_microbatches=microbatches)
    file = Path.cwd() / f"plan-{os.getpid()}.json"
    serialization.save(Plan(batch=size, mesh=dict(mesh), layout=(*plan.pop("layout", ()), *layout), **plan), file)
    os.environ["TUTTI_PLAN"] = str(file)
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{by_plan.number}")
    by_plan.number += 1
    job = tutti.Job(global_batch_size=batch, num_microbatches=microbatches)
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(x, torch.arange(len(x)) % 3)
    model, optimizer, loader = job.prepare(model, optimizer, data, F.cross_entropy, shuffle=False)
    losses = [job.step(piece) for piece in loader]
    return losses, {name: value.clone() for name, value in job.state_dict().items()}


by_plan.number = 0


def assert_same(many: Trained, one: Trained, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(many[0], one[0], rtol=tolerance, atol=tolerance)
    for name, value in one[1].items():
        torch.testing.assert_close(
            many[1][name], value, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )
