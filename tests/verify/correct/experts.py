"""A mixture of experts: tokens are grouped by expert, and experts without tokens are not called."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Experts(nn.Module):
    """Experts whose weights are apart or, as in newer libraries, one tensor, with one activation for all."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 5, bias=False)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.together = nn.Parameter(torch.randn(5, 6, 6) * 0.3)
        self.act = nn.SiLU()

    def forward(self, tokens):
        rows = tokens.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2, dim=-1)
        total = torch.zeros_like(rows)
        for index in chosen.unique().tolist():
            place, row = torch.where(index == chosen.T)
            mixed = self.act(self.experts[index](rows[row])) @ self.together[index]
            total = total.index_add(0, row, mixed * weights[row, place, None])
        return tokens + total.view_as(tokens)


class DropPath(nn.Module):
    def forward(self, tokens):
        keep = tokens.new_empty((len(tokens), 1, 1)).bernoulli_(0.7)
        return tokens * keep / 0.7 + 0.1 * torch.randn_like(tokens) + 0.1 * torch.randint(0, 9, (len(tokens), 1, 1))


job = tutti.Job(global_batch_size=12, seed=3)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 7, 6, generator=generator), torch.randn(48, 7, 6, generator=generator))
model = nn.Sequential(Experts(), DropPath(), Experts())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.MSELoss())
for _ in job.epochs(1):
    for batch in loader:
        job.step(batch)
