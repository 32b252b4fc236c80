"""A loss summed over samples instead of averaged."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -output.log_softmax(1)[torch.arange(len(target)), target].sum()


job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data, summed)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
