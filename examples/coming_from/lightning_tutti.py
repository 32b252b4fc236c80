"""Predict a signal's next values with tutti: tutti run --nproc 2 lightning_tutti.py"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti


def make_signals(samples: int, seed: int) -> TensorDataset:
    """Sums of two waves with noise: 24 values to read, and the 4 values that follow."""
    generator = torch.Generator().manual_seed(seed)
    periods = 4 + 8 * torch.rand(samples, 2, 1, generator=generator)
    phases = 6.3 * torch.rand(samples, 2, 1, generator=generator)
    signals = torch.sin(6.3 * torch.arange(28) / periods + phases).sum(dim=1)
    signals = signals + 0.05 * torch.randn(samples, 28, generator=generator)
    return TensorDataset(signals[:, :24], signals[:, 24:])


class Forecaster(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.head = nn.Linear(width, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.lstm(values[:, :, None])[0][:, -1])


def absolute_error(predicted: Tensor, following: Tensor) -> Tensor:
    return (predicted - following).abs().mean(dim=1)


class SaveBest(tutti.Callback):
    """Writes the weights of the evaluation with the lowest loss so far."""

    best = float("inf")

    def on_evaluate_end(self, job: tutti.Job, values: dict[str, float]) -> None:
        if values["loss"] < self.best:
            self.best = values["loss"]
            state = job.state_dict(main_only=True)
            if job.is_main:
                torch.save(state, "best.pt")

    def state_dict(self) -> dict[str, Any]:  # for resumed runs
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128, help="of all ranks and accumulation steps together")
    args = parser.parse_args()

    best = SaveBest()
    job = tutti.Job(
        global_batch_size=args.batch_size,
        num_microbatches=2,
        clip_norm=0.5,
        seed=0,
        callbacks=[best, tutti.EarlyStopping("val_loss", patience=2)],
        loggers=[tutti.CSVLogger()],
    )
    torch.manual_seed(0)
    train_set, val_set = make_signals(1024, seed=1), make_signals(256, seed=2)

    model = Forecaster(width=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    steps = args.epochs * len(train_set) // args.batch_size
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=steps)
    model, optimizer, loader = job.prepare(
        model, optimizer, train_set, nn.MSELoss(), scheduler=scheduler, shuffle=False
    )

    for _ in job.epochs(args.epochs):
        for batch in loader:
            job.step(batch)
        values = job.evaluate(val_set, {"mae": absolute_error}, name="val")
    job.print(f"val loss {values['loss']:.4f}, mean absolute error {values['mae']:.4f}")
    job.print(f"best val loss {best.best:.4f}")


if __name__ == "__main__":
    main()
