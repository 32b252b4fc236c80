"""A classifier that warms up and is evaluated after every epoch, with a scheduler that follows the result."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti

rule = tutti.LRRule(scale="none", warmup="gradual", warmup_steps=3)
job = tutti.Job(global_batch_size=8, seed=2, clip_norm=0.5, lr_rule=rule, checkpoint_every=100)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(30, 6, generator=generator), torch.randint(0, 3, (30,), generator=generator))
model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Dropout(0.2), nn.Linear(10, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss(), scheduler=scheduler)
# BREAK


def right(output, target):
    return output.argmax(-1) == target


def spread(output, target):
    return output.std()


for _ in job.epochs(3):
    for batch in loader:
        job.step(batch)
    values = job.evaluate(data, {"right": right}, whole={"spread": spread})
    job.schedule(values["loss"])
