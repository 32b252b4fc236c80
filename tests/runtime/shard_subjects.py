"""Models that are trained with divided states, and what is read off them."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from against_one import Subject


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 3 * width)
        self.narrow = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Tied(nn.Module):
    """Blocks between tied embeddings; one parameter nobody uses, one scalar, sizes that do not divide."""

    def __init__(self, width: int = 6, depth: int = 3, words: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.unused = nn.Linear(5, 3)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def words(count: int = 22) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(11, (count, 4), generator=generator)
    return torch.utils.data.TensorDataset(tokens, tokens.sum(1) % 11)


def tied() -> Subject:
    return Subject(model=Tied, data=words(), loss_fn=F.cross_entropy, batch=7)


def accumulated() -> Subject:
    return Subject(
        model=Tied,
        data=words(),
        loss_fn=F.cross_entropy,
        batch=11,
        job={"clip_norm": 0.05, "num_microbatches": 3},
        optimizer=momentum,
    )


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.1)
