"""Texts padded in front to the longest of the share, as for generation: causal attention with masked padding."""

import torch
from torch import nn

import tutti


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 36

    def __getitem__(self, index):
        return torch.arange(index + 1, index + 3 + index * 5 % 11) % 19 + 1, index % 3


def collate(samples):
    longest = max(len(row) for row, _ in samples)
    ids = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row, _ in samples])
    return {"ids": ids, "mask": ids > 0}, torch.tensor([target for _, target in samples])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(6, 18)

    def forward(self, value, mask):
        query, key, content = self.mixed(value).chunk(3, -1)
        allowed = mask[:, None] & torch.ones(*mask.shape[1:] * 2, dtype=torch.bool).tril()
        scores = (query @ key.mT).masked_fill(~allowed, -1e9)
        return value + scores.softmax(-1) @ content


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.attention, self.head = nn.Embedding(20, 6), Attention(), nn.Linear(6, 3)

    def forward(self, ids, mask):
        return self.head(self.attention(self.table(ids), mask)[:, -1])


job = tutti.Job(global_batch_size=9, seed=4)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = job.prepare(
    model,
    optimizer,
    Texts(),
    nn.CrossEntropyLoss(),
    collate_fn=collate,
    unpack=lambda batch: ((), batch[0], batch[1]),
)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
