"""Classify points with tutti: tutti run --nproc 2 ddp_tutti.py"""

import argparse

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import tutti


def make_data(samples: int, seed: int) -> TensorDataset:
    """Points of 16 dims in three classes, by their distance from the origin."""
    points = torch.randn(samples, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, torch.bucketize(points.square().mean(dim=1), torch.tensor([0.8, 1.15])))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def correct(scores: Tensor, classes: Tensor) -> Tensor:
    return (scores.argmax(dim=1) == classes).float()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128, help="of all ranks and accumulation steps together")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.2)
    args = parser.parse_args()

    job = tutti.Job(global_batch_size=args.batch_size, num_microbatches=args.accumulate, clip_norm=1.0, seed=0)
    torch.manual_seed(0)
    train_set, test_set = make_data(2048, seed=1), make_data(512, seed=2)

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, args.epochs * len(train_set) // args.batch_size)
    model, optimizer, loader = job.prepare(
        model, optimizer, train_set, nn.CrossEntropyLoss(), scheduler=scheduler, shuffle=False
    )

    for epoch in job.epochs(args.epochs):
        for batch in loader:
            job.step(batch)
        values = job.evaluate(test_set, {"accuracy": correct})
        job.print(f"epoch {epoch}: test loss {values['loss']:.4f}, accuracy {values['accuracy']:.4f}")
    state = job.state_dict()
    if job.is_main:
        torch.save(state, "model.pt")


if __name__ == "__main__":
    main()
