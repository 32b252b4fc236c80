"""Nested tensors: one row of any length for each sample, also as a module's output."""

import torch
from torch import nn

import tutti


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(1 + index % 5, 4, generator=torch.Generator().manual_seed(index)), index % 3


def collate(samples):
    return torch.nested.nested_tensor([rows for rows, _ in samples]), torch.tensor([target for _, target in samples])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, rows):
        return self.head(torch.stack([torch.tanh(row).mean(0) for row in self.enter(rows).unbind()]))


job = tutti.Job(global_batch_size=6, seed=4)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = job.prepare(model, optimizer, Rows(), nn.CrossEntropyLoss(), collate_fn=collate)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
