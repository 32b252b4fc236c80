"""Noise for each sample from a generator of NumPy that the script made."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti

draws = np.random.default_rng(5)


class Noisy(nn.Module):
    def forward(self, value):
        return value * torch.from_numpy(draws.uniform(0.8, 1.2, (len(value), 1))).to(value.dtype)


job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
model = nn.Sequential(nn.Linear(6, 8), Noisy(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
