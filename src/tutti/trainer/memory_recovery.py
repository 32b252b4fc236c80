"""A run that goes on after the loss of a rank, from the state that a surviving rank has in memory."""

from typing import Any

from tutti.checkpoint.memory_state import MemoryState, load_from_memory
from tutti.environment import LaunchOptions
from tutti.surviving_rank import SURVIVING_RANK
from tutti.trainer.generator_file import GeneratorFile, lost_generators
from tutti.trainer.memory_marks import MemoryMarks
from tutti.trainer.out_of_memory import resume_microbatches
from tutti.trainer.run_state import Run


def recover_from_memory(run: Run, options: LaunchOptions) -> None:
    """Put the state that one of the ranks has in memory into the prepared run. Collective.

    Args:
        run: the prepared run.
        options: which rank has it, after which step.

    Raises:
        CheckpointError: on every rank, if the state does not fit.
    """
    assert options.recover_from is not None
    (holder, step), kept = options.recover_from, SURVIVING_RANK.kept
    has_it = kept is not None and kept.state is not None and kept.step == step
    own: MemoryState | None = kept.state if kept is not None and has_it else None

    def generators(of_holder: dict[str, Any]) -> dict[str, Any]:
        if own is not None:
            return dict(own.run_state["generators"][0])
        lost = options.lost_generators
        return of_holder if lost is None else lost_generators(lost, step, of_holder)

    load_from_memory(run.state, own, holder, generators, run.output.screen.say)
    resume_microbatches(run)
    rows = run.parallel.world.gather(kept.rows if kept is not None and run.parallel.world.rank == holder else [])
    run.output.log.add_missing(rows[holder], step)


def begin_marks(run: Run, options: LaunchOptions) -> None:
    """Let the run mark where it can go on from memory, if its ranks have their whole state there.

    Args:
        run: the prepared run.
        options: the launcher's.
    """
    marks = MemoryMarks(run, GeneratorFile(options.generators))
    run.loop.marks = marks
    run.output.log.keep_recent()
    marks.mark()
    SURVIVING_RANK.kept = None
