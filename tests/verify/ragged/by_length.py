"""Texts that collate_fn sorts by length and pads, so that rows are in another order on ranks than on one device."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import tutti


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.arange(index + 1, index + 3 + index * 5 % 11) % 29 + 1, index % 3


def collate(samples):
    samples = sorted(samples, key=lambda sample: -len(sample[0]))
    rows, targets = zip(*samples, strict=True)
    weights = torch.tensor([1.0 / len(row) for row in rows])
    return pad_sequence(rows, batch_first=True), weights, torch.tensor(targets)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(30, 6, padding_idx=0), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, ids, weights):
        mixed = torch.tanh(self.mix(self.table(ids))) * (ids > 0)[..., None]
        return self.head(nn.functional.dropout(mixed.sum(1) * weights[:, None], 0.2))


job = tutti.Job(global_batch_size=10, seed=4)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = job.prepare(model, optimizer, Texts(), nn.CrossEntropyLoss(), collate_fn=collate)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
