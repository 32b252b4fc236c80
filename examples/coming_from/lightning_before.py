"""Predict a signal's next values with Lightning: python lightning_before.py --devices 2"""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def make_signals(samples: int, seed: int) -> TensorDataset:
    """Sums of two waves with noise: 24 values to read, and the 4 values that follow."""
    generator = torch.Generator().manual_seed(seed)
    periods = 4 + 8 * torch.rand(samples, 2, 1, generator=generator)
    phases = 6.3 * torch.rand(samples, 2, 1, generator=generator)
    signals = torch.sin(6.3 * torch.arange(28) / periods + phases).sum(dim=1)
    signals = signals + 0.05 * torch.randn(samples, 28, generator=generator)
    return TensorDataset(signals[:, :24], signals[:, 24:])


class Signals(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.train_set, self.val_set = make_signals(1024, seed=1), make_signals(256, seed=2)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.train_set, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.val_set, batch_size=self.batch_size)


class Forecaster(L.LightningModule):
    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.head = nn.Linear(width, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.lstm(values[:, :, None])[0][:, -1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        values, following = batch
        loss = nn.functional.mse_loss(self(values), following)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        values, following = batch
        predicted = self(values)
        self.log("val_loss", nn.functional.mse_loss(predicted, following), sync_dist=True, prog_bar=True)
        self.log("val_mae", (predicted - following).abs().mean(), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="per device")
    args = parser.parse_args()

    L.seed_everything(0)
    model = Forecaster(width=16, lr=0.02)
    best = ModelCheckpoint(monitor="val_loss", mode="min", save_top_k=1)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        devices=args.devices,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[best, EarlyStopping("val_loss", patience=2), LearningRateMonitor("step")],
        logger=CSVLogger("logs"),
        log_every_n_steps=4,
    )
    trainer.fit(model, datamodule=Signals(args.batch_size))
    if trainer.is_global_zero:
        values = trainer.callback_metrics
        print(f"val loss {values['val_loss']:.4f}, mean absolute error {values['val_mae']:.4f}")
        print(f"best val loss {best.best_model_score:.4f}")
    trainer.save_checkpoint("model.ckpt")


if __name__ == "__main__":
    main()
