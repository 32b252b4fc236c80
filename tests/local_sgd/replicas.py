"""Training with replicas that differ: what every rank has after every step."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from trainer import training
from tutti.config import serialization
from tutti.config.compression import parse_compression
from tutti.config.plan import BatchPlan, Plan, SyncPlan
from tutti.config.sync_notation import parse_sync, with_mode
from tutti.parallel.layout import local_tensors
from tutti.trainer.metrics import read_rows


class Choosy(nn.Module):
    """Uses one of its layers only for some samples, so that some replicas leave it unused in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.some = nn.Linear(5, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if float(x[0, 0]) > 0.8:
            hidden = self.some(hidden)
        return self.out(hidden)


class Words(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, sparse=True)
        self.out = nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens).mean(1))


def words() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randint(0, 7, (50, 3), generator=generator), torch.arange(50) % 3)


def one_bad() -> TensorDataset:
    """Vectors, one of which is not a number."""
    x, y = training.vectors().tensors
    x[17] = float("nan")
    return TensorDataset(x, y)


MODELS = {
    **training.MODELS,
    "choosy": (Choosy, training.vectors, nn.functional.cross_entropy),
    "words": (Words, words, nn.functional.cross_entropy),
    "bad": (training.Mlp, one_bad, nn.functional.cross_entropy),
}


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one training is told. `rate`, `arguments`: of the optimizer; `freeze`: (step, name) -> frozen from there;
    `leaves`: ends right after its last step; `wish`: the mode is the launcher's, not the plan file's.
    """

    sync: str = "synchronous"
    compress: str = ""
    model: str = "mlp"
    batch: int = 12
    steps: int = 6
    microbatches: int = 1
    shares: tuple[float, ...] = ()
    optimizer: str = "SGD"
    rate: float = 0.05
    arguments: dict[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None
    save_at: int | None = None
    freeze: tuple[int, str] | None = None
    folder: str = ""
    leaves: bool = False
    wish: bool = False
    job: dict[str, Any] = field(default_factory=dict)


@dataclass
class Seen:
    """One rank's view. `batches`: samples of each global batch; `states[step]`: its own parameters and buffers after
    each step; `rows`: rank 0's rows of steps; `after`: what it has once training has ended.
    """

    losses: list[float] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    evaluation: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    saved: str = ""
    after: dict[str, torch.Tensor] = field(default_factory=dict)


def plan_of(told: Told, world_size: int) -> Plan:
    batch = BatchPlan(global_batch_size=told.batch, num_microbatches=told.microbatches)
    shares = told.shares[:world_size]
    plan = Plan(batch=batch, mesh={"replicate": world_size}, shares=shares, sync=parse_sync(told.sync))
    return plan.compressed(parse_compression(told.compress) if told.compress else None)


def train(told: Told, world_size: int, resume: str | None = None) -> Seen:
    """Train on this rank as told, from the start or from a checkpoint until the same step."""
    torch.set_default_dtype(torch.float64)
    os.environ["TUTTI_RUN_FOLDER"] = told.folder or str(
        Path.cwd() / f"run-{len(list(Path.cwd().glob('run-*')))}-{world_size}"
    )
    plan = plan_of(told, world_size)
    os.environ["TUTTI_SYNC"] = told.sync if told.wish else ""
    if told.wish:
        plan = with_mode(plan, SyncPlan())
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=told.batch, clip_norm=told.clip_norm, resume=resume, **told.job)
    build, data, loss_fn = MODELS[told.model]
    model = build()
    optimizer = getattr(torch.optim, told.optimizer)(model.parameters(), lr=told.rate, **told.arguments)
    model, optimizer, loader = job.prepare(model, optimizer, data(), loss_fn)
    run, seen = job._run(), Seen()
    for _ in job.epochs(10):
        for one in loader:
            if told.freeze and run.state.progress.step == told.freeze[0]:
                model.get_parameter(told.freeze[1]).requires_grad_(False)
            seen.losses.append(job.step(one))
            seen.batches.append(loader.shares.indices.tolist())
            seen.states.append({name: tensor.detach().clone() for name, tensor in local_tensors(model)})
            if run.state.progress.step == told.save_at:
                seen.saved = str(job.save())
            if run.state.progress.step == told.steps:
                break
        if run.state.progress.step == told.steps:
            break
    if told.leaves:
        return seen
    seen.evaluation = job.evaluate(data())
    run.state.consistency.finish(run.parallel)
    run.state.consistency.on_exit(run.parallel)
    seen.after = {name: tensor.detach().clone() for name, tensor in local_tensors(model)}
    rows = read_rows(run.output.folder.metrics) if run.parallel.world.is_main else []
    seen.rows = [row for row in rows if row["kind"] == "step"]
    return seen


def train_all(told: dict[str, Told], world_size: int) -> dict[str, Seen]:
    """Several trainings, one after another in the same ranks."""
    return {name: train(one, world_size) for name, one in told.items()}


def train_twice(told: dict[str, Told], world_size: int) -> dict[str, tuple[Seen, Seen]]:
    """Several trainings, each of which is then resumed from what it saved on the way."""
    first = train_all(told, world_size)
    return {name: (seen, train(told[name], world_size, seen.saved)) for name, seen in first.items()}


def train_on(told: Told, saved: str, world_size: int) -> Seen:
    """One training from a checkpoint."""
    return train(told, world_size, saved)
