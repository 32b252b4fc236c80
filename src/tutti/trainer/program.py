"""The program that a Job runs unless an observer puts another in its place: tutti's own step."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from tutti.data.samples import DataSource
from tutti.parallel.data.replicate import LossFunction
from tutti.trainer.evaluate import Metric, evaluate, samples_at_once
from tutti.trainer.guard import guard_evaluation
from tutti.trainer.run_state import Run
from tutti.trainer.step import forward_backward
from tutti.trainer.update import make_update


class OwnProgram:
    """tutti's own step, on any number of ranks. Its methods are collective.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def forward_backward(self, function: LossFunction, batch: Any, zeroed: tuple[Optimizer, ...] | None) -> float:
        return forward_backward(self.run, function, batch, zeroed).loss

    def update(self, optimizers: tuple[Optimizer, ...]) -> None:
        make_update(self.run, optimizers)

    def schedule(self, metric: float) -> None:
        self.run.state.schedules.measured(metric)

    def epoch_ended(self, epochs: int) -> None:
        self.run.state.schedules.epoch_ended(epochs)

    def evaluate(
        self, source: DataSource, metrics: Mapping[str, Metric], whole: Mapping[str, Metric], batch_size: int | None
    ) -> tuple[dict[str, float], int]:
        guard_evaluation(self.run)
        size = batch_size or samples_at_once(self.run)
        with self.run.state.consistency.averaged_model(self.run.parallel):
            return evaluate(self.run, source, metrics, whole, size)
