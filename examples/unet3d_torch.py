"""A small 3-D U-Net that finds balls in noisy volumes: plain PyTorch on one device.

unet3d_tutti.py is the same program on any number of devices, which may also divide each volume.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def datasets(count: int, size: int) -> tuple[TensorDataset, TensorDataset]:
    """Return volumes of `size` ** 3 voxels with a ball in noise; the labels say which voxels are in the ball."""
    generator = torch.Generator().manual_seed(0)
    axis = torch.arange(size) + 0.5
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"))
    center = size * (0.3 + 0.4 * torch.rand(count, 3, generator=generator))
    radius = size * (0.15 + 0.15 * torch.rand(count, generator=generator))
    distance = (grid - center.view(count, 3, 1, 1, 1)).norm(dim=1)
    inside = distance < radius.view(count, 1, 1, 1)
    volumes = inside.unsqueeze(1) + 0.7 * torch.randn(count, 1, size, size, size, generator=generator)
    labels, test = inside.long(), count // 4
    return TensorDataset(volumes[:-test], labels[:-test]), TensorDataset(volumes[-test:], labels[-test:])


class Block(nn.Sequential):
    """Two convolutions, each with batch normalisation."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__(
            nn.Conv3d(inside, out, 3, padding=1, bias=False),
            nn.BatchNorm3d(out),
            nn.ReLU(),
            nn.Conv3d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm3d(out),
            nn.ReLU(),
        )


class UNet3d(nn.Module):
    """A 3-D U-Net (arXiv 1606.06650): `levels` levels of pooling, and back up with skip connections."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(Block(a, b) for a, b in zip([1, *widths], widths[:-1], strict=False))
        self.bottom = Block(widths[-2], widths[-1])
        pairs = [*zip(widths[:0:-1], widths[-2::-1], strict=True)]
        self.up = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, stride=2) for a, b in pairs)
        self.across = nn.ModuleList(Block(2 * b, b) for _, b in pairs)
        self.head = nn.Conv3d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool3d(x, 2)
        x = self.bottom(x)
        for up, block in zip(self.up, self.across, strict=True):
            x = block(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def correct(output: Tensor, target: Tensor) -> Tensor:
    """Return the share of voxels with the right class, for each sample."""
    return (output.argmax(dim=1) == target).float().mean(dim=(1, 2, 3))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--size", type=int, default=16, help="voxels along each side, a multiple of 2 ** levels")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--levels", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    train, test = datasets(args.samples, args.size)
    model = UNet3d(args.width, args.levels)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test, batch_size=args.batch_size)

    for epoch in range(args.epochs):
        model.train()
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), target)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum(correct(model(inputs), target).sum().item() for inputs, target in test_loader)
        print(f"epoch {epoch}: test accuracy {right / len(test):.4f}")


if __name__ == "__main__":
    main()
