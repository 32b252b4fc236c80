"""An expert computes something else on rank 1."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Expert(nn.Linear):
    def __init__(self, rank):
        super().__init__(6, 6)
        self.rank = rank

    def forward(self, rows):
        return super().forward(rows) * (1.01 if self.rank == 1 else 1.0)


class Experts(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.gate = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(Expert(rank if index == 2 else 0) for index in range(4))

    def forward(self, tokens):
        rows = tokens.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2, dim=-1)
        total = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            place, row = torch.where(index == chosen.T)
            total = total.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        return tokens + total.view_as(tokens)


job = tutti.Job(global_batch_size=12, seed=3)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 7, 6, generator=generator), torch.randn(48, 7, 6, generator=generator))
model = nn.Sequential(nn.Linear(6, 6), Experts(job.rank))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.MSELoss())
for _ in job.epochs(1):
    for batch in loader:
        job.step(batch)
