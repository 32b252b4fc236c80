"""The guard: checks within a training run that one device and these ranks compute the same.

- `findings`: when checks run, what they have said, and how a finding reaches the terminal and the report.
- `agreement`: hyperparameters, modules, modes, the order of samples, a sample and the weights are equal on all ranks.
- `coupled_loss`: the loss of a few samples is the mean of the losses of two halves.
- `evaluation_dropout`: dropout is off in the first evaluation.

An error is a value that is certainly wrong; a warning is one that may be intended. docs/guards.md lists both.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from tutti.data.batches import BatchShare
from tutti.trainer.guard.agreement import check_agreement, check_first_sample
from tutti.trainer.guard.coupled_loss import check_loss
from tutti.trainer.guard.evaluation_dropout import DropoutWatch
from tutti.trainer.guard.findings import is_due, is_guarded
from tutti.trainer.run_state import Run

__all__ = ["DropoutWatch", "guard_loss", "guard_step"]


def guard_step(run: Run, loss: Callable[[nn.Module, Any], Any], pieces: list[Any]) -> None:
    """A step begins: check that the ranks agree, if this step is one that is checked. Collective.

    Raises:
        RankMismatchError: on every rank, if they do not.
    """
    state = run.loop.guard
    state.steps += 1
    if is_guarded(run) and is_due(state.steps):
        check_agreement(run, loss, pieces)
        if state.steps == 1:
            check_first_sample(run)


def guard_loss(run: Run, loss: Callable[[nn.Module, Any], Any], pieces: list[Any], share: BatchShare) -> None:
    """After the first backward of each loss function: check that it is a mean over samples. Collective."""
    if is_guarded(run):
        check_loss(run, loss, pieces[0], share)
