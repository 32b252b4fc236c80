"""Rows that see vectors and images: an MLP, a small CNN with BatchNorm, and a ResNet with 12 input channels."""

from torch import Tensor, nn

from against_one import Subject
from matrix.families import Family, class_loss, numbers, subject, words


class MLP(nn.Module):
    """Four hidden layers; (batch, 12) -> (batch, 6)."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(12, width)
        self.hidden = nn.Sequential(*(nn.Sequential(nn.GELU(), nn.Linear(width, width)) for _ in range(depth - 1)))
        self.leave = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(nn.functional.gelu(self.hidden(self.enter(x))))


class CNN(nn.Module):
    """Convolutions with batch statistics, pooling, a classifier; (batch, 3, 16, 16) -> (batch, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *self._block(3, 8, 1), *self._block(8, 8, 1), nn.MaxPool2d(2), *self._block(8, 12, 2)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))

    @staticmethod
    def _block(before: int, after: int, stride: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.pool(self.features(x)).flatten(1))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution, each with batch statistics, beside a shortcut (He et al. 2015, v1.5)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.activate = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.activate(self.norm1(self.conv1(x)))
        inner = self.norm3(self.conv3(self.activate(self.norm2(self.conv2(inner)))))
        return self.activate(inner + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet of bottlenecks; `blocks` a group: (3, 4, 6, 3) is ResNet-50. (batch, channels, h, w) -> classes."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, channels: int = 12, classes: int = 10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        layers: list[nn.Module] = []
        before = width
        for group, count in enumerate(blocks):
            for number in range(count):
                inner = width * 2**group
                layers.append(Bottleneck(before, inner, 2 if group and not number else 1))
                before = 4 * inner
        self.blocks = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.pool(self.blocks(self.stem(x))).flatten(1))


def mlp() -> Subject:
    return subject(MLP, numbers(12), numbers(6), nn.MSELoss(), job={})


def cnn() -> Subject:
    return subject(CNN, numbers(3, 16, 16), words(5), class_loss)


def small_resnet() -> nn.Module:
    return ResNet(blocks=(1, 1, 1, 1), width=4)


def resnet() -> Subject:
    return subject(small_resnet, numbers(12, 64, 64), words(10), class_loss, rate=0.005)


FAMILIES = (
    Family(name="MLP", subject=mlp, blocks="hidden.*"),
    Family(name="CNN, BatchNorm", subject=cnn, blocks="classify"),
    Family(name="ResNet, 12 channels", subject=resnet, blocks="blocks.*"),
)
