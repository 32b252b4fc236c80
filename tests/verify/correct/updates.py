"""What docs/updates.md promises, in one script: several optimizers, losses, schedulers, clipping, evaluation."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti

job = tutti.Job(global_batch_size=12, num_microbatches=2, clip_norm=0.05, seed=2)
generator = torch.Generator().manual_seed(0)
target = torch.randint(0, 3, (42,), generator=generator)
target[::5] = -100  # the loss is a mean over those that count
data = TensorDataset(torch.randn(42, 6, generator=generator), target)
model = nn.ModuleDict(
    {
        "body": nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Dropout(0.2)),
        "head": nn.Linear(10, 3),
        "critic": nn.Linear(10, 1),
        "unowned": nn.Linear(10, 1),
    }
)
slow = torch.optim.SGD([*model["body"].parameters(), *model["head"].parameters()], lr=0.1, momentum=0.9)
fast = torch.optim.AdamW(model["critic"].parameters(), lr=0.02)
schedulers = [
    torch.optim.lr_scheduler.StepLR(slow, 2, 0.5),
    torch.optim.lr_scheduler.LambdaLR(fast, lambda step: 1 / (1 + step)),
    torch.optim.lr_scheduler.ReduceLROnPlateau(slow, patience=0, threshold=0.9, factor=0.7),
]
model, (slow, fast), loader = job.prepare(model, [slow, fast], data, scheduler=schedulers)


def classes(networks, batch):
    return F.cross_entropy(networks["head"](networks["body"](batch[0])), batch[1])


def value(networks, batch):
    features = networks["body"](batch[0])
    return (networks["critic"](features) - networks["unowned"](features)).square().mean()


def penalty(networks, batch):
    return networks["head"](networks["body"](-batch[0])).square().mean()


for _ in job.epochs(2):
    for batch in loader:
        job.forward_backward(classes, batch)
        job.forward_backward(penalty, batch)  # added to the first
        job.update(slow)
        job.forward_backward(value, batch)
        job.update(fast)
        job.forward_backward(value, batch, zero_grad=[fast])
        job.update()
    job.schedule(0.5)
