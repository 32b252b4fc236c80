"""Models that look at neighbours, written plainly: what is trained with its samples cut in space."""

from dataclasses import replace
from functools import partial
from typing import Any

import h5py
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from against_one import Subject
from tutti.data.volumes import Hdf5Volumes


class Block(nn.Sequential):
    """Two convolutions with normalisation, of a 3-D U-Net (Çiçek et al. 2016, arXiv 1606.06650)."""

    def __init__(self, inside: int, out: int, norm: str) -> None:
        def normalise() -> nn.Module:
            return nn.BatchNorm3d(out) if norm == "batch" else nn.GroupNorm(2, out)

        super().__init__(
            nn.Conv3d(inside, out, 3, padding=1, bias=False),
            normalise(),
            nn.ReLU(inplace=True),
            nn.Conv3d(out, out, 3, padding=1, bias=False),
            normalise(),
            nn.ReLU(inplace=True),
        )


class UNet3d(nn.Module):
    """A small 3-D U-Net: two levels down by max pooling, up by transposed convolution or up-sampling, skips joined."""

    def __init__(self, width: int = 4, classes: int = 3, norm: str = "batch", up: str = "transposed") -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(1, width, norm), Block(width, 2 * width, norm)])
        self.bottom = Block(2 * width, 4 * width, norm)
        if up == "transposed":
            self.up = nn.ModuleList(
                [nn.ConvTranspose3d(4 * width, 2 * width, 2, 2), nn.ConvTranspose3d(2 * width, width, 2, 2)]
            )
        else:
            self.up = nn.ModuleList([nn.Conv3d(4 * width, 2 * width, 1), nn.Conv3d(2 * width, width, 1)])
        self.across = nn.ModuleList([Block(4 * width, 2 * width, norm), Block(2 * width, width, norm)])
        self.head = nn.Conv3d(width, classes, 1)
        self.by_transposed = up == "transposed"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool3d(x, 2)
        x = self.bottom(x)
        for up, block in zip(self.up, self.across, strict=True):
            skip = skips.pop()
            if not self.by_transposed:
                x = F.interpolate(x, size=skip.shape[2:], mode="trilinear", align_corners=False)
            x = up(x)
            if x.shape[2:] != skip.shape[2:]:
                missing = [b - a for a, b in zip(x.shape[2:], skip.shape[2:], strict=True)]
                x = F.pad(x, [value for gap in reversed(missing) for value in (gap // 2, gap - gap // 2)])
            x = block(torch.cat([skip, x], dim=1))
        return self.head(x)


class CosmoFlow(nn.Module):
    """Convolution and pooling, then a dense head (Mathuriya et al. 2018, arXiv 1808.04728)."""

    def __init__(self, size: int = 16, levels: int = 3, width: int = 4, targets: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for level in range(levels):
            layers += [
                nn.Conv3d(1 if level == 0 else width << (level - 1), width << level, 3, padding="same"),
                nn.LeakyReLU(0.3),
                nn.MaxPool3d(2),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear((width << (levels - 1)) * (size >> levels) ** 3, 16),
            nn.LeakyReLU(0.3),
            nn.Dropout(dropout),
            nn.Linear(16, targets),
            nn.Tanh(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(self.features(x), 1))


class Plain2d(nn.Module):
    """A 2-D CNN with BatchNorm, strides, dilation, groups, average pooling, dropout and a global mean."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 5, stride=2, padding=2, bias=False)  # a bias would have gradient 0
        self.norm = nn.BatchNorm2d(8)
        self.middle = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2, bias=False)
        self.second = nn.BatchNorm2d(8, momentum=None)
        self.pool = nn.AvgPool2d(3, 2, 1)
        self.act = nn.PReLU(8)
        self.drop, self.drop2d = nn.Dropout(dropout), nn.Dropout2d(dropout)
        self.dense = nn.Linear(8, 5, bias=False)
        self.last = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(F.relu(self.norm(self.stem(x))))
        x = x + self.drop2d(self.act(self.second(self.middle(x))))
        return self.last(self.dense(self.pool(x).mean((2, 3))))


def _volumes(count: int, *shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _labels(count: int, classes: int, *shape: int) -> torch.Tensor:
    return torch.randint(classes, (count, *shape), generator=torch.Generator().manual_seed(8))


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """SGD: unlike Adam, it does not blow rounding up where a gradient is nearly 0."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def plain2d() -> Subject:
    data = TensorDataset(_volumes(16, 2, 26, 21), _labels(16, 5))
    return Subject(model=Plain2d, data=data, loss_fn=nn.CrossEntropyLoss(), batch=8)


def plain2d_dropout() -> Subject:
    data = TensorDataset(_volumes(16, 2, 26, 21), _labels(16, 5))
    return Subject(
        model=lambda: Plain2d(0.3), data=data, loss_fn=nn.CrossEntropyLoss(), batch=8, job={"clip_norm": 0.5}
    )


def unet() -> Subject:
    data = TensorDataset(_volumes(8, 1, 10, 9, 12), _labels(8, 3, 10, 9, 12))
    # With the usual eps AdamW makes 4e-13 in three steps of a change of the first weights' last bits.
    optimizer = partial(torch.optim.AdamW, eps=1e-6)
    return Subject(model=UNet3d, data=data, loss_fn=nn.CrossEntropyLoss(), batch=4, optimizer=optimizer)


def unet_upsampled() -> Subject:
    data = TensorDataset(_volumes(8, 1, 9, 8, 8), _volumes(8, 3, 9, 8, 8, seed=9))
    return Subject(
        model=lambda: UNet3d(norm="group", up="linear"),
        data=data,
        loss_fn=dice_and_square,
        batch=4,
        optimizer=momentum,
        job={"clip_norm": 0.5},
    )


def dice_and_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss with sums over places inside: what must be global before it is divided."""
    p, t = torch.sigmoid(output), (target > 0).to(output.dtype)
    dice = (2 * (p * t).sum((2, 3, 4)) + 1) / (p.sum((2, 3, 4)) + t.sum((2, 3, 4)) + 1)
    return 1 - dice.mean() + F.mse_loss(output, target)


def unet_from_file(path: str) -> Subject:
    """The U-Net on volumes and labels in an HDF5 file."""
    return replace(unet(), data=Hdf5Volumes(path, ["volumes", "labels"]))


def write_volumes(path: str) -> None:
    """The samples of `unet` as a file."""
    volumes, labels = unet().data.tensors
    with h5py.File(path, "w") as file:
        file["volumes"], file["labels"] = volumes.numpy(), labels.numpy()


def cosmoflow() -> Subject:
    data = TensorDataset(_volumes(8, 1, 16, 16, 16), _volumes(8, 4, seed=3))
    return Subject(model=lambda: CosmoFlow(dropout=0.3), data=data, loss_fn=nn.MSELoss(), batch=4, optimizer=momentum)
