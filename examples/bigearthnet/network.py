"""ResNet-50 for 12 bands (He et al. 2016, arXiv 1512.03385), with the stride in the 3 x 3 convolution, and its F1."""

from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS = {50: (3, 4, 6, 3), 26: (2, 2, 2, 2), 14: (1, 1, 1, 1)}
"""Bottlenecks in each of the four groups, by the number of layers with weights."""

EXPANSION = 4


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1 pixels, each with batch normalisation, and a path around them."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = width * EXPANSION
        self.conv1, self.norm1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.around = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.around(x))


class ResNet(nn.Module):
    """A ResNet of bottlenecks that gives one logit for each label.

    Args:
        classes: labels.
        bands: channels of the input.
        layers: 50, or 26 or 14 for small runs.
        width: channels of the first group; 64 in ResNet-50.
    """

    def __init__(self, classes: int, *, bands: int = 12, layers: int = 50, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(bands, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        groups, inside = [], width
        for number, count in enumerate(BLOCKS[layers]):
            blocks = []
            for block in range(count):
                blocks.append(Bottleneck(inside, width << number, 2 if number and not block else 1))
                inside = (width << number) * EXPANSION
            groups.append(nn.Sequential(*blocks))
        self.groups = nn.Sequential(*groups)
        self.head = nn.Linear(inside, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.norm3.weight)  # a block begins as its path around (Goyal et al. 2017)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.groups(self.stem(x)).mean((2, 3)))


def _counts(logits: Tensor, target: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return (2 TP, 2 TP + FP + FN), summed over `dim`; a label is predicted where its probability exceeds 1/2."""
    predicted, present = (logits > 0).double(), target.double()
    return 2 * (predicted * present).sum(dim), predicted.sum(dim) + present.sum(dim)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the quotient, and 0 where nothing is present or predicted."""
    return numerator / denominator.clamp(min=1)


def micro_f1(logits: Tensor, target: Tensor) -> float:
    """F1 of all labels of all patches together."""
    numerator, denominator = _counts(logits, target, 0)
    return float(_ratio(numerator.sum(), denominator.sum()))


def macro_f1(logits: Tensor, target: Tensor) -> float:
    """Mean of the labels' F1; a label that is neither present nor predicted counts as 0, as in scikit-learn."""
    return float(_ratio(*_counts(logits, target, 0)).mean())


def samples_f1(logits: Tensor, target: Tensor) -> float:
    """Mean of the patches' F1."""
    return float(_ratio(*_counts(logits, target, 1)).mean())


F1 = {"micro_f1": micro_f1, "macro_f1": macro_f1, "samples_f1": samples_f1}
