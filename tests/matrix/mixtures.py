"""A row whose layers route tokens to experts: a small decoder with tutti's own mixture."""

import torch
from torch import Tensor, nn

from against_one import Subject
from matrix.families import Family, subject, words
from tutti.nn.mixture import MixtureOfExperts, auxiliary_loss

VOCABULARY, SEQUENCE, WIDTH, HEADS, EXPERTS = 40, 16, 32, 4, 4


class Block(nn.Module):
    """Causal attention, then a mixture of experts, each beside a shortcut."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.experts = MixtureOfExperts(WIDTH, WIDTH, EXPERTS, top_k=top_k, capacity_factor=1.0, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm1(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = x + self.attention(normal, normal, normal, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.experts(self.norm2(x))


class ExpertDecoder(nn.Module):
    """Tokens (batch, seq) -> (logits (batch, seq, words), auxiliary loss of the gates)."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.Sequential(*(Block(1 + number % 2) for number in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.blocks(self.tokens(tokens) + places)))
        return logits, auxiliary_loss(self)


def balanced_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Mean cross-entropy of tokens, and a hundredth of the auxiliary loss (Switch Transformers)."""
    logits, auxiliary = output
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()) + 0.01 * auxiliary


def decoder() -> Subject:
    tokens = words(VOCABULARY, SEQUENCE + 1)
    return subject(ExpertDecoder, tokens[:, :-1], tokens[:, 1:], balanced_loss)


FAMILIES = (Family(name="Mixture of experts", subject=decoder, blocks="blocks.*"),)
