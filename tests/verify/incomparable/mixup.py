"""Mixing of neighbours in a random order that is drawn for the whole batch."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Mixup(nn.Module):
    def forward(self, value):
        return 0.9 * value + 0.1 * value[torch.randperm(len(value))]


job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Mixup(), nn.Linear(8, 3))
# MODEL
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
