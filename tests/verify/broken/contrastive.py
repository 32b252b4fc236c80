"""A contrastive loss: each sample against the others of its rank only."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti

job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randn(48, 6, generator=generator))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss(output, target):
    similarity = F.normalize(output, dim=-1) @ F.normalize(target, dim=-1).T
    return F.cross_entropy(similarity / 0.5, torch.arange(len(output)))


model, optimizer, loader = job.prepare(model, optimizer, data, loss)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
