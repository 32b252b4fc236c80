"""Gradients are clipped by norm inside backward, by a function of the model."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1e-3 / torch.linalg.vector_norm(gradient)).clamp(max=1.0)


class Clipped(nn.Module):
    def forward(self, value):
        return Clip.apply(value)


job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Clipped(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
