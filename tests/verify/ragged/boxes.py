"""Detection: lists of images and of targets; modules get lists with one tensor an image, and boxes of all images."""

import torch
from torch import nn

import tutti


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        boxes = torch.rand(1 + index % 4, 4, generator=generator)
        return torch.randn(2, 6, 6, generator=generator), {"boxes": boxes, "labels": torch.arange(len(boxes)) % 3}


def collate(samples):
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


class Transform(nn.Module):
    def forward(self, images, boxes):
        return [image * 2 for image in images], [box - 0.5 for box in boxes]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.transform, self.body = Transform(), nn.Conv2d(2, 4, 3, 2)
        self.boxes, self.head = nn.Linear(4, 4), nn.Linear(8, 3)

    def forward(self, images, targets):
        images, boxes = self.transform(images, [target["boxes"] for target in targets])
        features = self.body(torch.stack(images)).mean((2, 3))
        counts = torch.tensor([len(box) for box in boxes])
        rows = torch.cat([features.repeat_interleave(counts, 0), self.boxes(torch.cat(boxes))], 1)
        losses = nn.functional.cross_entropy(
            self.head(rows), torch.cat([target["labels"] for target in targets]), reduction="none"
        )
        owner = torch.arange(len(counts)).repeat_interleave(counts)
        return {"classes": (torch.zeros(len(counts)).to(losses).index_add(0, owner, losses) / counts).mean()}


job = tutti.Job(global_batch_size=4, seed=4)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = job.prepare(
    model,
    optimizer,
    Images(),
    lambda losses, _: losses["classes"],
    collate_fn=collate,
    unpack=lambda batch: (batch, {}, None),
)
for _ in job.epochs(1):
    for batch in loader:
        job.step(batch)
