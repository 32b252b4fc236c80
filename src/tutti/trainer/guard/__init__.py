"""The guard: checks within a training run that one device and these ranks compute the same.

- `findings`: which models a rank can check by itself, and how a warning reaches the terminal and the report.
- `agreement`: hyperparameters, modules, modes and the order of samples are equal on all ranks.
- `corruption`: bits of replicas' weights and optimizer state are equal, every few steps.
- `replicas`: weights, gradients and the optimizers' state are equal on replicas.
- `sample_values`: a few samples, and a batch of them, have the same values on all ranks.
- `same_loss`: all ranks compute the same loss of rank 0's samples.
- `coupled_loss`: the loss of a few samples is the mean of the losses of two halves.
- `trained_parameters`: nearly all parameters are frozen, or optimizers leave out or share some.
- `evaluation_watch`, `evaluation_rows`: in the first evaluation dropout is off, and each sample is computed by itself.

An error is a value that is certainly wrong; a warning is one that may be intended. docs/guards.md lists both.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tutti.data.batches import BatchShare
from tutti.errors import RankMismatchError
from tutti.trainer.guard.agreement import check_agreement, check_modes, check_replicas
from tutti.trainer.guard.corruption import compare_before_checkpoint, compare_replicas
from tutti.trainer.guard.coupled_loss import check_loss
from tutti.trainer.guard.evaluation_watch import EvaluationWatch
from tutti.trainer.guard.findings import code_of, computing_separately, hooked_modules, kept_by, warn
from tutti.trainer.guard.replicas import check_update
from tutti.trainer.guard.same_loss import LOSS, depends_on_rank
from tutti.trainer.guard.sample_values import check_samples
from tutti.trainer.guard.trained_parameters import say_few_trained, say_owners
from tutti.trainer.observer import NullObserver
from tutti.trainer.run_state import Run
from tutti.trainer.state_check import is_checked, should_agree
from tutti.trainer.traceless import own_generators_kept

FIRST_STEPS = 10
"""Loss functions that come after so many steps are not checked."""

__all__ = [
    "EvaluationWatch",
    "compare_before_checkpoint",
    "guard_end",
    "guard_evaluation",
    "guard_loss",
    "guard_step",
    "guard_update",
]


def guard_step(run: Run, loss: Callable[[nn.Module, Any], Any], pieces: list[Any]) -> None:
    """A step begins: check that the ranks agree, if this step is one that is checked. Collective.

    Raises:
        RankMismatchError: on every rank, if they do not.
        TrainingError: on every rank, if a replica's values were damaged.
    """
    step = run.loop.steps_begun
    if _is_recorded(run):
        check_modes(run)  # all else the observer compares; but norms in other modes wait for each other
    if is_checked(step) and should_agree(run):
        check_agreement(run, loss, pieces)
        if step == 0:
            check_samples(run)
            say_few_trained(run)
            say_owners(run)
    if run.parallel.world.world_size > 1 and run.loop.guard.hashes.begin(step):
        compare_replicas(run)


def guard_loss(run: Run, loss: Callable[[nn.Module, Any], Any], pieces: list[Any], share: BatchShare) -> None:
    """After the first gradients of each loss function: check that it is one mean over samples on all ranks. Collective.

    Raises:
        RankMismatchError: `tutti verify` runs the script, and the loss function depends on the rank. What depends on
            it in forward, verification finds itself.
    """
    if run.loop.steps_begun > FIRST_STEPS:
        return
    losses, code, recorded = run.loop.guard.losses, code_of(loss), _is_recorded(run)
    if id(code) in losses or not (recorded or should_agree(run)):
        return
    losses[id(code)] = code  # kept, so that no other gets its id
    hooked: list[list[str] | None] = run.loop.watch.gather("hooks", hooked_modules(run.parallel.model))
    alike = all(names == hooked[0] for names in hooked)
    if None in hooked or (alike and hooked[0]):
        return
    with (
        computing_separately(run) as is_able,
        own_generators_kept(run.parallel.model, kept_by(loss, run.parallel.model)),
    ):
        if not is_able:
            return
        found = depends_on_rank(run, loss, pieces[0], share) if run.parallel.world.world_size > 1 else None
        if found is None and alike and not recorded:
            check_loss(run, loss, pieces[0], share)
    if found is not None and not recorded:
        rank = next((number for number, names in enumerate(hooked) if names != hooked[0]), None)
        hooks = "" if rank is None else f" (hooks of the script differ between rank 0 and rank {rank})"
        warn(run, found[1] + hooks)
    elif found is not None and found[0] == LOSS:
        raise RankMismatchError(f"step {run.state.progress.step + 1}: {found[1]}")


def _is_recorded(run: Run) -> bool:
    """Whether an observer compares what ranks compute together."""
    return not isinstance(run.loop.observer, NullObserver) and run.parallel.plan.sync.mode == "synchronous"


def guard_update(run: Run, optimizers: Sequence[Optimizer], loss: float) -> None:
    """Before an update of a step that is checked: check that replicas have equal gradients. Collective.

    Raises:
        RankMismatchError: on every rank, if they do not.
    """
    if is_checked(run.loop.steps_begun - 1) and should_agree(run):
        check_update(run, optimizers, loss)


def guard_evaluation(run: Run) -> None:
    """An evaluation begins: check that replicas are equal, as often as in steps. Collective.

    Raises:
        RankMismatchError: on every rank, if they are not.
    """
    number, run.loop.guard.evaluations = run.loop.guard.evaluations, run.loop.guard.evaluations + 1
    if is_checked(number) and run.parallel.world.world_size > 1 and should_agree(run):
        check_replicas(run, f"evaluation after step {run.state.progress.step}")


def guard_end(run: Run) -> None:
    """The last epoch has ended: check that replicas are equal. Collective.

    Raises:
        RankMismatchError: on every rank, if they are not.
    """
    if run.parallel.world.world_size > 1 and should_agree(run):
        check_replicas(run, "the end of training")
