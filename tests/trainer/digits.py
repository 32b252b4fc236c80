"""Handwritten digits: a perceptron is trained by a plan, and how far it comes."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan

BATCH, STEPS = 128, 440


@dataclass(frozen=True, kw_only=True)
class Reached:
    """`accuracy`: held out. `last`: mean loss of the last 40 steps, as the rank sees it.
    `loss`: over the training data, as evaluated."""

    accuracy: float
    last: float
    loss: float


def digits() -> tuple[TensorDataset, TensorDataset]:
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(found.data / 16, dtype=torch.float32)[order], torch.tensor(found.target)[order]
    return TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def reach(
    name: str,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum_sgd,
    plan_of: Callable[[Plan], Plan] = lambda plan: plan,
    seed: int = 1,
    times: float = 1.0,
    **environment: str,
) -> Reached:
    """Train on these ranks, replicas of each other, with a rate that falls twice; `plan_of` changes their plan, and
    the training is `times` as long as exact sums are given."""
    plan = Plan(batch=BatchPlan(global_batch_size=BATCH), mesh={"replicate": int(os.environ["WORLD_SIZE"])})
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan_of(plan), Path.cwd() / f"plan-{os.getpid()}.json"))
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{name}")
    os.environ.update(environment)
    job = tutti.Job(global_batch_size=BATCH, seed=seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    train, test = digits()
    steps = optimizer(model.parameters())
    length = round(STEPS * times)
    schedule = torch.optim.lr_scheduler.MultiStepLR(steps, [length * 60 // 100, length * 85 // 100], gamma=0.1)
    model, _, loader = job.prepare(model, steps, train, F.cross_entropy, scheduler=schedule)
    losses: list[float] = []
    for _ in job.epochs(length):
        losses += [job.step(batch) for batch in loader]
        if len(losses) >= length:
            break
    right = job.evaluate(test, {"accuracy": lambda output, target: (output.argmax(1) == target).double()})
    reached = Reached(accuracy=right["accuracy"], last=sum(losses[-40:]) / 40, loss=job.evaluate(train)["loss"])
    job._run().state.consistency.on_exit(job._run().parallel)
    return reached
