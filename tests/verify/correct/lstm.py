"""A two-layer LSTM with dropout between its layers, samples in the second dim, packed sequences."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import tutti


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = 2 + index % 5
        return torch.randn(length, 3, generator=generator), index % 2


def collate(samples):
    rows, targets = zip(*samples, strict=True)
    lengths = torch.tensor([len(row) for row in rows])
    return pad_sequence(rows, batch_first=True), lengths, torch.tensor(targets)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 5, num_layers=2, dropout=0.4)
        self.free = nn.LSTM(3, 5, num_layers=2, dropout=0.4)
        self.head = nn.Linear(10, 2)

    def forward(self, rows, lengths):
        packed = pack_padded_sequence(rows.transpose(0, 1), lengths, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        outputs, _ = self.free(rows[:, :2].transpose(0, 1).contiguous())
        return self.head(torch.cat([hidden[-1], outputs[-1]], -1))


job = tutti.Job(global_batch_size=8, seed=3)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = job.prepare(model, optimizer, Sequences(), nn.CrossEntropyLoss(), collate_fn=collate)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
