"""The loop over epochs: how it begins, how ranks agree to stop it, and how it ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tutti.checkpoint.load import load_newest, name_of_candidate
from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.errors import NoCheckpointError, TrainingError
from tutti.trainer.callbacks import JobCallbacks
from tutti.trainer.guard import compare_before_checkpoint, guard_end
from tutti.trainer.run_header import resuming_command
from tutti.trainer.run_state import Run
from tutti.trainer.slow_ranks import change_shares
from tutti.trainer.update import save_when_due, settle_updates

_MOST_ROLLED_BACK = 3
"""How often the steps after one checkpoint, or one step after another, may fail."""


def run_epochs(job: Any, run: Run, callbacks: JobCallbacks, count: int) -> Iterator[int]:
    """Yield the epochs still to run, of `count`; then write the last checkpoint. Collective.

    A loop that the script leaves after `job.should_stop` was true ends like one that has run all its epochs.
    """
    loader, progress, ending = run.state.loader, run.state.progress, run.loop.ending
    progress.total_epochs = count
    run.output.log.row("epochs", run.loop.clock.elapsed_s(), step=progress.step, planned=count)
    first = (loader.epoch, progress.step)
    if 0 < count <= loader.epoch:
        run.output.screen.say(
            f"the run has already trained {loader.epoch} epochs, and job.epochs({count}) asks for no more; ask for more"
        )
    ending.reason = callbacks.stop_reason(run.parallel.world) if loader.epoch < count else ""
    if ending.reason:
        run.output.screen.say(f"the run had already stopped early: {ending.reason}; to train on, give it more patience")
    elif loader.epoch < count:
        callbacks.start(job)
    ending.in_epochs = True
    with run.loop.stopping.listening():
        while loader.epoch < count and not ending.reason:
            epoch = progress.epoch = loader.epoch
            callbacks.call("on_epoch_start", job, epoch)
            try:
                yield epoch
            except GeneratorExit:
                _left(job, run, callbacks, epoch, first)
                raise
            _end_epoch(job, run, callbacks, epoch)
        _finish(job, run, callbacks, first)


def between_batches(run: Run) -> None:
    """Where a batch is done: begin a checkpoint that is due, or save and leave if the ranks have agreed to stop.

    Here all ranks take other shares of the batch, too, if slow ranks ask for them.

    Raises:
        SystemExit: with code 75, on every rank.
        TrainingError: the steps after a checkpoint fail again and again.
    """
    stopping, loop = run.loop.stopping, run.loop
    if loop.guard.rolls_back and not (loop.accumulation.waits or loop.average_applied):
        _roll_back(run)
    if loop.marks is not None and not (loop.accumulation.waits or loop.average_applied):
        loop.marks.mark()
    change_shares(run)
    save_when_due(run)
    if not stopping.reason or loop.accumulation.waits or loop.average_applied or loop.ending.closed:
        return
    with loop.watch.during("stopping"):
        folder = save_now(run)
        others = [other.save() for other in stopping.others() if other.save is not None]
    progress = run.state.progress
    run.output.log.row(
        "preempted", loop.clock.elapsed_s(), step=progress.step, epoch=progress.epoch, reason=stopping.reason
    )
    written = f"the checkpoint is {' and '.join(str(path) for path in (folder, *others))}"
    if run.output.folder.pauses:
        run.output.screen.say(f"paused after step {progress.step}; {written}")
    else:
        command = resuming_command(run.parallel.world, run.parallel.plan.mesh, run.output.folder.path)
        run.output.screen.say(
            f"stopped after step {progress.step}: {stopping.reason}; {written}; go on with: {command}"
        )
    stopping.leave()


def _roll_back(run: Run) -> None:
    """Give model and optimizers the values of the newest checkpoint, after a step that was skipped. Collective.

    Steps, data, schedules and random numbers go on, so the next batches are others than those that led here.
    """
    guard, screen, step = run.loop.guard, run.output.screen, run.state.progress.step
    settle_updates(run)
    guard.rolls_back = False
    scheduled = [[_settings(group) for group in optimizer.param_groups] for optimizer in run.parallel.optimizers]
    with run.loop.watch.during("rolling back"):
        run.output.checkpoints.finish()
        try:
            newest, passed_over = load_newest(run.state, run.output.folder.path, screen.say, rolls_back=True)
        except NoCheckpointError:
            screen.say(f"nothing is rolled back after step {step}: the run has no checkpoint yet")
            return
    before, last, times = guard.rolled_back
    place = name_of_candidate(newest)
    times = times + 1 if place == before or step == last + 1 else 1
    guard.rolled_back = place, step, times
    if times > _MOST_ROLLED_BACK:
        raise TrainingError(
            f"step {step} failed, although the parameters had been rolled back {times - 1} times, the last time to "
            f"{place}, and other batches had followed; lower the learning rate or clip gradients, and resume "
            "from an earlier checkpoint"
        )
    for optimizer, groups in zip(run.parallel.optimizers, scheduled, strict=True):
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)
    damaged = "".join(f"; passed over {name_of_candidate(each)}, which is damaged" for each in passed_over)
    said = f"after step {step}, the model and the optimizers are rolled back to {place}{damaged}"
    screen.say(said)
    run.output.log.row("rolled_back", run.loop.clock.elapsed_s(), step=step, checkpoint=place, sentence=said)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The learning rate and what else a schedule may change, of a group of parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def save_now(run: Run) -> Path:
    """Write a checkpoint of what all updates so far have made; return its folder. Collective."""
    settle_updates(run)
    compare_before_checkpoint(run)
    return run.output.checkpoints.save()[0]


def agree_to_stop(run: Run, condition: Any) -> bool:
    """Return whether the condition is true on any rank. Collective.

    Within `job.epochs` the answer ends the loop after this epoch, and stays true until then.
    """
    ending = run.loop.ending
    if ending.reason:
        return True
    wanted = torch.tensor([float(bool(condition))], device=run.parallel.world.device)
    nbytes = ring_all_reduce_nbytes(wanted, run.parallel.world.world_size)
    with run.parallel.layout.channel("scalars").waiting(nbytes):
        stop = bool(run.parallel.world.sum(wanted)[0] > 0)
    if stop and ending.in_epochs:
        progress = run.state.progress
        place = f"at step {progress.step}, in epoch {progress.epoch + 1} (counted from 1)"
        ending.reason = f"job.should_stop was true {place}"
    return stop


def _left(job: Any, run: Run, callbacks: JobCallbacks, epoch: int, first: tuple[int, int]) -> None:
    """React to a loop that was left: end it where all ranks have agreed to stop.

    An error cannot leave a generator that is being closed, so the Job raises it at its next call.
    """
    ending = run.loop.ending
    if ending.closed:
        return
    if not ending.reason:
        ending.in_epochs, ending.left_at = False, run.state.progress.step
        return
    try:
        _end_epoch(job, run, callbacks, epoch)
        _finish(job, run, callbacks, first)
    except Exception as error:
        ending.failure = error


def _end_epoch(job: Any, run: Run, callbacks: JobCallbacks, epoch: int) -> None:
    """Go to the next epoch, unless the ranks have agreed to stop within this one."""
    settle_updates(run)
    ending = run.loop.ending
    partial = run.state.loader.epoch == epoch  # the script left the loader early
    if partial:
        if ending.reason:
            return
        run.state.loader.next_epoch()
    run.loop.program.epoch_ended(run.state.loader.epoch)
    callbacks.call("on_epoch_end", job, epoch)
    with run.loop.watch.during("job.epochs"):
        ending.reason = ending.reason or callbacks.stop_reason(run.parallel.world)
    save_when_due(run)
    ended = {"epoch": epoch, "step": run.state.progress.step, "partial": partial}
    run.output.log.row("epoch", run.loop.clock.elapsed_s(), **ended)


def _finish(job: Any, run: Run, callbacks: JobCallbacks, first: tuple[int, int]) -> None:
    """End training: write the last checkpoint, and say why it ended early, if it did."""
    ending, progress = run.loop.ending, run.state.progress
    ending.in_epochs = False
    reason, ending.reason = ending.reason, ""
    trained = run.state.loader.epoch > first[0] or progress.step > first[1]
    if trained and run.settings.keep_checkpoints:
        job.save()
    run.state.consistency.finish(run.parallel)
    if trained:
        with run.loop.watch.during("job.epochs"):
            guard_end(run)
    if reason:
        now = run.loop.clock.elapsed_s()
        stop = {"step": progress.step, "epoch": progress.epoch, "reason": reason, "watched": callbacks.watched}
        run.output.log.row("stop", now, **stop)
        run.output.screen.say(f"stopped early: {reason}" if trained else "")
    callbacks.end(job)
