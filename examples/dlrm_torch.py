"""A DLRM that predicts clicks from a log in Criteo's form: plain PyTorch on one device.

dlrm_tutti.py is the same program on any number of devices.
"""

import argparse
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tutti.data.clicks import ClickLog, read_clicks, write_clicks
from tutti.nn import EmbeddingTables


def mlp(*widths: int) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*(part for pair in layers for part in pair))


class DLRM(nn.Module):
    """Predict the logit of a click from 13 numbers and 26 categories (Naumov et al. 2019, arXiv 1906.00091).

    An MLP maps the numbers to a vector while the categories' vectors are looked up; all pairs of the 27 vectors are
    multiplied.
    """

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        super().__init__()
        self.tables = EmbeddingTables(sizes, width, sparse=True)
        self.bottom = mlp(13, 64, width)
        pairs = (len(sizes) + 1) * len(sizes) // 2
        self.top = nn.Sequential(mlp(width + pairs, 64), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        vectors = self.tables.start(categories)
        bottom = self.bottom(numbers)
        every = torch.cat([bottom.unsqueeze(1), vectors()], 1)  # (batch, 27, width)
        low, high = torch.tril_indices(every.shape[1], every.shape[1], -1)
        products = (every @ every.transpose(1, 2))[:, low, high]
        return self.top(torch.cat([bottom, products], 1)).squeeze(1)


def made_clicks(displays: int, seed: int) -> ClickLog:
    """Write a synthetic log, and read it back."""
    with tempfile.TemporaryDirectory() as folder:
        write_clicks(Path(folder) / "train.txt", displays, seed)
        return read_clicks(Path(folder) / "train.txt")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"displays": 7000, "width": 16, "epochs": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--data", help="your own log, such as Criteo's train.txt (default: a synthetic one)")
    parser.add_argument("--max-rows", type=int, help="rows of a table at most; categories are taken modulo this")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    clicks = read_clicks(args.data, args.max_rows) if args.data else made_clicks(args.displays, args.seed)
    train, test = clicks.split()
    model = DLRM(clicks.sizes, args.width)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test, batch_size=args.batch_size)
    print(f"{len(train)} displays, {sum(clicks.sizes)} rows in {len(clicks.sizes)} tables")

    for epoch in range(args.epochs):
        model.train()
        for numbers, categories, clicked in loader:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(numbers, categories), clicked)
            loss.backward()
            optimizer.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for numbers, categories, clicked in test_loader:
                loss = F.binary_cross_entropy_with_logits(model(numbers, categories), clicked)
                total += loss.item() * len(clicked)
        print(f"epoch {epoch}: test loss {total / len(test):.4f}")


if __name__ == "__main__":
    main()
