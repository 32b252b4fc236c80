"""The guard knows one loss in all its forms, and which optimizer updates which parameter."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from harness import preload, run_ranks
from trainer.guard_scripts import Script, contrastive, net, said, token_mean
from tutti.parallel.loss_means import CountedLoss
from tutti.trainer.guard.findings import code_of

preload("tutti.trainer.guard")


def sgd(*parts: slice) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda model: [torch.optim.SGD(model[part].parameters(), lr=0.01) for part in parts]


def net_with_frozen_head() -> nn.Module:
    model = net()
    model[2].requires_grad_(False)
    return model


OWNERS: dict[str, tuple[Script, str]] = {
    "left out": (
        Script(optimizer=sgd(slice(0, 1))),
        "parameters that require a gradient but are in no optimizer, so that they stay as they are: "
        "'2.weight', '2.bias'",
    ),
    "shared": (
        Script(optimizer=sgd(slice(0, 4), slice(2, 4))),
        "parameters that SGD (optimizer 0) and SGD (optimizer 1) both update: '2.weight', '2.bias'",
    ),
    "frozen": (Script(net_with_frozen_head, optimizer=sgd(slice(0, 1))), ""),
    "divided": (Script(optimizer=sgd(slice(0, 2), slice(2, 4))), ""),
}


def owners_said() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, (script, _) in OWNERS.items():
        said(f"owners-{name}", script, 2, found.setdefault(name, set()))
    return {name: {line for line in lines if line.startswith("parameters that")} for name, lines in found.items()}


def test_parameters_of_no_optimizer_and_of_two_are_named() -> None:
    lines = run_ranks(owners_said, 2)[0]
    assert lines == {name: {line} - {""} for name, (_, line) in OWNERS.items()}


class FreshLoss:
    """A loss that scripts make anew in every step."""

    def __call__(self, model: Any, batch: Any) -> Any:
        return model(batch)


def test_a_loss_that_is_made_anew_in_every_step_is_one_loss() -> None:
    def made() -> list[Any]:
        return [
            partial(F.mse_loss, reduction="sum"),
            partial(FreshLoss()),
            FreshLoss(),
            lambda model, batch: model(batch),
        ]

    for first, again in zip(made(), made(), strict=True):
        assert code_of(CountedLoss(first)) is code_of(CountedLoss(again)) is code_of(again)
    assert code_of(token_mean) is not code_of(contrastive)
