"""A gradient that another rank than the first changes for itself: parts that no other rank holds too."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti

job = tutti.Job(global_batch_size=8, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(32, 6, generator=generator), torch.randint(0, 4, (32,), generator=generator))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for _ in job.epochs(2):
    for batch in loader:
        job.forward_backward(lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), batch)
        if job.rank == 1:
            for parameter in model[2].parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1.01)
        job.update()
