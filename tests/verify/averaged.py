"""A compiled model with BatchNorm, whose averaged weights are evaluated."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti

job = tutti.Job(global_batch_size=8, seed=0, compile={"backend": "aot_eager"})
model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.sum(1, keepdim=True))
model, optimizer, loader = job.prepare(model, optimizer, data, nn.MSELoss())
average = tutti.AveragedWeights(job, decay=0.9)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
        average.update()
    with average.applied():
        job.evaluate(data)
    average.update_bn()
    with average.applied():
        job.evaluate(data, name="recomputed")
