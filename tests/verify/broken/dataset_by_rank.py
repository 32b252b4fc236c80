"""A data set that gives each rank other samples."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Sharded(torch.utils.data.Dataset):
    def __init__(self, rows, targets, rank):
        self.rows, self.targets, self.rank = rows, targets, rank

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        index = (index + self.rank) % len(self.rows)
        return self.rows[index], self.targets[index]


job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sharded = Sharded(*data.tensors, job.rank)
model, optimizer, loader = job.prepare(model, optimizer, sharded, nn.CrossEntropyLoss())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
