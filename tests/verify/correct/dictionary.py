"""Dict batches, a model that computes its own loss, unused and frozen parameters, accumulation, augmentation."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import tutti


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        values = torch.full((5,), float(index)).sin() + 0.1 * torch.randn(5) + np.random.rand() + random.random()
        return {"values": values, "target": values.sum()}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(7, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, values, target):
        self.steps += 1
        noise = torch.randn_like(values) * 0.05
        hidden = torch.tanh(self.first(values + noise))
        output = self.last(self.frozen(hidden) + torch.rand(len(values), 1)).squeeze(-1)
        return {"loss": F.mse_loss(output, target), "output": output}


job = tutti.Job(global_batch_size=10, seed=5, num_microbatches=3)
model = Model()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
model, optimizer, loader = job.prepare(model, optimizer, Augmented())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
