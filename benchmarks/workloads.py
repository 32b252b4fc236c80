"""The models that are timed: an MLP with more gradients than compute, a CNN with and without BatchNorm, and a GPT."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gpt_torch import GPT
from gpt_torch import loss_fn as next_byte_loss

LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model with its data.

    Attributes:
        name: its name in `--set workloads=..`.
        model: makes the model.
        data: (samples) -> data set.
        loss: (output, target) -> mean loss.
        batch: samples that a rank computes in a step.
        note: a limit of the comparison.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]
    loss: LossFunction
    batch: int
    note: str = ""


def mlp() -> nn.Module:
    """10.0 M parameters: 784 -> 3 x 2048 -> 10."""
    widths = (784, 2048, 2048, 2048)
    hidden = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], 10))


def cnn(*, norm: bool) -> nn.Module:
    """2.7 M parameters on 3 x 32 x 32 images; with `norm`, a BatchNorm follows each convolution."""
    layers: list[nn.Module] = []
    widths = (3, 64, 128, 256, 512, 256)
    for position, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(a, b, 3, padding=1, bias=not norm), *([nn.BatchNorm2d(b)] if norm else []), nn.ReLU()]
        if position % 2:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def gpt() -> nn.Module:
    """6.4 M parameters: 8 blocks of width 256 over bytes, context 128."""
    return GPT(layers=8, width=256, heads=8, context=128)


def vectors(samples: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 784, generator=draw), torch.randint(10, (samples,), generator=draw))


def images(samples: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    target = torch.randint(10, (samples,), generator=draw)
    return TensorDataset(torch.randn(samples, 3, 32, 32, generator=draw), target)


def windows(samples: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(256, (samples, 129), generator=draw)
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="mlp", model=mlp, data=vectors, loss=nn.CrossEntropyLoss(), batch=64),
        Workload(name="cnn", model=lambda: cnn(norm=False), data=images, loss=nn.CrossEntropyLoss(), batch=16),
        Workload(
            name="cnn-batchnorm",
            model=lambda: cnn(norm=True),
            data=images,
            loss=nn.CrossEntropyLoss(),
            batch=16,
            note="not like for like: tutti's statistics are the global batch's, plain DDP's each rank's own",
        ),
        Workload(name="gpt", model=gpt, data=windows, loss=next_byte_loss, batch=4),
    )
}
