"""Forward does something else on rank 0."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Odd(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def forward(self, value):
        return value if self.rank == 0 else value * 1.01


job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
model = nn.Sequential(nn.Linear(6, 8), Odd(job.rank), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
