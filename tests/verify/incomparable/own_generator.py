"""Noise from a generator of the script's own: every rank draws the first rows."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, value):
        return value + torch.randn(value.shape, generator=self.generator)


job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
model = nn.Sequential(nn.Linear(6, 8), Noisy(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
