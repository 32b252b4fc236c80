"""A mean over the tokens of this rank, so ranks with few tokens weigh too much."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti

job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
ids = torch.randint(1, 20, (48, 9), generator=generator)
ids[torch.arange(9) >= torch.randint(1, 10, (48, 1), generator=generator)] = 0
model = nn.Sequential(nn.Embedding(20, 8), nn.Tanh(), nn.Linear(8, 20))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss(output, target):
    counts = target.flatten() != 0
    return F.cross_entropy(output.flatten(0, 1)[counts], target.flatten()[counts], reduction="none").mean()


model, optimizer, loader = job.prepare(model, optimizer, TensorDataset(ids, ids), loss)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
