"""Comparison: several runs side by side, and what may be said of them together."""

from dataclasses import dataclass

from tutti.config.quantity import Quantity
from tutti.config.report import Finding, RunReport, Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One setting that is not the same in all compared runs, as text, one entry a run."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One run against the first one. `refusal` stands in place of a speed-up that may not be stated."""

    name: str
    quality: Quantity
    time: Quantity  # to the target where one is set, else of the whole run
    throughput: Quantity
    device_seconds: Quantity
    speedup: Quantity
    efficiency: Quantity
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several runs side by side; the first is the reference."""

    runs: tuple[RunReport, ...]
    rows: tuple[ComparisonRow, ...]
    differences: tuple[Difference, ...]
    scaling: Scaling | None
    headline: str
    findings: tuple[Finding, ...] = ()
    version: int = 1
