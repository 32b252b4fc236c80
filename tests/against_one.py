"""N ranks under a plan against one device: losses, gradients and parameters of every step, on values.

A subject is a module-level function without arguments that returns a `Subject`; ranks import it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tutti
from harness import HANG_S, run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan
from tutti.parallel.layout import gather_whole, local_tensors, to_local
from tutti.parallel.losses import loss_of
from tutti.parallel.part_guards import reading_parts


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is trained. `model` is called after the Job has seeded torch; data are the same whenever they are made."""

    model: Callable[[], nn.Module]
    data: Any
    loss_fn: Any = None
    batch: int = 8
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    rate: float = 0.01
    job: dict[str, Any] = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trained:
    """What must not depend on the plan. `gradients[step][name]`: whole, before clipping; `state`: whole, at the end."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]
    evaluation: dict[str, float]
    facts: dict[str, Any] = field(default_factory=dict)


@reading_parts()
def train(
    make: Callable[[], Subject],
    plan_fields: dict[str, Any],
    steps: int,
    dtype: torch.dtype,
    look: Callable[[Any], dict[str, Any]] | None = None,
) -> Trained:
    """Train on this rank; `look(run)`, module-level, returns facts to keep (held shapes, memory)."""
    torch.set_default_dtype(dtype)
    subject = make()
    stated = {key: subject.job[key] for key in ("num_microbatches", "unit", "last_batch") if key in subject.job}
    batch = BatchPlan(global_batch_size=subject.batch, **{**stated, **plan_fields.get("batch", {})})
    plan = Plan(batch=batch, **{key: value for key, value in plan_fields.items() if key != "batch"})
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(
        global_batch_size=subject.batch, **{k: v for k, v in subject.job.items() if k != "num_microbatches"}
    )
    model = subject.model()
    optimizer = subject.optimizer(model.parameters(), lr=subject.rate)
    model, optimizer, loader = job.prepare(model, optimizer, subject.data, subject.loss_fn, **subject.prepare)
    run = job._run()
    function = loss_of(run.loop.unpack, run.loop.loss_fn)
    losses, gradients = [], []
    while len(losses) < steps:
        for data in loader:
            losses.append(job.forward_backward(function, data))
            named = {name: to_local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            gradients.append(gather_whole(run.parallel.layout, run.parallel.world, named))
            job.update()
            if len(losses) == steps:
                break
    parts = {name: to_local(tensor) for name, tensor in local_tensors(model)}
    state = gather_whole(run.parallel.layout, run.parallel.world, parts)
    facts = look(run) if look else {}
    return Trained(losses, gradients, state, job.evaluate(subject.data), facts)


def on_one(make: Callable[[], Subject], *, steps: int = 5, dtype: torch.dtype = torch.float64, **plan: Any) -> Trained:
    """Training on one device, by the plan's batch and nothing else of it."""
    fields = {key: value for key, value in plan.items() if key == "batch"}
    return run_ranks(train, 1, make, fields, steps, dtype)[0]


def on_many(
    make: Callable[[], Subject],
    *,
    steps: int = 5,
    dtype: torch.dtype = torch.float64,
    look: Callable[[Any], dict[str, Any]] | None = None,
    timeout_s: float = HANG_S,
    **plan: Any,
) -> list[Trained]:
    """Training by a plan (its fields), one result a rank."""
    world_size = Plan(batch=BatchPlan(global_batch_size=1), mesh=plan["mesh"]).world_size
    return run_ranks(train, world_size, make, plan, steps, dtype, look, timeout_s=timeout_s)


def assert_agree(one: Trained, many: list[Trained], tolerance: float = 1e-12) -> None:
    """Every rank of `many` got what `one` did: losses, all gradients of all steps, all parameters and buffers."""
    for rank, got in enumerate(many):
        close(torch.tensor(got.losses), torch.tensor(one.losses), tolerance, f"rank {rank}: losses")
        for step, (theirs, ours) in enumerate(zip(got.gradients, one.gradients, strict=True)):
            same_names(theirs, ours, f"rank {rank}, step {step}: gradients")
            for name, value in ours.items():
                close(theirs[name], value, tolerance, f"rank {rank}, step {step}: gradient of {name}")
        same_names(got.state, one.state, f"rank {rank}: state")
        for name, value in one.state.items():
            close(got.state[name], value, tolerance, f"rank {rank}: {name}")
        for name, value in one.evaluation.items():
            close(torch.tensor(got.evaluation[name]), torch.tensor(value), tolerance, f"rank {rank}: evaluation {name}")


def assert_same_as_one(make: Callable[[], Subject], tolerance: float = 1e-12, **options: Any) -> list[Trained]:
    """Train on one device and by the plan, and compare; returns what the ranks got."""
    many = on_many(make, **options)
    one = on_one(make, **{key: value for key, value in options.items() if key in ("steps", "dtype", "batch")})
    assert_agree(one, many, tolerance)
    return many


def same_names(got: dict[str, Any], expected: dict[str, Any], words: str) -> None:
    assert got.keys() == expected.keys(), f"{words}: {sorted(got.keys() ^ expected.keys())} are on one side only"


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float, words: str) -> None:
    """Differences relative to the tensor's largest value."""
    assert got.shape == expected.shape, f"{words}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    scale = max(float(expected.double().abs().max()), 1e-300) if expected.numel() else 1.0
    gap = float((got.double() - expected.double()).abs().max()) / scale if expected.numel() else 0.0
    assert gap <= tolerance, f"{words}: differs by {gap:.2e} of its largest value, more than {tolerance:g}"
