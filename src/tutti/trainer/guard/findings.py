"""Which models a rank can check by itself, and how a warning reaches the terminal and the report."""

from functools import partial
from types import CodeType
from typing import Any

from tutti.config.vocabulary import AxisName
from tutti.trainer.run_state import Run

_DIVIDING: tuple[AxisName, ...] = ("split", "stage", "expert", "table", "space", "context")


def code_of(function: Any) -> Any:
    """Return the code of a function of the script, which partials and callable objects that are made anew share."""
    code = getattr(function, "__code__", function)  # CountedLoss has what the script gave in its place
    while isinstance(code, partial):
        code = getattr(code.func, "__code__", code.func)
    return code if isinstance(code, CodeType) else getattr(type(code).__call__, "__code__", type(code))


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
