"""The works of `pays`: an MLP, a CNN and a GPT, trained to a stated held-out quality on data that every machine has.

All methods of a seed start with the same parameters and take the same global batches in the same order; ranks take
contiguous parts of them. So all methods with exact sums have one trajectory, on any number of ranks.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gpt_torch import GPT
from gpt_torch import loss_fn as next_byte_loss
from tutti.data.text import TextWindows, split_by_position, standard_library_text

Pair = tuple[TensorDataset, TensorDataset]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One model with its data and its aim.

    Attributes:
        name: its name in `--set models=..`.
        says: description for result files.
        model: makes the model.
        data: makes (training data, held-out data).
        loss: (output, target) -> mean loss.
        optimizer: makes the optimizer of a model.
        batch: global batch, in samples.
        target: mean held-out loss at which training has reached its quality.
        most: steps after which a training is given up.
        every: steps between two evaluations.
        first: steps before the first evaluation, fewer than any method needs; 0 for `every`.
    """

    name: str
    says: str
    model: Callable[[], nn.Module]
    data: Callable[[], Pair]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: int
    target: float
    most: int
    every: int
    first: int = 0


def sequence(work: Work, seed: int) -> TensorDataset:
    """Return the `most` global batches of a seed, one after another: epochs of the data, each in its own order."""
    train = work.data()[0]
    draw = torch.Generator().manual_seed(seed)
    wanted = work.most * work.batch
    orders = [torch.randperm(len(train), generator=draw) for _ in range(-(-wanted // len(train)))]
    chosen = torch.cat(orders)[:wanted]
    return TensorDataset(*(tensor[chosen] for tensor in train.tensors))


def fresh(work: Work, seed: int) -> nn.Module:
    """Return the model with the parameters with which every method of a seed starts."""
    torch.manual_seed(seed)
    return work.model()


def mlp() -> nn.Module:
    """10.0 M parameters: 64 -> 2219 -> 2219 -> 2219 -> 10."""
    widths = (64, 2219, 2219, 2219)
    hidden = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return begun(nn.Sequential(*hidden, nn.Linear(widths[-1], 10)))


def cnn() -> nn.Module:
    """3.0 M parameters on 1 x 8 x 8 images."""
    layers: list[nn.Module] = []
    widths = (1, 64, 128, 256, 512, 310)
    for position, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
        if position in (1, 3):
            layers.append(nn.MaxPool2d(2))
    return begun(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)))


def gpt() -> nn.Module:
    """7.9 M parameters: 2 blocks of width 560 over bytes, context 64. It is wide, so that it learns in few steps."""
    model = GPT(layers=2, width=560, heads=8, context=64)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    nn.init.normal_(model.tokens.weight, std=0.3)
    return model


def begun(model: nn.Module) -> nn.Module:
    """Initialise weights as He et al. 2015 and biases to zero: such a model learns from its first steps on."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


@cache
def digits() -> Pair:
    """scikit-learn's handwritten digits: 1437 for training, 360 held out, drawn once."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs, target = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return TensorDataset(inputs[:1437], target[:1437]), TensorDataset(inputs[1437:], target[1437:])


@cache
def digit_images() -> Pair:
    """The digits as images of one channel."""
    train, held = (TensorDataset(part.tensors[0].view(-1, 1, 8, 8), part.tensors[1]) for part in digits())
    return train, held


@cache
def source_text() -> Pair:
    """Sources of Python's standard library in windows of 64 bytes: 90 % for training, 64 windows of the rest held
    out.
    """
    train, test = split_by_position(standard_library_text().content, 0.9)
    held = TextWindows(test, 64, stride=len(test) // 65)
    return tensors(TextWindows(train, 64), None), tensors(held, 64)


def tensors(windows: TextWindows, count: int | None) -> TensorDataset:
    """Return the first `count` windows (None: all) and the bytes that follow each."""
    pairs = [windows[index] for index in range(len(windows) if count is None else count)]
    return TensorDataset(torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs]))


def _momentum(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def _adam(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)


_MLP = Work(
    name="mlp",
    says="10 M parameters, digits, SGD 0.01 with momentum 0.9",
    model=mlp,
    data=digits,
    loss=nn.CrossEntropyLoss(),
    optimizer=_momentum(0.01),
    batch=128,
    target=0.25,
    most=96,
    every=1,
    first=12,
)
_CNN = replace(
    _MLP,
    name="cnn",
    says="3 M parameters, digits, SGD 0.01 with momentum 0.9",
    model=cnn,
    data=digit_images,
    target=0.3,
    most=128,
    first=24,
)
_GPT = Work(
    name="gpt",
    says="8 M parameters, standard library sources by the byte, AdamW 0.0005",
    model=gpt,
    data=source_text,
    loss=next_byte_loss,
    optimizer=_adam(5e-4),
    batch=8,
    target=2.6,
    most=128,
    every=1,
    first=16,
)
WORKS = {work.name: work for work in (_MLP, _CNN, _GPT)}
