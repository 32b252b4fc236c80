"""Where others may watch a run: verification records it, without the run knowing how."""

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn

from tutti.checkpoint.training_state import TrainingState
from tutti.comm.world import World
from tutti.data.batches import BatchShare
from tutti.environment import read_launch_options
from tutti.errors import LaunchError


class StopRun(SystemExit):
    """Raised by an observer that has seen enough: the script ends early, with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Observer(Protocol):
    """Receives events of a run; called in this order in every step (counted from 0)."""

    def built(self, model: nn.Module, world: World) -> None:
        """The model as this rank's script built it, on its device, before ranks are made equal."""

    def sampled(self, batch: Any) -> Any:
        """A few samples by which the model is followed; returns what to follow it with."""

    def prepared(self, training: TrainingState) -> None:
        """Model, optimizers and loader are ready; no step has run."""

    def loaded(self, step: int, batch: Any) -> Any:
        """This rank's share of a global batch, as the script gave it to a step; returns what to compute with."""

    def microbatch(self, step: int, index: int, share: BatchShare) -> AbstractContextManager[Any]:
        """Around forward, loss and backward of one microbatch."""

    def loss(self, value: Any) -> None:
        """A microbatch's loss, as the script's function returned it."""

    def gradients(self, step: int) -> None:
        """Gradients are averaged over the global batch; not yet clipped."""

    def updated(self, step: int, loss: float, learning_rate: float) -> None:
        """The optimizer has stepped, at `learning_rate` (of its first group); the step's row is written."""


class NullObserver:
    """Observes nothing."""

    def built(self, model: nn.Module, world: World) -> None:
        pass

    def sampled(self, batch: Any) -> Any:
        return batch

    def prepared(self, training: TrainingState) -> None:
        pass

    def loaded(self, step: int, batch: Any) -> Any:
        return batch

    def microbatch(self, step: int, index: int, share: BatchShare) -> AbstractContextManager[Any]:
        return nullcontext()

    def loss(self, value: Any) -> None:
        pass

    def gradients(self, step: int) -> None:
        pass

    def updated(self, step: int, loss: float, learning_rate: float) -> None:
        pass


class StopAfterSteps(NullObserver):
    """Ends the run after `steps` steps, for measuring step times."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def updated(self, step: int, loss: float, learning_rate: float) -> None:
        if step + 1 >= self.steps:
            raise StopRun


def stop_after_steps() -> StopAfterSteps:
    """TUTTI_OBSERVER=tutti.trainer.observer:stop_after_steps, with TUTTI_STEPS steps."""
    steps = read_launch_options().steps
    if steps is None:
        raise LaunchError("TUTTI_OBSERVER asks for a brief run, but TUTTI_STEPS says no number of steps; set it")
    return StopAfterSteps(steps)


def load_observer(name: str | None) -> Observer:
    """The observer made by "module:factory", or Nobody."""
    if not name:
        return NullObserver()
    module, _, factory = name.partition(":")
    try:
        return getattr(importlib.import_module(module), factory)()  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise LaunchError(f"TUTTI_OBSERVER={name!r} cannot be loaded ({error}); unset it") from None
