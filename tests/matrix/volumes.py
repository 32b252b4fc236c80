"""Rows that see volumes: a 3-D U-Net (Cicek et al. 2016) and CosmoFlow (Mathuriya et al. 2018)."""

import torch
from torch import Tensor, nn

from against_one import Subject
from matrix.families import SAMPLES, Family, numbers, seeded, subject


def twice(before: int, after: int) -> nn.Sequential:
    """Two 3x3x3 convolutions with batch statistics."""
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv3d(channels, after, 3, padding=1, bias=False), nn.BatchNorm3d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet3D(nn.Module):
    """Encoder and decoder with skip connections; (batch, 1, d, h, w) -> (batch, classes, d, h, w)."""

    def __init__(self, width: int = 3, classes: int = 3) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = twice(1, width), twice(width, 2 * width), twice(2 * width, 4 * width)
        self.pool = nn.MaxPool3d(2)
        self.rise2 = nn.ConvTranspose3d(4 * width, 2 * width, 2, 2)
        self.up2 = twice(4 * width, 2 * width)
        self.rise1 = nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.up1 = twice(2 * width, width)
        self.classify = nn.Conv3d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        middle = self.down2(self.pool(fine))
        coarse = self.bottom(self.pool(middle))
        middle = self.up2(torch.cat([self.rise2(coarse), middle], 1))
        fine = self.up1(torch.cat([self.rise1(middle), fine], 1))
        return self.classify(fine)


class CosmoFlow(nn.Module):
    """Convolutions and pooling down to a few voxels, then a perceptron that predicts four parameters of a universe."""

    def __init__(self, layers: int = 3, width: int = 4, edge: int = 16) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        before = 4
        for number in range(layers):
            after = width * 2**number
            parts += [nn.Conv3d(before, after, 3, padding=1), nn.LeakyReLU(0.3), nn.MaxPool3d(2)]
            before = after
        self.features = nn.Sequential(*parts)
        voxels = (edge // 2**layers) ** 3
        self.predict = nn.Sequential(
            nn.Flatten(),
            nn.Linear(before * voxels, 32),
            nn.LeakyReLU(0.3),
            nn.Linear(32, 16),
            nn.LeakyReLU(0.3),
            nn.Linear(16, 4),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return 1.2 * self.predict(self.features(x))


def unet() -> Subject:
    # Down to 4 voxels a dim: torch 2.13's bfloat16 Conv3d has wrong weight gradients where the CPU's kernel sees 2.
    labels = torch.randint(3, (SAMPLES, 16, 16, 16), generator=seeded())
    return subject(UNet3D, numbers(1, 16, 16, 16), labels, nn.CrossEntropyLoss(), rate=0.005)


def cosmoflow() -> Subject:
    return subject(CosmoFlow, numbers(4, 16, 16, 16), numbers(4).clamp(-1, 1), nn.MSELoss(), rate=0.005)


FAMILIES = (
    Family(name="3-D U-Net", subject=unet, blocks="down1"),
    Family(name="CosmoFlow", subject=cosmoflow, blocks="predict"),
)
