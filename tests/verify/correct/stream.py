"""A stream of samples, two optimizers, a step of the script's own, weights clamped between steps."""

import torch
from torch import nn

import tutti


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for _ in range(40):
            value = torch.randn(4)
            yield value, value.prod()


job = tutti.Job(global_batch_size=8, seed=6)
model = nn.ModuleDict({"body": nn.Linear(4, 6), "head": nn.Linear(6, 1)})
optimizers = [
    torch.optim.SGD(model["body"].parameters(), lr=0.1),
    torch.optim.Adam(model["head"].parameters(), lr=0.01),
]


def forward(modules, batch):
    values, target = batch
    output = modules["head"](modules["body"](values).relu()).squeeze(-1)
    return (output - target).pow(2).mean()


model, optimizers, loader = job.prepare(model, optimizers, Stream())
for _ in job.epochs(1):
    for batch in loader:
        job.forward_backward(forward, batch)
        job.update()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.5, 0.5)
