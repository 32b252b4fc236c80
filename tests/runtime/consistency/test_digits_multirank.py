"""Handwritten digits with the modes that the planner may choose, at their longest periods: what it counts them with
(plan.ways) stands on this."""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti
from harness import run_ranks
from runtime.test_compressed_digits_multirank import BATCH, STEPS, digits
from tutti.plan.ways import WAYS
from tutti.spec import codec
from tutti.spec.plan import BatchPlan, Plan

LONGEST = {way.mode: way for way in sorted(WAYS, key=lambda way: way.relaxed.period or 1) if way.mode != "synchronous"}
"""By mode: the way with the longest period."""


def reach(modes: list[str]) -> dict[str, tuple[float, float]]:
    """By mode: (held-out accuracy, mean loss of the last 40 steps), with momentum and a rate that falls twice."""
    reached = {}
    for mode in modes:
        plan = Plan(batch=BatchPlan(global_batch_size=BATCH), mesh={"replicate": int(os.environ["WORLD_SIZE"])})
        way = LONGEST[mode]  # type: ignore[index]
        os.environ["TUTTI_PLAN"] = str(codec.save(way.of(plan), Path.cwd() / f"plan-{os.getpid()}.json"))
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{mode}")
        job = tutti.Job(global_batch_size=BATCH, seed=1)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
        train, test = digits()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [264, 374], gamma=0.1)
        model, _, loader = job.prepare(model, optimizer, train, F.cross_entropy, scheduler=schedule)
        losses: list[float] = []
        for _ in job.epochs(STEPS // len(loader)):
            losses += [job.step(batch) for batch in loader]
        right = job.evaluate(test, {"accuracy": lambda output, target: (output.argmax(1) == target).double()})
        reached[mode] = right["accuracy"], sum(losses[-40:]) / 40
    return reached


@pytest.mark.timeout(600)
@pytest.mark.long
def test_digits_are_learnt_in_every_mode_that_may_be_chosen() -> None:
    for found in run_ranks(reach, 4, list(LONGEST), timeout_s=590):
        for mode, (accuracy, loss) in found.items():
            assert accuracy >= 0.97, f"{mode}: accuracy {accuracy:.4f}"
            assert loss <= 0.05, f"{mode}: loss {loss:.4f}"
