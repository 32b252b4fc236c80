"""A Weighted that already holds the mean: its total and its count do not add up."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti

job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss(output, target):
    weight = 1.0 + target.float()
    each = F.cross_entropy(output, target, reduction="none") * weight
    return tutti.Weighted(each.sum() / weight.sum(), 1.0)


model, optimizer, loader = job.prepare(model, optimizer, data, loss)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
