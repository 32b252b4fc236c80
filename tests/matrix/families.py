"""What a row of the matrix is, and the rows by name. Instances are tiny: a step takes milliseconds."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from against_one import Subject

SAMPLES = 20
"""Of every data set: with batches of 8, every third step has a short batch."""

ADAM = partial(torch.optim.AdamW, eps=1e-3, weight_decay=0.1)
"""Adam whose epsilon keeps gradients that are zero but for rounding (a key's bias) from being blown up to a step."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row. `blocks`: glob over the modules that a plan may recompute; `cuts`: where stages begin, by their number
    (none: found by tutti); `loose`: how much more rounding than a shallow network it accumulates.
    """

    name: str
    subject: Callable[[], Subject]
    blocks: str
    cuts: dict[int, tuple[str, ...]] | None = None
    loose: float = 1.0


class Rows(Dataset[Any]):
    """Samples cut from whole tensors: (inputs, target), where inputs may be a dict of tensors."""

    def __init__(self, inputs: Any, target: Tensor) -> None:
        self.inputs, self.target = inputs, target

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.inputs, dict):
            return {name: value[index] for name, value in self.inputs.items()}, self.target[index]
        return self.inputs[index], self.target[index]


def seeded() -> torch.Generator:
    """The generator of a family's data."""
    return torch.Generator().manual_seed(20)


def numbers(*shape: int) -> Tensor:
    """Normal numbers for SAMPLES samples."""
    return torch.randn(SAMPLES, *shape, generator=seeded())


def words(vocabulary: int, *shape: int) -> Tensor:
    """Token numbers for SAMPLES samples."""
    return torch.randint(vocabulary, (SAMPLES, *shape), generator=seeded())


def subject(model: Callable[[], nn.Module], inputs: Any, target: Tensor, loss_fn: Any, **changes: Any) -> Subject:
    """A subject with the matrix' own settings: Adam, clipping, batches of 8."""
    settings: dict[str, Any] = {"optimizer": ADAM, "rate": 0.02, "job": {"clip_norm": 0.5}, **changes}
    return Subject(model=model, data=Rows(inputs, target), loss_fn=loss_fn, **settings)


def token_loss(output: Any, target: Tensor) -> Tensor:
    """Mean cross-entropy of every token (or pixel, dims after the classes) of logits, or of an output with `logits`."""
    logits = output if isinstance(output, Tensor) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def class_loss(output: Any, target: Tensor) -> Tensor:
    """Mean cross-entropy of one class a sample."""
    return nn.functional.cross_entropy(output if isinstance(output, Tensor) else output.logits, target)


def families() -> dict[str, Family]:
    """Every row by its name, in the order of the page."""
    from matrix import language, mixtures, pretrained_shapes, recommend, vision, volumes

    parts = (vision, language, pretrained_shapes, mixtures, recommend, volumes)
    return {family.name: family for part in parts for family in part.FAMILIES}
