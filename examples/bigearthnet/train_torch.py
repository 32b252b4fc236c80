"""Trains ResNet-50 on BigEarthNet: plain PyTorch on one device.

train_tutti.py is the same program on any number of devices. LARS is tutti's, as torch has none; it needs no Job.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from network import F1
from shared_training import datasets, make_model, make_optimizer, parse_arguments, recipe_of, shown, validates_after


def rate_factor(
    step: int, steps_per_epoch: int, batch_size: int, decay_epochs: tuple[int, ...], warm: float, power: float = 1.0
) -> float:
    """The rate of a step over the base rate: linear in the batch, after a warm-up that begins at the base rate."""
    target = (batch_size / 256) ** power
    steps = round(warm * steps_per_epoch)
    start = min(1.0, target)
    factor = start + (target - start) * step / steps if step < steps else target
    return factor * 0.1 ** sum(step // steps_per_epoch >= epoch for epoch in decay_epochs)


@torch.no_grad()
def evaluate(model: nn.Module, data: Dataset[tuple[Tensor, Tensor]], loss_fn: nn.Module, batch_size: int) -> dict:
    model.eval()
    outputs, targets = [], []
    for images, target in DataLoader(data, batch_size=batch_size):
        outputs.append(model(images))
        targets.append(target)
    output, target = torch.cat(outputs), torch.cat(targets)
    return {"loss": loss_fn(output, target).item()} | {name: metric(output, target) for name, metric in F1.items()}


def main() -> None:
    args = parse_arguments(__doc__)
    torch.manual_seed(args.seed)
    train, validation, test = datasets(args)
    model = make_model(args)
    optimizer = make_optimizer(args, model)
    loss_fn = nn.BCEWithLogitsLoss()
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True, num_workers=args.workers)
    recipe, half = recipe_of(args), args.precision == "bfloat16"
    schedule = (len(loader), args.batch_size, recipe.decay_epochs, recipe.warmup_epochs)
    power = 0.5 if args.optimizer == "lamb" else 1.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, *schedule, power))

    for epoch in range(args.epochs):
        model.train()
        for images, target in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = loss_fn(model(images), target)
            loss.backward()
            optimizer.step()
            scheduler.step()
        if validates_after(args, epoch):
            print(f"epoch {epoch}: validation {shown(evaluate(model, validation, loss_fn, args.batch_size))}")
    if not args.tuning:
        print(f"test {shown(evaluate(model, test, loss_fn, args.batch_size))}")


if __name__ == "__main__":
    main()
