"""Small models, data and a training run for the exactness tests: what N ranks must compute as one device does."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import tutti
from tutti.config import serialization
from tutti.config.plan import BatchPlan, LayoutRule, Plan


class Mlp(nn.Module):
    """Two linear layers with a tied third use of the first's weight, and a parameter no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)
        self.tied = nn.Linear(8, 6, bias=False)
        self.tied.weight = nn.Parameter(self.first.weight.t().contiguous())
        self.back = nn.Linear(6, 8)
        self.back.weight = self.first.weight
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden + torch.tanh(self.back(self.tied(hidden))))


class ConvNet(nn.Module):
    """Convolution with batch statistics in two and one dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.deep = nn.Conv2d(4, 4, 3)
        self.deep_norm = nn.BatchNorm2d(4, momentum=None, affine=False)
        self.head = nn.Linear(4, 8)
        self.head_norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.deep_norm(self.deep(x))).mean((2, 3))
        return self.out(torch.relu(self.head_norm(self.head(x))))


class Tagger(nn.Module):
    """An embedding tied to its head over padded sequences, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.lstm = nn.LSTM(5, 5, batch_first=True)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Augmented(Dataset[Any]):
    """Samples changed at random with Python's, NumPy's and torch's generators."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(self.x[index].shape, dtype=self.x.dtype) * float(np.random.rand())
        return self.x[index] * (1 + random.random()) + noise, self.y[index]


def vectors(count: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(count) % 3)


def images(count: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(count, 1, 8, 8, generator=generator, dtype=torch.float64) + 3.0
    return TensorDataset(x, torch.arange(count) % 3)


def sentences(count: int = 50) -> list[dict[str, torch.Tensor]]:
    """Dict samples of 1 to 12 tokens, padded to 12; target -100 where padded."""
    generator = torch.Generator().manual_seed(9)
    samples = []
    for index in range(count):
        length = 1 + (index * 7) % 12
        tokens = torch.randint(1, 11, (12,), generator=generator)
        target = torch.randint(1, 11, (12,), generator=generator)
        tokens[length:], target[length:] = 0, -100
        samples.append({"tokens": tokens, "target": target})
    return samples


def token_loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tutti.Weighted:
    target = batch["target"]
    total = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
    return tutti.Weighted(total, (target != -100).sum())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any]] = {
    "mlp": (Mlp, vectors, nn.functional.cross_entropy),
    "conv": (ConvNet, images, nn.functional.cross_entropy),
    "tagger": (Tagger, sentences, token_loss),
    "augmented": (Mlp, lambda: Augmented(*vectors().tensors), nn.functional.cross_entropy),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run to compare."""

    model: str = "mlp"
    batch: int = 8
    microbatches: int = 1
    shares: tuple[float, ...] = ()
    last_batch: str = "keep"
    epochs: int = 3
    optimizer: str = "AdamW"
    clip_norm: float | None = None
    dtype: torch.dtype = torch.float64
    recompute: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    workers: int = 0


@dataclass
class Trained:
    losses: list[float]
    batches: list[list[int]]
    state: dict[str, torch.Tensor]
    evaluation: dict[str, float]
    rates: list[float]


def train(case: Case, world_size: int, resume: str | None = None, epochs: int | None = None) -> Trained:
    """Train by the case's plan on this rank and return what must not depend on the number of ranks."""
    import os

    layout = (LayoutRule(),) + ((LayoutRule(modules=case.recompute, recompute=True),) if case.recompute else ())
    batch = BatchPlan(global_batch_size=case.batch, num_microbatches=case.microbatches, last_batch=case.last_batch)
    shares = case.shares[:world_size]
    plan = Plan(batch=batch, mesh={"replicate": world_size}, shares=shares, layout=layout)
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    torch.set_default_dtype(case.dtype)
    job = tutti.Job(
        global_batch_size=case.batch,
        last_batch=case.last_batch,
        clip_norm=case.clip_norm,
        resume=resume,
        **case.options,
    )
    build, data, loss_fn = MODELS[case.model]
    model = build()
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    dataset = data()
    model, optimizer, loader = job.prepare(
        model, optimizer, _cast(dataset, case.dtype), loss_fn, scheduler=scheduler, num_workers=case.workers
    )
    losses, batches, rates = [], [], []
    for _ in job.epochs(epochs or case.epochs):
        for batch in loader:
            losses.append(job.step(batch))
            batches.append(loader.shares.indices.tolist())
            rates.append(optimizer.param_groups[0]["lr"])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return Trained(losses, batches, state, job.evaluate(_cast(dataset, case.dtype)), rates)


def _cast(dataset: Any, dtype: torch.dtype) -> Any:
    if isinstance(dataset, TensorDataset):
        x, y = dataset.tensors
        return TensorDataset(x.to(dtype), y)
    return dataset
