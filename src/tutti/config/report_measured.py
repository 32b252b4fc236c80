"""Parts of a RunReport that are known once it ran: quality, time, memory, communication, errors of predictions."""

from dataclasses import dataclass, field
from typing import Literal

from tutti.config.prediction import Phase
from tutti.config.quantity import Quantity, Split
from tutti.config.words import Carried


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityReport:
    """The quality reached, on data that was not trained on where the run evaluated such.

    `selection`: "last" is the last evaluation, "best" the best of all of them. `eval_every_samples`: samples trained
    on between two evaluations.
    """

    name: str = ""
    metric: str = ""
    split: Split = "other"
    higher_is_better: bool = True
    test_value: Quantity = Quantity()
    best_value: Quantity = Quantity()
    target: Quantity = Quantity()
    reached: bool | None = None
    reference_value: Quantity = Quantity()
    selection: Literal["last", "best"] = "last"
    eval_every_samples: Quantity = Quantity(unit="samples")
    eval_samples: Quantity = Quantity(unit="samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeReport:
    """Where the time went. `breakdown` is rank 0's; `accounted` is its sum over `wall`, 1 when it adds up.

    `wall`: from the start of prepare to the end, over all generations of a resumed run. `startup`: how long it took
    until the first step, by part.
    `per_step` is the median of the steady steps; its note says which steps those are.
    """

    wall: Quantity
    breakdown: dict[Phase, Quantity]
    accounted: Quantity
    per_step: Quantity
    step_phases: dict[Phase, Quantity] = field(default_factory=dict)
    load_wait: Quantity = Quantity(unit="s")
    startup: dict[str, Quantity] = field(default_factory=dict)
    generations: Quantity = Quantity()
    repeated_steps: Quantity = Quantity()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsReport:
    """Work and rates. `model_per_sample`: forward and backward, by `formula`; `peak_fraction`: of the dense peak."""

    model_per_sample: Quantity = Quantity(unit="FLOP")
    formula: str = ""
    dtype: str | None = None
    counts_recompute: bool = False
    sparsity: Literal["dense", "sparse"] = "dense"
    rate: Quantity = Quantity(unit="FLOP/s")
    peak: Quantity = Quantity(unit="FLOP/s")
    peak_fraction: Quantity = Quantity(unit="ratio")
    to_target: Quantity = Quantity(unit="FLOP")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReport:
    """What it took to reach the target quality the first time; null where there is no target or it was missed."""

    time: Quantity = Quantity(unit="s")
    steps: Quantity = Quantity(unit="steps")
    epochs: Quantity = Quantity(unit="epochs")
    samples: Quantity = Quantity(unit="samples")
    device_seconds: Quantity = Quantity(unit="device s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionCheck:
    """One predicted number beside the measured one. `error`: (predicted - measured) / measured."""

    name: str
    predicted: Quantity
    measured: Quantity
    error: Quantity
    within: bool | None  # whether the measured value lies in the predicted interval


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank: where it ran, its peak memory and its time by phase over the run (evaluation is in rank 0's). `stolen`:
    which part of its host's core time a hypervisor gave to other machines meanwhile.
    """

    rank: int
    host: str
    device: str
    device_model: str
    threads: Quantity
    peak_memory: Quantity
    breakdown: dict[Phase, Quantity]
    stolen: Quantity = Quantity(unit="ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationReport:
    """One kind of exchange over some axes of the mesh, in a step of rank 0.

    `sent`: by rank 0; `under_way`: seconds in which an exchange had begun and was not known to have ended; `exposed`:
    seconds that rank 0 waited, `exposed_in` by phase; `hidden`: the part of `under_way` in which it did not wait.
    """

    axes: str
    carried: Carried
    exchanges: Quantity
    sent: Quantity
    under_way: Quantity
    exposed: Quantity
    exposed_in: dict[Phase, Quantity]
    hidden: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsReport:
    """A mixture of experts over the run: choices of tokens, those that found no room and their share, and the
    load-balancing loss of a step (1 when balanced). `name`: the module's.
    """

    name: str
    assigned: Quantity
    dropped: Quantity
    share: Quantity
    balance_loss: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseReport:
    """The gradient noise scale, measured while training, in the batch's unit: means over the later half of the run.

    `critical_batch`: at which twice the least samples are needed, taken to be the noise scale. `square`: of the mean
    gradient's norm; `variance`: of the gradient of one unit, its trace; `measured`: in how many steps.
    """

    critical_batch: Quantity
    square: Quantity
    variance: Quantity
    measured: Quantity
