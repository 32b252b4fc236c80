"""The guard: checks within a training run that one device and these ranks compute the same.

- `findings`: which models a rank can check by itself, and how a warning reaches the terminal and the report.
- `agreement`: hyperparameters, modules, modes, the order of samples, a sample and the weights are equal on all ranks.
- `coupled_loss`: the loss of a few samples is the mean of the losses of two halves.
- `evaluation_dropout`: dropout is off in the first evaluation.

An error is a value that is certainly wrong; a warning is one that may be intended. docs/guards.md lists both.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from tutti.data.batches import BatchShare
from tutti.trainer.guard.agreement import check_agreement, check_first_sample, say_few_trained
from tutti.trainer.guard.coupled_loss import check_loss
from tutti.trainer.guard.evaluation_dropout import DropoutWatch
from tutti.trainer.run_state import Run
from tutti.trainer.state_check import is_checked, should_agree

FIRST_STEPS = 10
"""Loss functions that come after so many steps are not checked."""

__all__ = ["DropoutWatch", "guard_loss", "guard_step"]


def guard_step(run: Run, loss: Callable[[nn.Module, Any], Any], pieces: list[Any]) -> None:
    """A step begins: check that the ranks agree, if this step is one that is checked. Collective.

    Raises:
        RankMismatchError: on every rank, if they do not.
    """
    step = run.loop.steps_begun
    if should_agree(run) and is_checked(step):
        check_agreement(run, loss, pieces)
        if step == 0:
            check_first_sample(run)
            say_few_trained(run)


def guard_loss(run: Run, loss: Callable[[nn.Module, Any], Any], pieces: list[Any], share: BatchShare) -> None:
    """After the first backward of each loss function: check that it is a mean over samples. Collective."""
    if run.loop.steps_begun <= FIRST_STEPS and should_agree(run):
        check_loss(run, loss, pieces[0], share)
