"""Convolutions, BatchNorm after a biased convolution, dropout of channels, clipping, unequal shares."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti

job = tutti.Job(global_batch_size=9, seed=2, clip_norm=0.5, last_batch="keep")
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(20, 1, 8, 8, generator=generator), torch.randint(0, 4, (20,), generator=generator))
model = nn.Sequential(
    nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8),
    nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 4),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss(), scheduler=scheduler)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
