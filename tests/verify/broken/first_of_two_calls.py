"""Two losses before an update; the forward of the first one depends on the rank."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Shift(nn.Module):
    def forward(self, x):
        return x + 0.1 * job.rank


job = tutti.Job(global_batch_size=12, seed=1)
data = TensorDataset(torch.randn(48, 6, generator=torch.Generator().manual_seed(0)))
model = nn.ModuleDict({"first": nn.Sequential(nn.Linear(6, 4), Shift(), nn.Linear(4, 1)), "second": nn.Linear(6, 1)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data)
for _ in job.epochs(1):
    for batch in loader:
        job.forward_backward(lambda networks, batch: networks["first"](batch[0]).square().mean(), batch)
        job.forward_backward(lambda networks, batch: networks["second"](batch[0]).square().mean(), batch)
        job.update()
