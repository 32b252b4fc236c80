"""Of a model and its data: what it is described as without running it, and the most bytes alive in a step by a plan."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tutti
from matrix.cell import alive_nbytes
from matrix.peak import recorded_peak
from tutti.commands.describe import describe_captured
from tutti.config.model import ModelSpec
from tutti.config.prediction import RankMemory
from tutti.parallel.losses import loss_of
from tutti.trainer.capture import capturing


def described(
    model: nn.Module, data: Any, loss_fn: Any, *, batch: int, name: str, optimizer: Any = torch.optim.Adam
) -> ModelSpec:
    """The ModelSpec of a training with batches of `batch`."""
    job = tutti.Job(global_batch_size=batch)
    made = optimizer(model.parameters())  # the first one imports much
    with capturing() as capture:
        job.prepare(model, made, data, loss_fn)
    assert capture.captured is not None
    return describe_captured(capture.captured, name=name)


def peak_of_a_step(model: nn.Module, data: Any, loss_fn: Any, *, batch: int, plan: Path) -> int:
    """The most bytes alive in forward and backward on this rank; `data`: two batches."""
    os.environ["TUTTI_PLAN"] = str(plan)
    job = tutti.Job(global_batch_size=batch)
    model, _, loader = job.prepare(model, torch.optim.Adam(model.parameters()), data, loss_fn)
    first, second = list(loader)
    run = job._run()
    job.step(first)
    facts: dict[str, int] = {}
    with recorded_peak(facts, "peak") as begin:
        job.step(first)
        begin(alive_nbytes(run))
        job.forward_backward(loss_of(run.loop.unpack, run.loop.loss_fn), second)  # type: ignore[arg-type]
    return facts["peak"]


def nbytes_of_tensors(memory: RankMemory) -> float:
    """Bytes predicted for tensors: without those of libraries, and of the script's process, which are measured."""
    return memory.total - memory.reserve - memory.script
