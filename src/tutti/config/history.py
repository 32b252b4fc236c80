"""History: predictions beside measurements of all runs in some folders, and how far the predictor has been off."""

from dataclasses import dataclass

from tutti.config.quantity import Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One run: predicted and measured step time and memory of the fullest rank. Errors: (predicted - measured) /
    measured. `cluster`: the name of what it was predicted for; `within`: whether the step is in its interval."""

    name: str
    folder: str
    started_utc: str
    script: str
    cluster: str
    plan: str
    ranks: Quantity
    predicted_step: Quantity
    measured_step: Quantity
    step_error: Quantity
    within: bool | None
    memory_error: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """How far predictions for one cluster were off, or for all of them where `cluster` is empty. `median`, `ninetieth`:
    of the sizes of errors; `bias`: the median error with its sign, below 0 where runs took longer than predicted."""

    cluster: str
    runs: int
    median: Quantity
    ninetieth: Quantity
    bias: Quantity
    within: int
    memory_median: Quantity
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Runs in the order in which they began; `trust` of all of them first, then by cluster where there are several.
    `left_out`: in words, run folders without a prediction or a step."""

    entries: tuple[HistoryEntry, ...]
    trust: tuple[Trust, ...]
    left_out: tuple[str, ...] = ()
    version: int = 1
