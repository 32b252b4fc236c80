"""Layers whose factors are fewer bytes than their weights, one of them used twice."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti

job = tutti.Job(global_batch_size=8, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(64, 60, generator=generator), torch.randint(0, 3, (64,), generator=generator))
middle = nn.Linear(80, 80)
model = nn.Sequential(nn.Linear(60, 80), nn.ReLU(), middle, nn.Dropout(0.3), middle, nn.ReLU(), nn.Linear(80, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
