"""The end of a run: its last rows, however the process ends."""

import atexit
import os
import resource
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import torch

from tutti.comm.devices import accelerator_peak_nbytes
from tutti.comm.shared_segment import attached_resident_nbytes
from tutti.comm.world import World, abandon_world, leave_world
from tutti.config.safe_text import plain_text
from tutti.environment import LaunchOptions, read_launch_options
from tutti.errors import CheckpointError, TuttiError
from tutti.event_record import ACTIVE
from tutti.surviving_rank import SURVIVING_RANK, KeptState
from tutti.trainer.operation_watch import count_anew
from tutti.trainer.resume import release_memory
from tutti.trainer.run_state import Run
from tutti.trainer.step_profile import StepProfile
from tutti.trainer.update import settle_updates


def begin_launch() -> LaunchOptions:
    """Return the launcher's options, and let tutti's errors be one sentence from now on, without a traceback."""
    options = read_launch_options()
    if not options.supervised and sys.excepthook is sys.__excepthook__ and not hasattr(sys, "ps1"):
        sys.excepthook = _say_shortly
    return options


def _say_shortly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, TuttiError):
        sys.__excepthook__(kind, error, trace)
        return
    print(plain_text(f"tutti: {error}"), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code)


class RunFinalizer:
    """Writes a run's last rows when the process ends, however it ends.

    Attributes:
        run: the prepared run, once there is one.
        failed: whether the run has failed on this rank.
        before_end: called first, where the run has not failed.
    """

    def __init__(self, world: World, supervised: bool) -> None:
        self.world = world
        self.run: Run | None = None
        self.failed = False
        self.before_end: Callable[[], None] = lambda: None
        self._ended = False
        if not supervised:
            sys.excepthook = self._on_exception
            threading.excepthook = self._on_exception_in_thread
        atexit.register(self.close)
        if SURVIVING_RANK.enabled:
            SURVIVING_RANK.runs.append(self)

    def close(self) -> None:
        """Write the memory and end rows and leave the world; further calls do nothing."""
        if self._ended:
            return
        self._ended = True
        failure = self._end_loop(self.run) if self.run is not None else None
        if self.run is not None:
            self.run.loop.watch.stop()
            otherwise_well = not self.failed
            unwritten = self._last_rows(self.run)
            if unwritten and otherwise_well:
                failure = CheckpointError(unwritten)
        if failure is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(failure.exit_code if isinstance(failure, TuttiError) else 1)
        if not self.failed:
            if ACTIVE.recorder is not None and not self._was_ended():
                ACTIVE.recorder.close()
            if self.run is not None:
                self.run.state.consistency.on_exit(self.run.parallel)
            leave_world()

    def _was_ended(self) -> bool:
        """Whether the rank has failed, or was told to end and left no checkpoint."""
        if self.run is None or self.run.loop.stopping.left:
            return False
        rank_folder = self.run.output.folder.rank(self.world.rank)
        return any((rank_folder / name).exists() for name in ("error.json", "stopped"))

    def leave(self) -> KeptState:
        """End the run while another rank is lost, without communication, and return the state that this rank has."""
        atexit.unregister(self.close)
        self._ended = self.failed = True
        abandon_world()
        count_anew()
        run = self.run
        if run is None:
            return KeptState(refusal="the run had not begun")
        run.loop.ending.closed = True
        run.loop.watch.stop(wait_s=1.0)
        run.loop.stopping.forget()
        for writer in run.output.writers:
            writer.abandon()
        release_memory()
        marks = run.loop.marks
        kept = KeptState(refusal="the run keeps no state in memory") if marks is None else marks.keep()
        self._last_rows(run)
        _remove_hooks(run)
        return kept

    def _end_loop(self, run: Run) -> Exception | None:
        """End what the script has left open; return what failed, after saying so."""
        ending = run.loop.ending
        ending.closed = True
        failure = ending.failure
        ended_well = not self.failed and not run.loop.stopping.left
        ended_well = ended_well and not self._was_ended()
        if failure is None and ended_well:
            try:
                settle_updates(run)
                self.before_end()
            except Exception as error:
                failure = error
        if failure is not None:
            self.failed = True
            print(plain_text(f"tutti: {failure}"), file=sys.stderr)
        elif ended_well and ending.left_at == run.state.progress.step and _unsaved(run):
            run.output.screen.say(
                f"the loop over job.epochs was left at step {ending.left_at}, so no checkpoint of the end was written; "
                "leave it with `if job.should_stop(condition): break`, or call job.save()"
            )
        elif ended_well and run.output.checkpoints.due is not None:
            run.output.screen.say(
                f"the checkpoint that was due after step {run.output.checkpoints.due} was not written, as the loop "
                "ended there; call job.save() at the end"
            )
        return failure

    def _last_rows(self, run: Run) -> str | None:
        """Write the rows of the end; return what kept the last checkpoint from being written, if anything did."""
        if all(pending.ready for pending in run.loop.accumulation.pending):  # a device that hangs would hang this, too
            with suppress(Exception):  # the run has failed in another way already
                settle_updates(run)
        rank_folder = run.output.folder.rank(run.parallel.world.rank)
        self.failed = self.failed or (rank_folder / "error.json").exists()
        if run.output.memory is not None and self.failed:  # its ranks may be lost
            run.output.memory.abandon()
        elif run.output.memory is not None:
            run.output.memory.finish_at_exit()
        failure = run.output.checkpoints.finish_at_exit()
        if failure is not None:
            self.failed = True
            print(plain_text(f"tutti: {failure}"), file=sys.stderr)
        unsent = run.output.checkpoints.finish_uploads()
        if unsent is not None:
            print(plain_text(f"tutti: {unsent}"), file=sys.stderr)
            if not run.loop.stopping.left:  # a run that was stopped goes on from the checkpoint in its folder
                self.failed, failure = True, failure or unsent
        if run.output.profile is not None:
            self._end_profile(run, run.output.profile)
        wall, phases = run.loop.clock.take_row()
        now = run.loop.clock.elapsed_s()
        memory = {
            "step": run.state.progress.step,
            "rank": run.parallel.world.rank,
            "device": str(run.parallel.world.device),
            "peak_nbytes": peak_memory_nbytes(run.parallel.world.device),
        }
        run.output.log.timing(kind="memory", **memory)
        clock = run.loop.clock
        busy, own = clock.host_use.shares()
        machine = {"stolen": clock.stolen.share(), "energy_j": clock.energy.joules(), "busy": busy, "own": own}
        run.output.log.timing(kind="machine", step=run.state.progress.step, **machine)
        run.output.log.row("memory", now, **memory)
        stopped = run.loop.stopping.left or (rank_folder / "stopped").exists()
        status = "failed" if self.failed else "stopped" if stopped else "completed"
        run.output.log.row("end", now, status=status, step=run.state.progress.step, wall_s=wall, phases=phases)
        run.output.log.close(failed=self.failed)
        run.output.screen.close()
        return failure

    def _end_profile(self, run: Run, profile: StepProfile) -> None:
        """Write a profile whose steps the run has not all made, and say what there is."""
        profile.close()
        files = ", ".join(sorted(file.name for file in profile.folder.glob(f"rank-{run.parallel.world.rank}.*")))
        where = f" in {profile.folder} ({files}); open a trace in https://ui.perfetto.dev" if files else ""
        run.output.screen.say(f"profile: {profile.outcome}{where}")

    def _on_exception_in_thread(self, arguments: threading.ExceptHookArgs) -> None:
        """End the process if the run's watch found it waiting for nothing: the main thread cannot."""
        if not isinstance(arguments.exc_value, TuttiError):
            threading.__excepthook__(arguments)
            return
        if self.world.is_main:
            print(plain_text(f"tutti: {arguments.exc_value}"), file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(arguments.exc_value.exit_code)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.failed = True
        if not isinstance(error, TuttiError):
            sys.__excepthook__(kind, error, trace)
            return
        if self.world.is_main or (self.run is not None and self.run.state.consistency.asynchronous):
            print(plain_text(f"tutti: {error}"), file=sys.stderr)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)


def _remove_hooks(run: Run) -> None:
    """Remove the hooks of gradients: torch 2.13 never frees a parameter that its own hook refers to."""
    for parameter in run.parallel.model.parameters():
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            if hooks:
                hooks.clear()
        parameter.grad = None


def _unsaved(run: Run) -> bool:
    """Whether the run keeps checkpoints, and has begun none at its last step."""
    return run.settings.keep_checkpoints > 0 and run.output.checkpoints.begun_at != run.state.progress.step


def peak_memory_nbytes(device: torch.device) -> int:
    """Return this rank's peak memory: allocated on an accelerator; on a CPU resident, without others' shared memory."""
    if device.type != "cpu":
        return accelerator_peak_nbytes(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - attached_resident_nbytes()
