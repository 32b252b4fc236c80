"""A collate_fn that masks words at random, drawn for the whole batch."""

import torch
from torch import nn

import tutti


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        ids = (index * 3 + torch.arange(6)) % 20 + 1
        # SAMPLE
        return {"ids": ids}


class Masking:
    # GENERATOR
    def __call__(self, samples):
        ids = torch.stack([sample["ids"] for sample in samples])
        hidden = torch.rand(ids.shape) < 0.3
        hidden[:, 0] = True
        return {"ids": ids.masked_fill(hidden, 0), "targets": ids.masked_fill(~hidden, -100)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(22, 6), nn.Linear(6, 6), nn.Linear(6, 22)

    def forward(self, ids):
        value = self.table(ids)
        return self.head(torch.tanh(self.mix(value.mean(1, keepdim=True) + value))).transpose(1, 2)


job = tutti.Job(global_batch_size=12, seed=1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(
    model,
    optimizer,
    Texts(),
    nn.CrossEntropyLoss(),
    collate_fn=Masking(),
    unpack=lambda batch: ((batch["ids"],), {}, batch["targets"]),
)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
