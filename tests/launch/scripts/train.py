"""A Job, as small as can be: 4 steps an epoch; argument 1: epochs, argument 2: seconds to sleep after a step."""

import sys
import time

import torch
from torch import nn

import tutti

job = tutti.Job(global_batch_size=16, seed=0)
model = nn.Linear(8, 1)
samples = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model, optimizer, loader = job.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), samples, nn.functional.mse_loss
)
for epoch in job.epochs(int(sys.argv[1])):
    for batch in loader:
        job.step(batch)
        time.sleep(float(sys.argv[2]))
    job.print("epoch", epoch, "of", job.world_size, "ranks")
