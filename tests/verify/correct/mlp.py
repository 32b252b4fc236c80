"""A perceptron with dropout, on plain tensors."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti

job = tutti.Job(global_batch_size=16, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator))
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(12, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
