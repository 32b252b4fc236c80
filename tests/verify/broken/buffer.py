"""A running mean of activations that every rank keeps from its own samples; forward does not use it."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Watched(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("running", torch.zeros(size))

    def forward(self, value):
        if self.training:
            self.running.lerp_(value.detach().mean(0), 0.1)
        return value.tanh()


job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
model = nn.Sequential(nn.Linear(6, 8), Watched(8), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
