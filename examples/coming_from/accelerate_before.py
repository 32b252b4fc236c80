"""Find shapes in images with Accelerate: accelerate launch --num_processes 2 accelerate_before.py"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset[dict[str, Tensor]]):
    """Noisy images of 12 x 12 pixels, each with a bar that lies (0), stands (1) or leans (2)."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(samples, 1, 12, 12, generator=generator)
        self.labels = torch.randint(3, (samples,), generator=generator)
        starts = torch.randint(8, (samples,), generator=generator)
        for image, label, start in zip(self.images, self.labels, starts, strict=True):
            for step in range(5):
                image[0, 6 if label == 0 else start // 2 + step, 6 if label == 1 else start // 2 + step] += 2

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixels": self.images[index], "labels": self.labels[index]}


class Net(nn.Module):
    """Two convolutions and a linear layer; returns the loss and the scores, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(3),
        )
        self.head = nn.Linear(144, 3)

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.features(pixels).flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    set_seed(0)
    train_loader = DataLoader(Shapes(1024, seed=1), batch_size=args.batch_size)
    test_loader = DataLoader(Shapes(256, seed=2), batch_size=args.batch_size)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # A prepared scheduler advances once per process at each update.
    total = args.epochs * len(train_loader) // args.accumulate
    scheduler = LambdaLR(optimizer, lambda step: max(1 - step / total, 0))
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        hits, seen = 0, 0
        for batch in test_loader:
            with torch.no_grad():
                outputs = model(**batch)
            predicted, labels = accelerator.gather_for_metrics((outputs["logits"].argmax(dim=1), batch["labels"]))
            hits += (predicted == labels).sum().item()
            seen += len(labels)
        accelerator.print(f"epoch {epoch}: accuracy {hits / seen:.4f}")

    accelerator.wait_for_everyone()
    accelerator.save_model(model, "model")
    accelerator.end_training()


if __name__ == "__main__":
    main()
