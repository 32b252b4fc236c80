"""Decides when a training run checks itself. Certain mistakes are errors; what may be meant is a warning."""

from typing import Any

from tutti.data.batches import BatchShare
from tutti.parallel.data.replicate import LossFunction
from tutti.trainer.guard.loss_coupling import coupling_of
from tutti.trainer.guard.rank_agreement import check_hyperparameters, check_order, check_samples, check_weights
from tutti.trainer.observer import NullObserver
from tutti.trainer.run_state import Run
from tutti.trainer.state_check import is_checked

RARELY_TRAINED = 0.01
"""Below this share of trained parameters the run says what the share is."""


FIRST_STEPS = 10
"""Loss functions that first come later are not checked."""


def guard_step(run: Run, loss_of_batch: LossFunction, pieces: list[Any], share: BatchShare) -> None:
    """Check the run before a step. Collective in the steps that are checked.

    Args:
        run: the run.
        loss_of_batch: (model, batch) -> loss.
        pieces: this rank's microbatches.
        share: this rank's share of the global batch.

    Raises:
        RankMismatchError: on every rank, if ranks have different orders, samples, hyperparameters or weights.
    """
    step = run.loop.steps_begun
    _check_mode(run)
    if step == 0:
        _say_share_trained(run)
    # Verification compares all of this itself, and replicas that step by themselves differ on purpose.
    if not isinstance(run.loop.observer, NullObserver) or run.parallel.plan.sync.mode != "synchronous":
        return
    if run.parallel.world.world_size > 1:
        if step == 0 or run.state.loader.position == 1:
            check_order(run)
        if step == 0:
            check_samples(run)
        if is_checked(step):
            check_hyperparameters(run)
            check_weights(run)
    function = getattr(loss_of_batch, "__code__", loss_of_batch)
    if step < FIRST_STEPS and id(function) not in run.loop.guarded:
        run.loop.guarded.add(id(function))
        warn(run, "loss coupling", coupling_of(run, loss_of_batch, pieces, share))


def warn(run: Run, kind: str, finding: str) -> None:
    """Print a finding and write it to the run's metrics, from which reports take it; the first of its kind only."""
    if not finding or kind in run.loop.guarded:
        return
    run.loop.guarded.add(kind)
    run.output.screen.say(f"warning: {finding}")
    run.output.log.row("finding", run.loop.clock.elapsed_s(), step=run.state.progress.step, message=finding)


def _check_mode(run: Run) -> None:
    if not run.parallel.model.training:
        warn(
            run,
            "evaluation mode",
            f"step {run.state.progress.step + 1} trains the model in evaluation mode: there is no dropout, and "
            "BatchNorm keeps its statistics. Models from from_pretrained start in it, and model.eval() stays until "
            "model.train() is called; call model.train() before training",
        )


def _say_share_trained(run: Run) -> None:
    parameters = list(run.parallel.model.parameters())
    everything, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    if run.loop.pipeline is None and 0 < trained < RARELY_TRAINED * everything:
        share = 100 * trained / everything
        run.output.screen.say(f"{share:.2g} % of the parameters are trained ({trained:,}); the others are frozen")
