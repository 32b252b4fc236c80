"""A transformer encoder with dropout everywhere, recomputed, on padded token sequences with a token-weighted loss."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

import tutti


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = 2 + (7 * index) % 9
        return torch.randint(1, 20, (length,), generator=generator)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.positions = nn.Parameter(torch.randn(16, 8) * 0.1)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.drop(self.embedding(ids) + self.positions[: ids.shape[1]])
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, None, ids == 0, use_reentrant=False)
        q = hidden.unflatten(-1, (2, 4)).transpose(1, 2)
        mask = (ids != 0)[:, None, None, :]
        mixed = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.3)
        return self.head(hidden + mixed.transpose(1, 2).flatten(2))


def loss(output, ids):
    total = F.cross_entropy(output.flatten(0, 1), ids.flatten(), ignore_index=0, reduction="sum")
    return tutti.Weighted(total, (ids != 0).sum())


job = tutti.Job(global_batch_size=8, seed=4, num_microbatches=2, clip_norm=1.0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = job.prepare(
    model, optimizer, Texts(), loss, collate_fn=lambda rows: pad_sequence(rows, batch_first=True)
)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
