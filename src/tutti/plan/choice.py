"""What a planner is asked and what it answers: Request, Alternative, Choice. Plain data, as all specs."""

from dataclasses import dataclass
from typing import Literal

from tutti.errors import PlanError
from tutti.spec.plan import Plan
from tutti.spec.prediction import Prediction
from tutti.spec.words import Precision

PrecisionPolicy = Literal["script", "auto"] | Precision
"""script: keep what the script asks for; auto: choose by predicted time; else exactly this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What may vary. `script`: the plan the script's Job implies on one device: its batch, precision, layout, sync.

    `max_devices`: ranks to use at most; `degree`: exactly so many. `allow_microbatches`: num_microbatches may
    change even where that changes results (a model with batch statistics). `keep_microbatches`: it may not change
    at all.
    """

    script: Plan
    max_devices: int | None = None
    degree: int | None = None
    precision: PrecisionPolicy = "script"
    allow_microbatches: bool = False
    keep_microbatches: bool = False

    def __post_init__(self) -> None:
        for name, value in (("max_devices", self.max_devices), ("degree", self.degree)):
            if value is not None and value < 1:
                raise PlanError(f"{name} = {value}; give a number of 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that was not chosen, and why, in words. No prediction where it cannot be costed."""

    plan: Plan
    prediction: Prediction | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan chosen, its prediction, and the others, the fastest first. `remarks`: the choice in plain words."""

    model: str
    cluster: str
    request: Request
    best: Plan
    prediction: Prediction
    alternatives: tuple[Alternative, ...]
    remarks: tuple[str, ...] = ()
    version: int = 1
