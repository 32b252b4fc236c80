"""Sequences packed by collate_fn: an LSTM, and a linear layer on the packed rows, whose order follows the lengths."""

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import tutti


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.randn(1 + index * 3 % 8, 3, generator=torch.Generator().manual_seed(index)), index % 4


def collate(samples):
    rows, targets = zip(*samples, strict=True)
    return {"rows": pack_sequence(rows, enforce_sorted=False), "targets": torch.tensor(targets)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.lstm, self.head = nn.Linear(3, 5), nn.LSTM(5, 6), nn.Linear(6, 4)

    def forward(self, rows):
        entered = torch.tanh(self.enter(rows.data))
        packed = PackedSequence(entered, rows.batch_sizes, rows.sorted_indices, rows.unsorted_indices)
        outputs, lengths = pad_packed_sequence(self.lstm(packed)[0])
        return self.head(outputs.sum(0) / lengths[:, None])


job = tutti.Job(global_batch_size=10, seed=4)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = job.prepare(
    model,
    optimizer,
    Sequences(),
    nn.CrossEntropyLoss(),
    collate_fn=collate,
    unpack=lambda batch: ((batch["rows"],), {}, batch["targets"]),
)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
