"""Trials: the best plans of a search, each really run for a few steps, beside what was predicted of them."""

from dataclasses import dataclass

from tutti.config.plan import Plan
from tutti.config.prediction import Estimate
from tutti.config.words import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan that was run. `measured_s`: the median step, of `steps` steps that took `least_s` to `most_s`; None where
    the run failed, with `failure` in words. `folder`: its run folder."""

    plan: Plan
    words: str
    predicted: Estimate
    predicted_throughput_per_s: float
    measured_s: float | None = None
    least_s: float | None = None
    most_s: float | None = None
    measured_throughput_per_s: float | None = None
    steps: int = 0
    folder: str = ""
    failure: str = ""

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        return None if self.measured_s is None else (self.predicted.value - self.measured_s) / self.measured_s

    @property
    def within(self) -> bool | None:
        """Whether the measured step lies in the predicted interval."""
        return None if self.measured_s is None else self.predicted.low <= self.measured_s <= self.predicted.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Plans in the order of their predictions: the first was the choice. `best`: the one that measured fastest, None
    where none ran. `sentence`: what the measurement says of the choice; `load`: cores' worth of other work on this
    machine when it began; `cores`: those there are."""

    trials: tuple[Trial, ...]
    best: int | None
    sentence: str
    unit: Unit
    load: float = 0.0
    cores: int = 1
    version: int = 1

    @property
    def changed(self) -> bool:
        """Whether the measurement chose another plan than the prediction."""
        return self.best not in (None, 0)
