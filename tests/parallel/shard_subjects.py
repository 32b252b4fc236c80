"""Models that are trained with divided states, and what is read off them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti
from against_one import Subject

WORDS = 11


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

    def __init__(self, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.unused = nn.Linear(5, 3)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Branching(Tied):
    """A block runs only where a sample of the batch wants it, so ranks skip different ones; some run out of order."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number, block in [(2, self.blocks[2]), (0, self.blocks[0]), (1, self.blocks[1])]:
            wanted = tokens[:, 0] % 3 == number
            if wanted.any():
                x = torch.where(wanted[:, None, None], block(x), x)
        return self.head(x.mean(1))


@dataclass
class Answer:
    """What a block may return beside tensors, tuples and dicts."""

    hidden: torch.Tensor
    note: str = ""


class Answering(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return Answer(hidden=super().forward(x), note="fine")


class Repeating(nn.Module):
    """One block runs three times in a pass; a weight is tied between two blocks; one block is frozen, one an LSTM."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([Answering(width), Block(width), nn.LSTM(width, width, 2, batch_first=True)])
        self.blocks[0].norm.weight = self.blocks[1].norm.weight
        self.blocks[1].requires_grad_(False)
        self.blocks[0].norm.weight.requires_grad_(True)
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, WORDS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for _ in range(3):
            x = self.blocks[0](x).hidden
            x = self.blocks[1](x)
        x, _ = self.blocks[2](x)
        return self.head(x[:, -1])


class Convolutions(nn.Module):
    """Batch statistics, buffers, weights with little along their first dim, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 3, 6, 6))
        self.body = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU()),
            nn.Sequential(nn.Conv2d(5, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU()),
        )
        self.head = nn.Linear(8, WORDS)
        self.body[0][0].to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images + self.token).flatten(1))


class Bag(nn.Module):
    """Sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6, sparse=True)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def words(count: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (count, 4), generator=generator)
    return TensorDataset(tokens, tokens.sum(1) % WORDS)


def images(count: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(count, 3, 6, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(pixels.to(torch.get_default_dtype()), torch.randint(WORDS, (count,), generator=generator))


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.1)


def grouped(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Two groups with settings of their own."""
    every = list(parameters)
    return torch.optim.AdamW([{"params": every[1::2], "lr": 2 * lr}, {"params": every[::2], "weight_decay": 0.3}], lr)


def factored(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """An optimizer that needs whole matrices."""
    return torch.optim.Adafactor(parameters, lr=lr)


def plain(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def tied() -> Subject:
    return Subject(model=Tied, data=words(), loss_fn=F.cross_entropy, batch=7)


def accumulated() -> Subject:
    job = {"clip_norm": 0.05, "num_microbatches": 3}
    return Subject(model=Tied, data=words(), loss_fn=F.cross_entropy, batch=11, job=job, optimizer=momentum)


def branching() -> Subject:
    return Subject(model=Branching, data=words(), loss_fn=F.cross_entropy, batch=6, optimizer=grouped)


def repeating() -> Subject:
    job = {"num_microbatches": 2}
    return Subject(model=Repeating, data=words(), loss_fn=F.cross_entropy, batch=10, job=job)


def convolutions() -> Subject:
    return Subject(model=Convolutions, data=images(), loss_fn=F.cross_entropy, batch=8, optimizer=momentum)


def bag() -> Subject:
    return Subject(model=Bag, data=words(), loss_fn=F.cross_entropy, batch=7, optimizer=plain, rate=0.1)


def adafactor() -> Subject:
    return Subject(model=Tied, data=words(), loss_fn=F.cross_entropy, batch=7, optimizer=factored)


class Penalty:
    """Cross-entropy and a penalty on a parameter, from outside of the model's forward."""

    def __init__(self) -> None:
        self.model: Tied | None = None

    def build(self) -> Tied:
        self.model = Tied()
        return self.model

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert self.model is not None
        return F.cross_entropy(output, target) + self.model.blocks[0].wide.weight.pow(2).sum()


def penalised() -> Subject:
    penalty = Penalty()
    return Subject(model=penalty.build, data=words(), loss_fn=penalty, batch=7)


def counted() -> Subject:
    """A mean in which samples count differently; with parameters outside of blocks."""
    return Subject(model=Tied, data=words(), loss_fn=_by_weight, batch=7, optimizer=momentum)


def _by_weight(output: torch.Tensor, target: torch.Tensor) -> tutti.Weighted:
    counts = (1 + target % 3).to(output.dtype)
    return tutti.Weighted((F.cross_entropy(output, target, reduction="none") * counts).sum(), counts.sum())
