"""Losses: how a batch becomes a call of the model and a loss, and means as (total, count).

Totals and counts can be added up over ranks and microbatches.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tutti.errors import ScriptError


@dataclass(frozen=True, slots=True)
class Weighted:
    """A mean over something other than samples, given by its parts: mean = total / count.

    A language model with padding returns Weighted(sum of token losses, number of tokens). A token then has the same
    weight in every rank and every microbatch.

    Attributes:
        total: 0-d tensor with gradient.
        count: number, or 0-d tensor.

    Examples:
        The mean over tokens that are not padding:

        >>> logits, target = torch.zeros(2, 3, 5), torch.tensor([[1, 2, -100], [4, -100, -100]])
        >>> loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        >>> weighted = Weighted(loss, (target != -100).sum())
        >>> float(weighted.total / weighted.count)
        1.609...
    """

    total: torch.Tensor
    count: torch.Tensor | float


@dataclass(frozen=True, slots=True)
class LossSum:
    """A loss that a function of torch has summed over samples, so that those of ranks add up to the batch's.

    Attributes:
        total: 0-d tensor with gradient.
    """

    total: torch.Tensor


def as_weighted(loss: Any, samples: float, batch_size: float = math.inf) -> Weighted:
    """Return a user's loss, computed from `samples` samples of `batch_size`, as (total, count).

    Raises:
        ScriptError: it is neither a tensor of one element nor a Weighted.
    """
    if isinstance(loss, Weighted):
        return loss
    if isinstance(loss, LossSum):
        return Weighted(loss.total.reshape(()), samples / batch_size)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return Weighted(loss.reshape(()) * samples, float(samples))
    shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise ScriptError(
        f"the loss is {shape}; return a 0-d tensor that is the mean over samples, or "
        "tutti.Weighted(total, count) where the mean is over something else"
    )


def default_unpack(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return (positional arguments, keyword arguments, target) of a batch.

    - A dict is passed as keyword arguments and is its own target.
    - In a tuple or list the last entry is the target, and the others are inputs. A single input that is a dict is
      passed as keyword arguments.
    - A single tensor is input and target.

    Raises:
        ScriptError: the batch has another form.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch), batch
    if isinstance(batch, torch.Tensor):
        return (batch,), {}, batch
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        *inputs, target = batch
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            return (), dict(inputs[0]), target
        if len(inputs) == 1 and isinstance(inputs[0], tuple | list):
            return tuple(inputs[0]), {}, target
        return tuple(inputs), {}, target
    raise ScriptError(
        f"a batch of type {type(batch).__name__} is not (inputs, target), a dict or a tensor; pass "
        "prepare(..., unpack=lambda batch: (args, kwargs, target))"
    )


def default_loss(output: Any, target: Any) -> Any:
    """Return the loss that a model computes itself: `output.loss`, `output["loss"]`, or the output if it is 0-d.

    Raises:
        ScriptError: the output contains no loss.
    """
    loss = loss_in(output)
    if loss is None:
        raise ScriptError(
            f"prepare got no loss_fn, and the model's output ({type(output).__name__}) contains no loss; pass loss_fn"
        )
    return loss


def loss_in(output: Any) -> Any | None:
    """Return the loss that a model's output contains, or None."""
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        return output.loss
    return output if isinstance(output, torch.Tensor) and output.ndim == 0 else None


def loss_of(unpack: Callable[[Any], Any], loss_fn: Callable[[Any, Any], Any]) -> Callable[[nn.Module, Any], Any]:
    """Make a function (model, batch) -> loss from a function that unpacks batches and a loss function."""

    def function(model: nn.Module, batch: Any) -> Any:
        args, kwargs, target = unpack(batch)
        return loss_fn(model(*args, **kwargs), target)

    return function
