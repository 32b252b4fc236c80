"""The models of the GPU suite, each in the size of a GPU and tiny: model, data, loss, optimizer and batch."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from dlrm_torch import DLRM
from gpt_torch import GPT
from gpt_torch import loss_fn as token_loss
from tutti.nn.mixture import MixtureOfExperts
from unet3d_torch import UNet3d


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One model with its data.

    Attributes:
        model: makes the model.
        data: data(samples) makes a data set of random samples.
        loss: loss(output, target) -> mean loss.
        optimizer: optimizer(parameters).
        batch: samples of a step.
        channels_last: the memory format in which its images are fastest on a GPU.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int], Dataset[Any]]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    batch: int
    channels_last: bool = False


class Digits(nn.Sequential):
    """The CNN of examples/digits_torch.py, without its dropout, whose draws differ between devices."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
        )


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions beside a shortcut (He et al. 2015)."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        same = stride == 1 and inside == out
        shortcut = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Identity() if same else shortcut
        self.last = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet of bottlenecks; `depths` (3, 4, 6, 3) and width 64 is ResNet-50 (25.6 M parameters)."""

    def __init__(self, depths: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, inside = [], width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                blocks.append(Bottleneck(inside, width << stage, 2 if stage and not number else 1))
                inside = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Tagger(nn.Module):
    """An embedding, an LSTM and a head that names a class for each token."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


class Clicks(nn.Module):
    """The DLRM of examples/dlrm_torch.py on one tensor of 13 numbers and 26 categories."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.dlrm = DLRM([rows] * 26, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.dlrm(x[:, :13], x[:, 13:].long())


class ExpertBlock(nn.Module):
    """A mixture of experts beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = MixtureOfExperts(width, 2 * width, 4, top_k=1, capacity_factor=1.0, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.norm(x))


class Mixture(nn.Sequential):
    """Tokens through blocks whose layers route them to experts."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        blocks = (ExpertBlock(width) for _ in range(layers))
        super().__init__(nn.Embedding(words, width), *blocks, nn.Linear(width, words))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def tokens(length: int, words: int, samples: int) -> TensorDataset:
    text = torch.randint(words, (samples, length + 1), generator=_generator())
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def images(size: int, channels: int, classes: int, samples: int) -> TensorDataset:
    draw = _generator()
    target = torch.randint(classes, (samples,), generator=draw)
    return TensorDataset(torch.randn(samples, channels, size, size, generator=draw), target)


def volumes(size: int, samples: int) -> TensorDataset:
    draw = _generator()
    target = torch.randint(2, (samples, size, size, size), generator=draw)
    return TensorDataset(torch.randn(samples, 1, size, size, size, generator=draw), target)


def clicks(rows: int, samples: int) -> TensorDataset:
    draw = _generator()
    categories = torch.randint(rows, (samples, 26), generator=draw)
    numbers = torch.rand(samples, 13, generator=draw)
    return TensorDataset(torch.cat([numbers, categories], 1), torch.randint(2, (samples,), generator=draw).float())


def next_token_loss(output: Tensor, target: Tensor) -> Tensor:
    return token_loss(output, target)


ADAM = functools.partial(torch.optim.AdamW, lr=3e-4)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
P = functools.partial


def _gpt(layers: int, width: int, heads: int, context: int, words: int, batch: int) -> Subject:
    return Subject(
        model=P(GPT, layers, width, heads, context, words), data=P(tokens, context, words),
        loss=next_token_loss, optimizer=ADAM, batch=batch,
    )  # fmt: skip


def _resnet(depths: tuple[int, ...], width: int, size: int, classes: int, batch: int) -> Subject:
    return Subject(
        model=P(ResNet, depths, width, classes), data=P(images, size, 3, classes),
        loss=F.cross_entropy, optimizer=SGD, batch=batch, channels_last=True,
    )  # fmt: skip


SMALL: dict[str, Subject] = {
    "digits": Subject(
        model=Digits, data=P(images, 8, 1, 10), loss=F.cross_entropy, optimizer=SGD, batch=16
    ),
    "gpt": _gpt(2, 32, 4, 16, 64, 8),
    "resnet": _resnet((1, 1), 8, 32, 10, 8),
    "unet": Subject(model=P(UNet3d, 4, 2), data=P(volumes, 8), loss=F.cross_entropy, optimizer=SGD, batch=4),
    "dlrm": Subject(
        model=P(Clicks, 50, 8), data=P(clicks, 50), loss=F.binary_cross_entropy_with_logits,
        optimizer=P(torch.optim.SGD, lr=0.05), batch=16,
    ),
    "lstm": Subject(model=P(Tagger, 40, 16, 2), data=P(tokens, 12, 40), loss=next_token_loss, optimizer=ADAM, batch=8),
    "moe": Subject(model=P(Mixture, 40, 16, 2), data=P(tokens, 16, 40), loss=next_token_loss, optimizer=ADAM, batch=8),
}  # fmt: skip
"""Small enough for a comparison in float64 on the CPU, and for a rehearsal."""

LARGE: dict[str, Subject] = {
    "digits": Subject(
        model=Digits, data=P(images, 8, 1, 10), loss=F.cross_entropy, optimizer=SGD, batch=1024
    ),
    "gpt": _gpt(12, 768, 12, 1024, 50304, 16),
    "resnet": _resnet((3, 4, 6, 3), 64, 224, 1000, 128),
    "unet": Subject(model=P(UNet3d, 32, 3), data=P(volumes, 64), loss=F.cross_entropy, optimizer=SGD, batch=8),
    "dlrm": Subject(
        model=P(Clicks, 200_000, 64), data=P(clicks, 200_000), loss=F.binary_cross_entropy_with_logits,
        optimizer=P(torch.optim.SGD, lr=0.05), batch=8192,
    ),
    "lstm": Subject(
        model=P(Tagger, 10_000, 1024, 2), data=P(tokens, 128, 10_000), loss=next_token_loss, optimizer=ADAM, batch=64
    ),
    "moe": Subject(
        model=P(Mixture, 10_000, 512, 4), data=P(tokens, 256, 10_000), loss=next_token_loss, optimizer=ADAM, batch=32
    ),
}  # fmt: skip
"""Of the size that GPUs train."""


def subject_of(name: str, *, tiny: bool) -> Subject:
    """Return a subject by its name."""
    return (SMALL if tiny else LARGE)[name]
