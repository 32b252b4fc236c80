"""A model with a constant that stays in float32, which a product with float64 refuses."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = [torch.eye(6)]

    def forward(self, value):
        return torch.mm(value, self.matrix[0])


job = tutti.Job(global_batch_size=12, seed=1)
data = TensorDataset(torch.arange(288.0).view(48, 6).sin(), torch.arange(48) % 3)
model = nn.Sequential(Fixed(), nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
