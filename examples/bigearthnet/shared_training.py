"""What train_torch.py and train_tutti.py share: options, data, model, optimizer, and the epochs of the schedule."""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from dataset import Patches, read_record
from labels import NOMENCLATURES
from network import BLOCKS, ResNet
from tutti.errors import DataError
from tutti.optim.large_batch import LAMB, parameter_groups
from tutti.optim.learning_rate import LRRule
from tutti.optim.recipes import LarsRecipe, recipe_named

PUBLISHED = recipe_named("remote-sensing")
PUBLISHED_EPOCHS = 90
"""LARS with Nesterov momentum, 0.1 per 256 samples, 5 epochs of warm-up, a tenth after 30, 60 and 80 of 90 epochs."""


def parse_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("data", type=Path, help="a pack, as pack.py makes one")
    parser.add_argument("--labels", type=int, choices=sorted(NOMENCLATURES), default=43, help="the nomenclature")
    parser.add_argument("--epochs", type=int, default=PUBLISHED_EPOCHS, help="the schedule's epochs scale with these")
    parser.add_argument("--batch-size", type=int, default=512, help="samples of a step, over all ranks")
    parser.add_argument("--optimizer", choices=("lars", "lamb", "sgd"), default="lars")
    parser.add_argument("--lr", type=float, default=PUBLISHED.base_lr, help="rate for 256 samples")
    parser.add_argument("--weight-decay", type=float, default=PUBLISHED.weight_decay)
    parser.add_argument("--layers", type=int, choices=sorted(BLOCKS), default=50)
    parser.add_argument("--width", type=int, default=64, help="channels of the first group; 64 is ResNet-50")
    parser.add_argument("--precision", choices=("full", "bfloat16"), default="full")
    parser.add_argument("--validate-every", type=int, default=10, help="epochs between two validations; 0: none")
    parser.add_argument("--tuning", action="store_true", help="leave the test split alone: this run chooses a rate")
    parser.add_argument("--workers", type=int, default=2, help="processes of each rank that load and augment")
    parser.add_argument("--no-augment", action="store_true", help="neither turn nor flip images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fact", action="append", default=[], metavar="NAME=VALUE", help="a statement for the report")
    args = parser.parse_args()
    try:
        read_record(args.data)
    except DataError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    return args


def datasets(args: argparse.Namespace) -> tuple[Patches, Patches, Patches]:
    """Return training, validation and test data."""
    train = Patches(args.data, "train", classes=args.labels, augment=not args.no_augment)
    return train, *(Patches(args.data, split, classes=args.labels) for split in ("val", "test"))


def make_model(args: argparse.Namespace) -> ResNet:
    return ResNet(args.labels, layers=args.layers, width=args.width)


def recipe_of(args: argparse.Namespace) -> LarsRecipe:
    """Return the published recipe with its epochs scaled to those of this run."""
    factor = args.epochs / PUBLISHED_EPOCHS
    return replace(
        PUBLISHED,
        base_lr=args.lr,
        weight_decay=args.weight_decay,
        warmup_epochs=PUBLISHED.warmup_epochs * factor,
        decay_epochs=tuple(max(1, round(epoch * factor)) for epoch in PUBLISHED.decay_epochs),
    )


def lr_rule_of(args: argparse.Namespace) -> LRRule:
    """Return the rule of the rate: linear in the batch, but its square root for LAMB (You et al. 2020)."""
    rule = recipe_of(args).lr_rule
    return replace(rule, scale="sqrt") if args.optimizer == "lamb" else rule


def make_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Return LARS, or LAMB or SGD with Nesterov momentum for comparison, none of which decays norms and biases."""
    if args.optimizer == "lars":
        return recipe_of(args).optimizer(model)
    groups = parameter_groups(model, args.weight_decay)
    if args.optimizer == "lamb":
        return LAMB(groups, args.lr, weight_decay=args.weight_decay)
    groups = [{name: group[name] for name in ("params", "weight_decay")} for group in groups]
    return torch.optim.SGD(groups, args.lr, momentum=PUBLISHED.momentum, nesterov=True)


def validates_after(args: argparse.Namespace, epoch: int) -> bool:
    """Whether the validation split is evaluated after this epoch; the test split is evaluated once, at the end."""
    return bool(args.validate_every) and (epoch + 1) % args.validate_every == 0


def shown(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())
