"""Sequence before samples: attention, GRU, kinds of dropout, random slopes, spectral norm, recompute, BatchNorm."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import tutti


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3)
        self.recurrent = nn.GRU(8, 4, num_layers=2, dropout=0.3, bidirectional=True)
        self.alpha = nn.AlphaDropout(0.2)
        self.features = nn.FeatureAlphaDropout(0.2)
        self.slopes = nn.RReLU()
        self.norm = nn.BatchNorm1d(8)
        self.bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, value):
        hidden = self.layer(self.embed(value.transpose(0, 1)))
        hidden, _ = self.attention(hidden, hidden, hidden)
        hidden, _ = self.recurrent(hidden)
        hidden = checkpoint(lambda v: self.alpha(self.bounded(v)), hidden, use_reentrant=False)
        hidden = self.norm(self.slopes(self.features(hidden.permute(1, 2, 0))))
        return self.head(hidden.mean(-1))


job = tutti.Job(global_batch_size=10, seed=3, num_microbatches=2, clip_norm=0.1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(30, 6, 3, generator=generator), torch.randint(0, 2, (30,), generator=generator))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
for _ in job.epochs(1):
    for batch in loader:
        job.step(batch)
