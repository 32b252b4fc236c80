"""A small decoder with causal attention, dropout, tied embeddings: what every layout can divide."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.merge, self.drop = nn.Linear(width, width), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        normal = self.norm1(x)
        layers = (self.query, self.key, self.value)
        q, k, v = (layer(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.merge(mixed))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, words=12, width=8, seq=8):
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(seq, width)
        self.blocks = nn.Sequential(*(Block(width, 2) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        places = self.places(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(self.tokens(x) + places)))


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


job = tutti.Job(global_batch_size=8, seed=5, clip_norm=1.0)
tokens = torch.randint(12, (24, 9), generator=torch.Generator().manual_seed(0))
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
model, optimizer, loader = job.prepare(model, optimizer, TensorDataset(tokens[:, :-1], tokens[:, 1:]), loss)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
