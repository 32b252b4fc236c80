"""Tokens that experts took and dropped in a step: every rank's numbers travel with the loss, in the same small sum."""

from collections.abc import Sequence

import torch
from torch import nn

from tutti.nn.mixture import MixtureOfExperts, Tally, take_tallies

WIDTH = 4
"""Numbers a mixture needs: choices, dropped ones, passes, and the sum of its load-balancing losses."""


def mixtures_of(model: nn.Module) -> tuple[str, ...]:
    """Names of the mixtures of experts, of a model that is still whole: the same on every rank."""
    return tuple(name for name, module in model.named_modules() if isinstance(module, MixtureOfExperts))


def write_tallies(model: nn.Module, names: Sequence[str], numbers: torch.Tensor, copies: int) -> None:
    """Add what this rank has counted since the last time to `numbers`, (len(names) * WIDTH).

    A mixture counts what all ranks that share its slice see, so `copies` ranks add the same.
    """
    tallies = take_tallies(model)
    for position, name in enumerate(names):
        one = tallies.get(name)
        if one is not None and one.passes:
            part = numbers[position * WIDTH : (position + 1) * WIDTH]
            part += torch.tensor([one.assigned, one.dropped, one.passes, 0], dtype=part.dtype, device=part.device)
            part[3] += one.balance
            part /= copies


def read_tallies(names: Sequence[str], numbers: Sequence[float]) -> dict[str, Tally]:
    """By mixture, from the sum of all ranks' numbers."""
    rows = [numbers[start : start + WIDTH] for start in range(0, len(names) * WIDTH, WIDTH)]
    return {
        name: Tally(assigned=round(assigned), dropped=round(dropped), passes=round(passes), balance=balance)
        for name, (assigned, dropped, passes, balance) in zip(names, rows, strict=True)
    }
