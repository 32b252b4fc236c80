"""Statistics over the batch, computed between two layers by the model around them."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, value):
        hidden = self.first(value)
        hidden = (hidden - hidden.mean(0)) / hidden.std(0)
        return self.last(hidden)


job = tutti.Job(global_batch_size=12, seed=1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
