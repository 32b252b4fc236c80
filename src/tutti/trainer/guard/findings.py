"""When the guard's checks run, and how a warning reaches the terminal and the report."""

from tutti.config.vocabulary import AxisName
from tutti.trainer.observer import NullObserver
from tutti.trainer.run_state import Run

FIRST_STEPS = (1, 2, 3, 10, 100)
"""Steps that are checked, from 1, beside every 1000th."""

_DIVIDING: tuple[AxisName, ...] = ("split", "stage", "expert", "table", "space", "context")


def is_due(step: int) -> bool:
    """Return whether ranks are compared before this step, counted from 1."""
    return step in FIRST_STEPS or step % 1000 == 0


def is_guarded(run: Run) -> bool:
    """Return whether replicas are equal in every step; an observer, such as that of verify, compares them itself."""
    compressor = run.parallel.replica.compressor
    differs = compressor is not None and compressor.momentum_compression is not None  # between exchanges
    return run.parallel.plan.sync.mode == "synchronous" and not differs and isinstance(run.loop.observer, NullObserver)


def has_whole_modules(run: Run) -> bool:
    """Return whether all ranks have the modules that the script built; sharding may divide their parameters."""
    return run.parallel.mesh.degree(*_DIVIDING) == 1


def model_is_local(run: Run) -> bool:
    """Return whether a rank can compute the model without the others."""
    sharded = run.parallel.mesh.degree("shard") > 1 and run.parallel.plan.sharding.level > 1
    return has_whole_modules(run) and not sharded


def warn(run: Run, sentence: str) -> None:
    """Say a warning once, in the terminal and in the run's metrics, from which the report has it."""
    state = run.loop.guard
    if sentence in state.said:
        return
    state.said.add(sentence)
    run.output.screen.say(f"warning: {sentence}")
    run.output.log.row("guard", run.loop.clock.elapsed_s(), step=run.state.progress.step + 1, sentence=sentence)
