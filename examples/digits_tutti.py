"""A small CNN on scikit-learn's handwritten digits (1797 images of 8 x 8), on any number of devices.

digits_torch.py is the same program in plain PyTorch on one device.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return the first 1437 images for training and the last 360 for testing."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    target = torch.tensor(labels)
    return TensorDataset(inputs[:-360], target[:-360]), TensorDataset(inputs[-360:], target[-360:])


def make_model(dropout: float) -> nn.Module:
    def convolution(channels_in: int, channels_out: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(channels_out), nn.ReLU()]

    return nn.Sequential(
        *convolution(1, 16),
        *convolution(16, 32),
        nn.MaxPool2d(2),
        *convolution(32, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(64 * 2 * 2, 10),
    )


def correct(output: Tensor, target: Tensor) -> Tensor:
    """Return 1 for each sample with the right class, else 0."""
    return (output.argmax(dim=1) == target).float()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    job = tutti.Job(global_batch_size=args.batch_size, seed=args.seed)
    train, test = datasets()
    model = make_model(args.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    loss_fn = nn.CrossEntropyLoss()
    model, optimizer, loader = job.prepare(
        model, optimizer, train, loss_fn, scheduler=scheduler, scheduler_clock="epoch"
    )

    for epoch in job.epochs(args.epochs):
        for batch in loader:
            job.step(batch)
        values = job.evaluate(test, {"accuracy": correct})
        job.print(f"epoch {epoch}: test accuracy {values['accuracy']:.4f}")


if __name__ == "__main__":
    main()
