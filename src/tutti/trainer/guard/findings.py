"""Which models a rank can check by itself, how it computes them again, and how a warning reaches the user."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn

from tutti.config.vocabulary import AxisName
from tutti.data.device_copies import to_device
from tutti.data.seeds import seed_device, seed_everything
from tutti.parallel.losses import as_weighted
from tutti.parallel.script_hooks import has_script_hooks, origin_of
from tutti.trainer.run_state import Run
from tutti.trainer.traceless import untouched
from tutti.trainer.whole_weights import whole_model

LossFunction = Callable[[nn.Module, Any], Any]

OTHER_FORWARDS: tuple[AxisName, ...] = ("expert", "table", "space", "context")
_DIVIDING: tuple[AxisName, ...] = ("split", "stage", *OTHER_FORWARDS)

WHOLE_NUMEL = 2**26
"""Models with more parameters are not gathered for a check: 256 MiB in float32, 2 s at 1 Gbit/s."""


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


@contextmanager
def computing_separately(run: Run) -> Iterator[bool]:
    """Let each rank compute the model without the others, with whole weights where it has parts. Collective.

    Yields:
        Whether it can: not under `space`, `context`, `expert` and `table`, nor if the whole model is large.
    """
    if model_is_local(run):
        yield True
    elif run.parallel.mesh.degree(*OTHER_FORWARDS) > 1 or run.parallel.layout.parameters > WHOLE_NUMEL:
        yield False
    else:
        with whole_model(run):
            yield True


def hooked_modules(model: nn.Module) -> list[str] | None:
    """Names of the modules with forward hooks of the script, which may keep what they see; None if one is compiled."""
    if any(module._compiled_call_impl is not None or hasattr(module, "dynamo_ctx") for module in model.modules()):
        return None
    return [name for name, module in model.named_modules() if has_script_hooks(module)]


def kept_by(loss: LossFunction, model: nn.Module) -> list[Any]:
    """The functions of the script whose own state a computation of the loss may change."""
    hooks = (h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
    return [loss, *(hook for hook in hooks if origin_of(hook) == "script")]


def loss_again(
    run: Run,
    loss: LossFunction,
    batch: Any,
    samples: tuple[int, int],
    seed: int,
    quiet: Callable[[nn.Module], bool],
) -> tuple[float, float]:
    """Compute the loss of a few samples and leave no trace of it in the model.

    Args:
        run: the run.
        loss: (model, batch) -> loss.
        batch: the samples.
        samples: their number, and that of the global batch.
        seed: of all generators.
        quiet: which modules are in evaluation mode meanwhile.

    Returns:
        The loss's total and count.
    """
    model, device = run.parallel.model, run.parallel.world.device
    with (
        untouched(model, kept_by(loss, model)),  # each time anew: forward may count its calls
        run.parallel.sequences.part(to_device(batch, device)) as local,
        run.parallel.reads.active(),
    ):
        for module in filter(quiet, model.modules()):
            module.training = False
        seed_everything(seed)
        seed_device(seed, device)
        value = as_weighted(loss(model, local), *samples)
    total, count = (float(torch.as_tensor(number).detach()) for number in (value.total, value.count))
    return total, count


def warn(run: Run, sentence: str) -> None:
    """Say a warning once, in the terminal and in the run's metrics, from which the report has it."""
    state = run.loop.guard
    if sentence in state.said:
        return
    state.said.add(sentence)
    run.output.screen.say(f"warning: {sentence}")
    run.output.log.row("guard", run.loop.clock.elapsed_s(), step=run.state.progress.step + 1, sentence=sentence)
