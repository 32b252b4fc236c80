"""The verdict of `tutti verify`: whether N ranks compute what one device computes, and where they first differ."""

from dataclasses import dataclass
from typing import Literal

Stage = Literal[
    "seed",
    "batch size",
    "initial state",
    "data order",
    "input",
    "forward",
    "loss",
    "gradient",
    "hyper-parameter",
    "learning rate",
    "gradient used",
    "parameter",
    "buffer",
    "optimizer state",
    "between steps",
    "evaluation",
]
"""What was compared, in the order of a step.

- gradient: averaged over the global batch.
- gradient used: as the optimizer found it.
- between steps: parameters, buffers and optimizer state when the next step began.
- evaluation: results of an evaluation.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How far one tensor is from that of one device.

    Attributes:
        step: counted from 1; 0 is before the first.
        module: dotted name; "" where the tensor belongs to no module.
        relative_difference: largest difference of an element, divided by the tensor's root mean square; None where the
            two cannot be subtracted because one is missing or has another shape.
        ranks: ranks whose values differ; empty for all together.
    """

    stage: Stage
    step: int
    module: str = ""
    tensor: str
    relative_difference: float | None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The likely cause of a difference, and the remedy. `kind` is a short name that programs may rely on."""

    kind: str
    sentence: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a verification.

    Attributes:
        passed: no tensor differs by more than `tolerance`, relative to its root mean square.
        comparable: whether what differs can be judged. It cannot where ranks and one device draw different random
            numbers; such a verdict has not passed either.
        arithmetic: number format of the computation.
        compared: number of tensors compared.
        largest: the largest difference within the tolerance.
        first: the first difference beyond it.
        notes: what was not compared, and why.
    """

    passed: bool
    sentence: str
    script: str
    world_size: int
    steps: int
    arithmetic: str
    tolerance: float
    compared: int = 0
    largest: TensorDifference | None = None
    first: TensorDifference | None = None
    cause: Cause | None = None
    notes: tuple[str, ...] = ()
    comparable: bool = True
    version: int = 1
