"""A layer that is left out at random, for the whole batch: one number of Python's and one of NumPy's generator."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, value):
        scale = 1.0 + 0.1 * np.random.rand()
        return value + scale * torch.tanh(self.inner(value)) if random.random() < 0.7 else value * scale


job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
model = nn.Sequential(nn.Linear(6, 8), Dropped(), Dropped(), Dropped(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
