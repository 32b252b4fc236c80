"""Sequences over ranks against one device: whole training runs, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti
from against_one import Subject, assert_same_as_one
from tutti.spec.plan import LayoutRule

VOCABULARY, LENGTH = 11, 16


def tokens(samples: int = 20, length: int = LENGTH) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (samples, length + 1), generator=draw)
    return TensorDataset(text[:, :-1], text[:, 1:])


class Block(nn.Module):
    """Causal attention with fewer key heads than query heads, then an MLP."""

    def __init__(self, width: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv, self.merge = (
            nn.Linear(width, width),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, seq, 4, -1).transpose(1, 2)
        k, v = self.kv(y).view(batch, seq, 2, 2, -1).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True, enable_gqa=True)
        x = x + self.merge(y.transpose(1, 2).reshape(batch, seq, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Learned positions counted by torch.arange, and an embedding that is also the head."""

    def __init__(self, width: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.where = nn.Embedding(VOCABULARY, width), nn.Embedding(2 * LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.where(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Encoder(nn.Module):
    """torch's own encoder layers with padding, positions by name, and BatchNorm over all tokens."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.where = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor, padding: Tensor, positions: Tensor | None = None) -> Tensor:
        positions = torch.arange(x.shape[1]) if positions is None else positions
        y = self.tokens(x) + self.where(positions)
        y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        return self.head(self.layers(y, src_key_padding_mask=padding))


def mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def token_loss(logits: Tensor, target: Tensor) -> Any:
    """The mean over tokens below 7: as a total and a count."""
    counts = (target < 7).double()
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return tutti.Weighted((losses * counts.flatten()).sum(), counts.sum())


def gpt() -> Subject:
    return Subject(model=GPT, data=tokens(), loss_fn=mean_loss, batch=8, job={"clip_norm": 0.3})


def gpt_by_tokens() -> Subject:
    return Subject(model=GPT, data=tokens(length=24), loss_fn=token_loss, batch=6)


def last_ignored() -> Subject:
    """Every sample's last target is ignored: ranks have different numbers of tokens, samples have not."""
    inputs, target = tokens().tensors
    target = target.clone()
    target[:, -1] = -100
    return Subject(model=GPT, data=TensorDataset(inputs, target), loss_fn=mean_loss, batch=8)


def padded() -> Subject:
    inputs, target = tokens().tensors
    padding = torch.arange(LENGTH) >= torch.arange(20)[:, None] % 7 + 9
    return Subject(
        model=Encoder, data=TensorDataset(inputs, padding, target), loss_fn=mean_loss, optimizer=torch.optim.SGD
    )


def masks_out(run: Any) -> dict[str, Any]:
    return {"positions": run.sequences.part is not None}


RECOMPUTE = (LayoutRule(modules="blocks.*", recompute=True),)


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (gpt, {"mesh": {"context": 2}, "batch": {"num_microbatches": 2}}),
        (gpt, {"mesh": {"context": 2}, "context": "all-to-all", "layout": RECOMPUTE}),
        (gpt, {"mesh": {"replicate": 2, "context": 2}, "batch": {"num_microbatches": 2}, "layout": RECOMPUTE}),
        (gpt, {"mesh": {"context": 4}}),
        (gpt_by_tokens, {"mesh": {"context": 3}}),
        (gpt_by_tokens, {"mesh": {"context": 2, "replicate": 2}, "context": "all-to-all"}),
        (last_ignored, {"mesh": {"context": 2}}),
        (padded, {"mesh": {"context": 2}}),
        (padded, {"mesh": {"context": 2, "replicate": 2}, "context": "all-to-all"}),
    ],
)
def test_trained_on_parts_of_sequences_as_on_one_device(make: Any, plan: dict[str, Any]) -> None:
    assert_same_as_one(make, **plan)
