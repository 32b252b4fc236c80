"""Training habits, each as a plain loop on one device, which runs nothing of tutti, and on ranks under a plan."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from against_one import close, same_names
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan
from tutti.errors import TuttiError
from tutti.parallel.layout import gather_whole, local_tensors, to_local

STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Habit:
    """What is trained: `function(model, batch)` is a batch's mean loss; `between(model, step)` runs after updates."""

    model: Callable[[], nn.Module]
    function: Callable[[nn.Module, Any], torch.Tensor]
    data: Callable[[], TensorDataset]
    batch: int = 6
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    between: Callable[[nn.Module, int], None] | None = None
    clip_norm: float | None = None
    job: dict[str, Any] = field(default_factory=dict)


@dataclass
class Values:
    losses: list[float]
    state: dict[str, torch.Tensor]


def plain(habit: Habit) -> Values:
    """The habit on one device: a loop as in torch's tutorials."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    model = habit.model()
    optimizer = habit.optimizer(model.parameters(), lr=0.05)
    tensors = habit.data().tensors
    losses = []
    for step in range(STEPS):
        batch = tuple(tensor[step * habit.batch : (step + 1) * habit.batch] for tensor in tensors)
        optimizer.zero_grad()
        loss = habit.function(model, batch)
        loss.backward()
        if habit.clip_norm is not None:
            clip(model, habit.clip_norm)
        optimizer.step()
        losses.append(loss.item())
        if habit.between is not None:
            habit.between(model, step)
    return Values(losses, {name: value.clone() for name, value in model.state_dict().items()})


def clip(model: nn.Module, norm: float) -> None:
    """As torch.nn.utils.clip_grad_norm_, for sparse gradients too."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = sum(float(g.to_dense().square().sum()) for g in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, norm / (total + 1e-6)))


def on_rank(makers: list[Callable[[], Habit]], plan: dict[str, Any], shared: str) -> list[Values | str]:
    """The habits, one after another, on this rank; what is refused gives its message."""
    os.environ["TUTTI_SHARED_MEMORY"] = shared
    os.environ["TUTTI_TIMEOUT_S"] = "30"
    torch.set_default_dtype(torch.float64)
    results: list[Values | str] = []
    for number, maker in enumerate(makers):
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}")
        try:
            results.append(_trained(maker(), plan))
        except (TuttiError, RuntimeError) as error:  # the latter where another rank has refused
            results.append(str(error))
    return results


def _trained(habit: Habit, plan: dict[str, Any]) -> Values:
    batch = BatchPlan(global_batch_size=habit.batch, **plan.get("batch", {}))
    written = Plan(batch=batch, **{key: value for key, value in plan.items() if key != "batch"})
    os.environ["TUTTI_PLAN"] = str(serialization.save(written, Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=habit.batch, clip_norm=habit.clip_norm, **habit.job)
    torch.manual_seed(3)
    model = habit.model()
    optimizer = habit.optimizer(model.parameters(), lr=0.05)
    model, optimizer, loader = job.prepare(model, optimizer, habit.data(), shuffle=False)
    losses: list[float] = []
    for step, data in zip(range(STEPS), loader, strict=False):
        losses.append(job.forward_backward(habit.function, data))
        job.update()
        if habit.between is not None:
            habit.between(model, step)
    run = job._run()
    parts = {name: to_local(tensor) for name, tensor in local_tensors(model)}
    return Values(losses, gather_whole(run.parallel.layout, run.parallel.world, parts))


def assert_as_plain(makers: list[Callable[[], Habit]], world_size: int, shared: str = "on", **plan: Any) -> None:
    """All ranks compute what the plain loops compute."""
    expected = run_ranks(all_plain, 1, makers)[0]
    for rank, results in enumerate(run_ranks(on_rank, world_size, makers, plan, shared)):
        for maker, one, got in zip(makers, expected, results, strict=True):
            words = f"{maker.__name__}, rank {rank}"
            assert not isinstance(got, str), f"{words}: {got}"
            close(torch.tensor(got.losses), torch.tensor(one.losses), 1e-12, f"{words}: losses")
            same_names(got.state, one.state, words)
            for name, value in one.state.items():
                close(got.state[name], value, 1e-12, f"{words}: {name}")


def all_plain(makers: list[Callable[[], Habit]]) -> list[Values]:
    return [plain(maker()) for maker in makers]
