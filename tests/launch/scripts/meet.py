"""A plain program: joins the world from whatever environment started it; every rank prints its facts, then trains."""

import json
import sys

import torch
from torch import nn

import tutti
from tutti.comm.world import join_world

world = join_world()
facts = {
    "rank": world.rank,
    "world_size": world.world_size,
    "local_rank": world.local_rank,
    "local_world_size": world.local_world_size,
    "launcher": world.launcher,
    "total": world.sum(torch.tensor([float(world.rank + 1)])).item(),
}
sys.stdout.write(json.dumps(facts) + "\n")  # in one piece, beside the other ranks
sys.stdout.flush()

job = tutti.Job(global_batch_size=16, seed=0)
model = nn.Linear(8, 1)
samples = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
model, optimizer, loader = job.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), samples, nn.functional.mse_loss
)
for _ in job.epochs(1):
    for batch in loader:
        job.step(batch)
job.print("trained on", job.world_size, "ranks")
