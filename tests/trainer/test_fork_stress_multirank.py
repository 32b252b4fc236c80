"""Workers are forked while checkpoints and rows are written in the background: none of them may hang."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks

STEPS_PER_EPOCH, CHECKPOINT_EVERY = 10, 2


def train(folder: str, epochs: int) -> int:
    job = tutti.Job(global_batch_size=8, folder=folder, checkpoint_every=CHECKPOINT_EVERY)
    model = nn.Linear(8, 4)
    data = TensorDataset(torch.randn(8 * STEPS_PER_EPOCH, 8), torch.arange(8 * STEPS_PER_EPOCH) % 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    # Not persistent: every epoch forks both workers anew.
    model, _, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy, num_workers=2)
    steps = 0
    for _ in job.epochs(epochs):
        for batch in loader:
            job.step(batch)
            steps += 1
    return steps


@pytest.mark.parametrize("epochs", [3, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_no_worker_hangs(epochs: int, tmp_path: Path) -> None:
    assert run_ranks(train, 2, str(tmp_path), epochs, timeout_s=600) == [STEPS_PER_EPOCH * epochs] * 2
