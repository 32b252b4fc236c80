"""A sampler that already shares the samples among ranks."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti

job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = list(range(job.rank, len(data), job.world_size))
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss(), sampler=sampler)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
