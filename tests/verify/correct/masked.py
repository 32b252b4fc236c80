"""Only the tokens that count are computed with, in any number a sample; the model returns the loss' parts."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.inner = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 10)
        self.loss = nn.CrossEntropyLoss(reduction="sum")

    def forward(self, ids):
        hidden = self.inner(self.drop(self.inner(self.embedding(ids))))
        counting = ids != 0
        return self.loss(self.head(hidden[counting]), ids[counting]), counting.sum()


job = tutti.Job(global_batch_size=10, seed=3)
ids = torch.randint(0, 10, (30, 7), generator=torch.Generator().manual_seed(0))
model = Model()
optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
model, optimizer, loader = job.prepare(
    model, optimizer, TensorDataset(ids, ids), lambda output, target: tutti.Weighted(*output)
)
for _ in job.epochs(1):
    for batch in loader:
        job.step(batch)
