"""Padding is averaged in: what a sample gives depends on how far its rank pads."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import tutti


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.arange(1, 3 + index * 5 % 17), index % 3


def collate(samples):
    rows, targets = zip(*samples, strict=True)
    return pad_sequence(rows, batch_first=True), torch.tensor(targets)


class Mean(nn.Module):
    def forward(self, value):
        return value.mean(1)


job = tutti.Job(global_batch_size=12, seed=1)
model = nn.Sequential(nn.Embedding(20, 8), Mean(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, Texts(), nn.CrossEntropyLoss(), collate_fn=collate)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
