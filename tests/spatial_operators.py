"""Functions of one tensor of images or volumes, as user code writes them: what a cut tensor must compute exactly."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Op = Callable[[torch.Tensor], torch.Tensor]


def seeded(make: Callable[[], nn.Module]) -> Op:
    """A module whose parameters are the same whenever it is made."""
    torch.manual_seed(5)
    return make()


def modules(d: int) -> dict[str, Op]:
    """Layers of `d` spatial dims with 4 input channels."""
    conv, transposed = (
        (nn.Conv1d, nn.Conv2d, nn.Conv3d)[d - 1],
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[d - 1],
    )
    largest, average = (
        (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[d - 1],
        (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[d - 1],
    )
    made: dict[str, Callable[[], nn.Module]] = {
        "conv 3": lambda: conv(4, 6, 3, padding=1),
        "conv 1": lambda: conv(4, 6, 1),
        "conv unpadded": lambda: conv(4, 6, 3),
        "conv strided": lambda: conv(4, 6, 3, stride=2, padding=1),
        "conv strided by more than its kernel": lambda: conv(4, 6, 2, stride=3),
        "conv wide": lambda: conv(4, 6, 9, padding=4, groups=2),
        "conv even, same": lambda: conv(4, 6, 4, padding="same"),
        "conv dilated, same": lambda: conv(4, 4, 3, dilation=2, padding="same", groups=4, bias=False),
        "conv overpadded": lambda: conv(4, 2, 3, padding=3),
        "patches": lambda: conv(4, 6, 4, stride=4),
        "transposed 2": lambda: transposed(4, 6, 2, 2),
        "transposed 3": lambda: transposed(4, 6, 3, stride=2, padding=1, output_padding=1),
        "transposed dilated": lambda: transposed(4, 6, 3, stride=1, padding=2, dilation=2, groups=2),
        "transposed with gaps": lambda: transposed(4, 2, 2, stride=3, output_padding=2),
        "max pool": lambda: largest(2),
        "max pool 3": lambda: largest(3, 2, 1),
        "max pool ceil": lambda: largest(3, 2, 1, ceil_mode=True),
        "max pool dilated": lambda: largest(2, 1, 0, dilation=2),
        "average pool": lambda: average(2),
        "average pool padded": lambda: average(3, 2, 1),
        "average pool ceil": lambda: average(3, 2, 1, ceil_mode=True),
        "average pool without padding": lambda: average(3, 2, 1, ceil_mode=True, count_include_pad=False),
    }
    return {f"{name} {d}d": seeded(make) for name, make in (made | others(d)).items()}


def others(d: int) -> dict[str, Callable[[], nn.Module]]:
    """Up-sampling, normalisation, and what ends in one place."""
    conv, smooth = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[d - 1], ("linear", "bilinear", "trilinear")[d - 1]
    return {
        "nearest": lambda: nn.Upsample(scale_factor=2, mode="nearest"),
        "nearest to a size": lambda: nn.Upsample(size=(17, 11, 13)[:d], mode="nearest"),
        "nearest by a fraction": lambda: nn.Upsample(scale_factor=1.7, mode="nearest"),
        "linear": lambda: nn.Upsample(scale_factor=2, mode=smooth),
        "linear by a fraction": lambda: nn.Upsample(scale_factor=1.7, mode=smooth),
        "linear to corners": lambda: nn.Upsample(size=(19, 22, 9)[:d], mode=smooth, align_corners=True),
        "group norm": lambda: nn.GroupNorm(2, 4),
        "instance norm": lambda: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[d - 1](4, affine=True),
        "response norm": lambda: nn.LocalResponseNorm(2),
        "to one": lambda: (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[d - 1](1),
        "to three": lambda: (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[d - 1](3),
        "largest": lambda: (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)[d - 1](1),
        "flatten": nn.Flatten,
        "prelu": lambda: nn.PReLU(4),
        "channel softmax": lambda: nn.Softmax(1),
        "circular beside": lambda: conv(4, 4, [1] * (d - 1) + [3], padding=[0] * (d - 1) + [1]),
    }


def functions() -> dict[str, Op]:
    """Functional code on (batch, 4, height, width)."""
    whole = torch.linspace(-1, 1, 14 * 11, dtype=torch.float64).reshape(14, 11)
    return {
        "arithmetic": lambda x: (2 - x) / (1 + x.abs()) + x**2 - 3 * x.sigmoid() * (x > 0),
        "with a whole tensor": lambda x: x * whole + whole.exp(),
        "in place": lambda x: x.clone().mul_(2).add_(x).relu_(),
        "where and masks": lambda x: torch.where(x > 0, x, 0.1 * x).masked_fill(x > 1, 1.0),
        "cat": lambda x: torch.cat([x, x * 2, F.relu(x)], 1),
        "cat along rows": lambda x: torch.cat([x, x * 2], 2),
        "stack": lambda x: torch.stack([x, x * 2], 1)[:, 1],
        "chunks": lambda x: torch.mul(*x.chunk(2, 1)),
        "global mean": lambda x: x.mean((2, 3)),
        "mean of rows": lambda x: x.mean(2, keepdim=True) * x,
        "sum of all": lambda x: x.sum() * x.mean(),
        "squeeze and excite": lambda x: x * torch.sigmoid(F.adaptive_avg_pool2d(x, 1)),
        "sum of channels": lambda x: x.sum(1),
        "largest channel": lambda x: x.amax(1, keepdim=True) - x,
        "largest of all": lambda x: x.amax((2, 3)),
        "deviation": lambda x: x.var((2, 3)) + x.std(dim=1).mean(),
        "view": lambda x: x.reshape(x.size(0), x.shape[1], -1).softmax(-1),
        "channels last norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2),
        "transposed rows": lambda x: x.transpose(2, 3).unsqueeze(1).squeeze(1).movedim(1, -1),
        "linear of channels": lambda x: F.linear(x.movedim(1, -1), torch.eye(4, dtype=x.dtype)[:3]),
        "linear of rows": lambda x: F.linear(x, torch.ones(5, 11, dtype=x.dtype)),
        "padded": lambda x: F.pad(x, (1, 2, 3, 0), value=0.5),
        "cropped": lambda x: F.pad(x, (-1, 1, -3, -2)),
        "reflected beside": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1, 0, 0)),
        "sliced": lambda x: (
            x[:, 1:3, 2:-2, ::2] * x[..., 2:-2, 1::2].mean() if x.size(3) % 2 == 0 else x[:, 1:3, 2:-3, ::2]
        ),
        "row": lambda x: x[:, :, 3] + x[:, :, -1],
        "few rows": lambda x: x[:, :, 4:6].relu() + x[..., :1, :],
        "thinned": lambda x: x[:, :, ::5, None, ::3],
        "softmax of rows": lambda x: x.softmax(2),
        "normalised": lambda x: F.normalize(x),
        "differences": lambda x: x[:, :, 1:] - x[:, :, :-1],
        "resized to": lambda x: F.interpolate(F.max_pool2d(x, 4), size=x.shape[2:], mode="bilinear") + x,
        "tiny and back": lambda x: F.interpolate(F.avg_pool2d(x, (7, 11)), scale_factor=(7, 11)) * x,
    } | more(whole)


def more(whole: torch.Tensor) -> dict[str, Op]:
    """Orders, indices and losses; `whole`: a tensor that is on every rank."""
    return {
        "flipped": lambda x: x.flip(1, 3) + x.flip([2]) * x.flip(dims=(1,)),
        "rolled": lambda x: x.roll(1, 1) * x.roll((1, 2), (2, 3)),
        "picked by a mask": lambda x: x[x > 0] ** 2,
        "picked by rows": lambda x: (
            whole[(x.detach() > 0).sum((0, 1)).clamp(max=10)] * x[:, :, torch.tensor([0, 5])].sum()
        ),
        "masked in place": lambda x: x.clone().masked_fill_(mask=x > 0.5, value=0.0) + x.new_ones(x.shape),
        "expanded": lambda x: x - x.mean((2, 3), keepdim=True).expand_as(x),
        "nearest exact": lambda x: F.interpolate(x, size=(9, 20), mode="nearest-exact"),
        "square loss": lambda x: F.mse_loss(x, x.detach() ** 2 + whole),
        "loss of a whole target": lambda x: F.binary_cross_entropy_with_logits(x, (whole > 0).double().expand(x.shape)),
        "classes": lambda x: F.cross_entropy(x, (whole > 0).long().expand(x.size(0), 14, 11), label_smoothing=0.1),
        "classes, some ignored": lambda x: F.cross_entropy(
            x, (whole * 3).long().abs().expand(x.size(0), 14, 11), torch.tensor([1.0, 2.0, 0.5, 1.0]), ignore_index=2
        ),
        "each class": lambda x: F.nll_loss(
            x.log_softmax(1), (whole > 0).long().expand(x.size(0), 14, 11), reduction="none"
        ),
        "class shares": lambda x: F.cross_entropy(x, (whole.abs() + x.detach().abs()).softmax(1)),
    }
