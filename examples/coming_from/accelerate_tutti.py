"""Find shapes in images with tutti: tutti run --nproc 2 accelerate_tutti.py"""

import argparse

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import tutti


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


def correct(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return (outputs["logits"].argmax(dim=1) == batch["labels"]).float()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks and accumulation steps together")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    job = tutti.Job(global_batch_size=args.batch_size, num_microbatches=args.accumulate, clip_norm=1.0, seed=0)
    torch.manual_seed(0)
    train_set, test_set = Shapes(1024, seed=1), Shapes(256, seed=2)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total = args.epochs * len(train_set) // args.batch_size  # updates
    scheduler = LambdaLR(optimizer, lambda step: max(1 - step / total, 0))
    model, optimizer, loader = job.prepare(model, optimizer, train_set, scheduler=scheduler, shuffle=False)

    for epoch in job.epochs(args.epochs):
        for batch in loader:
            job.step(batch)
        values = job.evaluate(test_set, {"accuracy": correct})
        job.print(f"epoch {epoch}: accuracy {values['accuracy']:.4f}")

    state = job.state_dict(main_only=True)
    if job.is_main:
        torch.save(state, "model.pt")


if __name__ == "__main__":
    main()
