"""Handwritten digits where ranks do not wait for each other: held-out accuracy and loss, which is harder to reach."""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti
from harness import run_ranks
from runtime.test_compressed_digits_multirank import BATCH, STEPS, digits
from tutti.spec import codec
from tutti.spec.plan import BatchPlan, Plan

MODES = ("synchronous", "stale:3", "asynchronous", "ad-psgd", "hogwild")


def reach(modes: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """By mode: accuracy held out, and the loss over the training data, of the model that is evaluated."""
    reached = {}
    for sync in modes:
        plan = Plan(batch=BatchPlan(global_batch_size=BATCH), mesh={"replicate": int(os.environ["WORLD_SIZE"])})
        os.environ["TUTTI_PLAN"] = str(codec.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
        os.environ["TUTTI_SYNC"] = sync
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{sync}")
        job = tutti.Job(global_batch_size=BATCH, seed=1)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
        train, test = digits()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [264, 374], gamma=0.1)
        model, _, loader = job.prepare(model, optimizer, train, F.cross_entropy, scheduler=schedule)
        made = 0
        for _ in job.epochs(STEPS):
            for batch in loader:
                job.step(batch)
                made += 1
            if made >= STEPS:
                break
        right = job.evaluate(test, {"accuracy": lambda output, target: (output.argmax(1) == target).double()})
        reached[sync] = right["accuracy"], job.evaluate(train)["loss"]
        job._run().consistency.left(job._run())
    return reached


@pytest.mark.timeout(600)
@pytest.mark.long
def test_every_mode_learns_digits() -> None:
    (found, *others) = run_ranks(reach, 4, MODES, timeout_s=590)
    assert all(one == found for one in others)
    exact = found["synchronous"][0]
    for sync, (accuracy, loss) in found.items():
        assert accuracy >= max(0.97, exact - 0.0075), f"{sync}: accuracy {accuracy:.4f}, synchronous {exact:.4f}"
        assert loss <= 0.05, f"{sync}: loss {loss:.4f}"
