"""Observers of a run. Verification records a run through one, so the run need not know how."""

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from tutti.checkpoint.training_state import TrainingState
from tutti.comm.world import World
from tutti.data.batches import BatchShare
from tutti.data.samples import DataSource
from tutti.environment import read_launch_options
from tutti.errors import LaunchError


class StopRun(SystemExit):
    """Raised by an observer that needs no further steps: the script ends early, with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


LossOfBatch = Callable[[nn.Module, Any], Any]
MetricFunction = Callable[[Any, Any], Any]


class JobProgram(Protocol):
    """What the methods of a Job do: they train and evaluate the model as docs/updates.md says."""

    def forward_backward(self, function: LossOfBatch, batch: Any, zeroed: tuple[Optimizer, ...] | None) -> float:
        """Add the gradient of the global mean loss to every parameter's `grad`; return the loss."""

    def update(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Clip the gradients, step the optimizers, and advance their schedulers."""

    def schedule(self, metric: float) -> None:
        """Advance the schedulers that follow a metric."""

    def epoch_ended(self, epochs: int) -> None:
        """Advance the schedulers that count epochs; `epochs` have ended."""

    def evaluate(
        self,
        source: DataSource,
        metrics: Mapping[str, MetricFunction],
        whole: Mapping[str, MetricFunction],
        batch_size: int | None,
    ) -> tuple[dict[str, float], int]:
        """Return the mean loss and metrics over all samples, and the number of samples."""


class Observer(Protocol):
    """Receives the events of a run, in this order; the per-step events come in every step (counted from 0)."""

    def built(self, model: nn.Module, world: World) -> None:
        """The script has built the model. It is on this rank's device, and not yet made equal between ranks."""

    def sampled(self, batch: Any) -> Any:
        """Receive a few samples, on the device, with which the model is traced; return what to trace it with."""

    def prepared(self, training: TrainingState) -> None:
        """Model, optimizers and loader are ready; no step has run."""

    def loaded(self, step: int, batch: Any) -> Any:
        """Receive this rank's share of a global batch as the script passed it to a step; return what to use."""

    def microbatch(self, step: int, index: int, share: BatchShare) -> AbstractContextManager[Any]:
        """Return a context that is entered around forward, loss and backward of one microbatch."""

    def loss(self, value: Any) -> None:
        """Receive a microbatch's loss, as the script's function returned it."""

    def program(self, run: Any) -> JobProgram | None:
        """Return a program that takes the place of tutti's own step; None to leave that. Called after `prepared`."""

    def gradients(self, step: int, loss: float) -> None:
        """Gradients are those of the global batch, of which this is the loss, and not yet clipped."""

    def updated(self, step: int, loss: float, learning_rate: float) -> None:
        """The optimizer has stepped, and the step's row is written.

        Args:
            step: number of the step, from 0.
            loss: global loss of the step.
            learning_rate: rate of the first optimizer's first group.
        """

    def evaluated(self, step: int, name: str, values: dict[str, float]) -> None:
        """The script has evaluated the model after `step` updates, on the data called `name`."""


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

    def program(self, run: Any) -> JobProgram | None:
        return None

    def gradients(self, step: int, loss: float) -> None:
        pass

    def updated(self, step: int, loss: float, learning_rate: float) -> None:
        pass

    def evaluated(self, step: int, name: str, values: dict[str, float]) -> None:
        pass


class StopAfterSteps(NullObserver):
    """Ends the run after `steps` steps; used to measure step times."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def updated(self, step: int, loss: float, learning_rate: float) -> None:
        if step + 1 >= self.steps:
            raise StopRun


def stop_after_steps() -> StopAfterSteps:
    """Return the observer for TUTTI_OBSERVER=tutti.trainer.observer:stop_after_steps, with TUTTI_STEPS steps."""
    steps = read_launch_options().steps
    if steps is None:
        raise LaunchError(
            "TUTTI_OBSERVER asks for a run of a few steps, but TUTTI_STEPS is not set; set it to the number of steps"
        )
    return StopAfterSteps(steps)


def load_observer(name: str | None) -> Observer:
    """Call the factory "module:factory" and return its observer; without a name, return one that does nothing.

    Raises:
        LaunchError: the factory cannot be imported.
    """
    if not name:
        return NullObserver()
    module, _, factory = name.partition(":")
    try:
        return getattr(importlib.import_module(module), factory)()  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise LaunchError(f"TUTTI_OBSERVER={name!r} cannot be loaded ({error}); unset it") from None
