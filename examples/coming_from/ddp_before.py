"""Classify points with DistributedDataParallel: torchrun --nproc-per-node 2 ddp_before.py"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(samples: int, seed: int) -> TensorDataset:
    """Points of 16 dims in three classes, by their distance from the origin."""
    points = torch.randn(samples, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, torch.bucketize(points.square().mean(dim=1), torch.tensor([0.8, 1.15])))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def evaluate(model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]], device: torch.device) -> tuple[float, float]:
    model.eval()
    sums = torch.zeros(3, device=device)
    with torch.no_grad():
        for points, classes in loader:
            points, classes = points.to(device), classes.to(device)
            scores = model(points)
            sums[0] += nn.functional.cross_entropy(scores, classes, reduction="sum")
            sums[1] += (scores.argmax(dim=1) == classes).sum()
            sums[2] += len(classes)
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.2)
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    train_set, test_set = make_data(2048, seed=1), make_data(512, seed=2)
    train_sampler = DistributedSampler(train_set, shuffle=False)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=args.batch_size, sampler=test_sampler)

    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, args.epochs * len(train_loader) // args.accumulate)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for number, (points, classes) in enumerate(train_loader, start=1):
            points, classes = points.to(device), classes.to(device)
            last = number % args.accumulate == 0
            with nullcontext() if last else model.no_sync():
                loss = loss_fn(model(points), classes) / args.accumulate
                loss.backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        loss, accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: test loss {loss:.4f}, accuracy {accuracy:.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
