"""Where a prepared run begins: at a checkpoint in the run folder, in a store or in the memory of the nodes, or anew."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tutti.checkpoint import CheckpointWriter, TrainingState, load_newest, load_weights
from tutti.checkpoint.load import Candidate, name_of_candidate
from tutti.checkpoint.node_memory import KEPT, HeldCheckpoint, NodeMemory
from tutti.checkpoint.retention import Retention
from tutti.checkpoint.save import RowWriter
from tutti.checkpoint.sources import open_checkpoint, shared_source
from tutti.checkpoint.uploads import store_of
from tutti.config.run_folder import RunFolder
from tutti.environment import LaunchOptions
from tutti.errors import DamagedCheckpointError
from tutti.trainer.job_context import JobContext
from tutti.trainer.out_of_memory import resume_microbatches
from tutti.trainer.run_state import Run

_USED: set[Path] = set()
"""Folders of checkpoints in memory that a Job of this process has."""


def release_memory() -> None:
    """The script runs again in this process: its Job may have the folder."""
    _USED.clear()


def memory_writer(
    state: TrainingState, folder: RunFolder, options: LaunchOptions, write_row: RowWriter, say: Callable[[str], None]
) -> CheckpointWriter | None:
    """Return what saves checkpoints in the nodes' memory; None where the launcher does not ask for it. Collective.

    They are of the script's first Job: another one would go on from them.

    Args:
        state: the state to save.
        folder: the run folder.
        options: the launcher's.
        write_row: is called with the fields of the row about a checkpoint.
        say: is called with sentences for the user.
    """
    if options.memory_checkpoints is None or options.recording is not None:
        return None
    if options.memory_checkpoints in _USED:
        say("checkpoints in memory are of the script's first Job alone; this one has none there")
        return None
    _USED.add(options.memory_checkpoints)
    return CheckpointWriter(
        state,
        folder,
        every=options.memory_checkpoint_every,
        retention=Retention(keep=KEPT),
        write_row=write_row,
        say=say,
        place=NodeMemory(state.parallel.world, options.memory_checkpoints),
    )


def resume_run(run: Run, context: JobContext, weights: Path | None) -> Candidate | None:
    """Load the checkpoint that the run goes on from, and return it; without one, load `weights`, if given. Collective.

    Raises:
        CheckpointError: on every rank, if it cannot be read or does not fit.
    """
    place, memory = context.resumed, None if run.output.memory is None else run.output.memory.place
    assert memory is None or isinstance(memory, NodeMemory)
    loaded = None
    if place is not None or (memory is not None and memory.held()):
        loaded = _load(run, context, place, memory)
    if memory is not None:
        memory.forget_newer(run.state.progress.step)
    if loaded is None:
        if weights is not None:
            load_weights(run.state, weights)
        run.state.consistency.begin(run.parallel, run.state.progress.step)
    return loaded


def _load(run: Run, context: JobContext, place: Path | str | None, memory: NodeMemory | None) -> Candidate | None:
    """Load the newest sound checkpoint; None where there are only damaged ones in memory."""
    state, writer, say, world = run.state, run.output.checkpoints, run.output.screen.say, run.parallel.world
    path, folder = place if isinstance(place, Path) else None, run.output.folder.checkpoints
    store = None
    if place is not None and (context.settings.checkpoint_store != "none" or path is None):
        store = store_of(world, place)
    patient = context.launch_options.restarted
    try:
        checkpoint, passed_over = load_newest(
            state, path, say, store=store, folder=folder, patient=patient, memory=memory
        )
    except DamagedCheckpointError as error:
        if place is not None:
            raise
        say(f"{error}; the run begins again")
        return None
    writer.retention.passed_over = {old for old in passed_over if isinstance(old, Path)}
    if writer.uploads is not None:
        writer.uploads.passed_over = {old for old in passed_over if isinstance(old, str)}
    resume_microbatches(run)
    damaged = {old: "" if isinstance(old, HeldCheckpoint) else ", which is damaged" for old in passed_over}
    why = "".join(
        f"; passed over {name_of_candidate(old)}{damaged[old]}: {found}" for old, found in passed_over.items()
    )
    state.resumed_from = name_of_candidate(checkpoint)
    if isinstance(checkpoint, HeldCheckpoint):
        assert memory is not None
        state.reopen = partial(memory.reopen, checkpoint)
        say(f"resumed from {checkpoint.name}{why}")
    elif isinstance(checkpoint, Path):
        state.resumed_from, state.reopen = str(checkpoint), partial(shared_source, world, checkpoint, open_checkpoint)
        say(f"resumed from {checkpoint} at step {state.progress.step}{why}")
    return checkpoint
