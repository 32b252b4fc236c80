"""Trainings from which allowances are measured; models and data differ from those on which `pays` judges the planner.

There are five kinds of model with SGD, Adam or AdamW. Each trains to a held-out loss that exact sums reach in 50 to
160 steps.
"""

import itertools
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gpt_torch import loss_fn as next_byte_loss
from pays_work import Pair, Work, digits, tensors
from tutti.data.text import TextWindows, licence_text, split_by_position

CONTEXT = 32
"""Bytes that the recurrent network sees at once."""


class Recurrent(nn.Module):
    """A GRU over bytes. It returns scores of the next byte: (samples, positions, 256)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        scores: Tensor = self.head(self.gru(self.bytes(text))[0])
        return scores


class Rows(nn.Module):
    """A transformer encoder that reads an image of 8 x 8 pixels as 8 tokens."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Linear(8, width), nn.Parameter(torch.zeros(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.words(images.view(-1, 8, 8)) + self.places).mean(1))
        return scores


def patches_model() -> nn.Module:
    """A CNN with BatchNorm, 75 thousand parameters."""
    layers: list[nn.Module] = []
    for a, b in ((3, 32), (32, 64), (64, 96)):
        layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 2))


def narrowed() -> nn.Module:
    """An autoencoder with GELU and layer norms: 64 pixels through 12 numbers and back."""
    widths = (64, 256, 64, 12, 64, 256, 64)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()]
    return nn.Sequential(*layers[:-2])


def table_model() -> nn.Module:
    """An MLP over 30 measurements of a cell, with two hidden layers and dropout."""
    return nn.Sequential(
        nn.Linear(30, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )


@cache
def patches() -> Pair:
    """Patches of 16 x 16 pixels; the label says from which of scikit-learn's two photographs. The lowest tenth of
    each is held out.
    """
    from sklearn.datasets import load_sample_images

    train: list[tuple[Tensor, Tensor]] = []
    held: list[tuple[Tensor, Tensor]] = []
    for label, photo in enumerate(load_sample_images().images):
        pixels = torch.tensor(photo).permute(2, 0, 1).float() / 255
        cut = pixels.shape[1] * 9 // 10
        for part, pairs in ((pixels[:, :cut], train), (pixels[:, cut:], held)):
            small = part.unfold(1, 16, 8).unfold(2, 16, 8).permute(1, 2, 0, 3, 4).reshape(-1, 3, 16, 16)
            pairs.append((small - 0.5, torch.full((len(small),), label)))
    return _joined(train), _joined(held)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> TensorDataset:
    return TensorDataset(torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts]))


@cache
def licences() -> Pair:
    """Licence texts by the byte: nine tenths for training, 256 windows of the rest held out."""
    train, test = split_by_position(licence_text().content, 0.9)
    first, held = TextWindows(train, CONTEXT), TextWindows(test, CONTEXT, stride=len(test) // 257)
    return tensors(first, None), tensors(held, 256)


@cache
def images_back() -> Pair:
    """The digits as input and as target."""
    train, held = (TensorDataset(part.tensors[0], part.tensors[0]) for part in digits())
    return train, held


@cache
def cells() -> Pair:
    """scikit-learn's table of breast tumours: 569 rows, a fifth held out; standardised by the training part."""
    from sklearn.datasets import load_breast_cancer

    values, labels = load_breast_cancer(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs, target = torch.tensor(values, dtype=torch.float32)[order], torch.tensor(labels)[order]
    mean, deviation = inputs[:455].mean(0), inputs[:455].std(0)
    inputs = (inputs - mean) / deviation
    return TensorDataset(inputs[:455], target[:455]), TensorDataset(inputs[455:], target[455:])


_PATCHES = Work(
    name="patches",
    says="CNN with BatchNorm, photographs' patches, SGD 0.002 with Nesterov's momentum",
    model=patches_model,
    data=patches,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9, nesterov=True),
    batch=64,
    target=0.2,
    most=400,
    every=2,
)
_GRU = replace(
    _PATCHES,
    name="gru",
    says="GRU, licence texts by the byte, Adam 0.003",
    model=lambda: Recurrent(128),
    data=licences,
    loss=next_byte_loss,
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
    batch=32,
    target=2.3,
)
_ENCODER = replace(
    _PATCHES,
    name="encoder",
    says="transformer encoder with dropout, digits by row, AdamW 0.001",
    model=lambda: Rows(64, 2),
    data=digits,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05),
    target=0.3,
)
_AUTOENCODER = replace(
    _PATCHES,
    name="autoencoder",
    says="autoencoder with layer norms, digits, Adam 0.001",
    model=narrowed,
    data=images_back,
    loss=nn.MSELoss(),
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    target=0.03,
)
_TABLE = replace(
    _PATCHES,
    name="table",
    says="MLP with dropout, breast tumours, SGD 0.005 with momentum 0.9",
    model=table_model,
    data=cells,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9),
    batch=32,
    target=0.1,
)
OTHERS = {work.name: work for work in (_PATCHES, _GRU, _ENCODER, _AUTOENCODER, _TABLE)}
