"""Complex parameters, between a Fourier transform and its inverse."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.register_buffer("phase", torch.polar(torch.ones(5), torch.arange(5.0)))

    def forward(self, value):
        return value * self.weight * self.phase


class Transform(nn.Module):
    def __init__(self, transform):
        super().__init__()
        self.transform = transform

    def forward(self, value):
        return self.transform(value)


job = tutti.Job(global_batch_size=12, seed=3, clip_norm=1.0)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(48, 8, generator=generator), torch.randn(48, 8, generator=generator))
model = nn.Sequential(nn.Linear(8, 8), Transform(torch.fft.rfft), Fourier(), Transform(torch.fft.irfft))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.MSELoss())
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
