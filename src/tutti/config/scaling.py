"""Scaling: the best plan's speed against the number of devices at hand, and where more of them stop paying."""

from dataclasses import dataclass

from tutti.config.prediction import Estimate
from tutti.config.words import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """The best plan with at most `devices` devices, predicted; it uses `used` of them. `worth`: what each device more
    than at the point before brings, of what a device there brings on average. `reason`: why there is no plan."""

    devices: int
    used: int = 0
    plan: str = ""
    step_time_s: Estimate | None = None
    throughput_per_s: float = 0.0
    worth: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    """Samples or tokens a second that a plan on so many devices was measured at."""

    devices: int
    throughput_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCurve:
    """`pays_until`: the most devices up to which each one added is worth `least_worth` of those before (assumed);
    0 where no number of devices has a plan. `sentence`: the same in words."""

    unit: Unit
    points: tuple[ScalingPoint, ...]
    pays_until: int
    least_worth: float
    sentence: str
    measured: tuple[MeasuredPoint, ...] = ()
    version: int = 1
