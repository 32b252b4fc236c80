"""What autograd saves of parameters that FSDP2 has gathered, and may have freed when backward comes to it.

FSDP2 gathers a unit again when backward reaches the output of its module. Backward may reach it otherwise: through what
a hook or an attribute keeps of the inside, or through an output that FSDP2 does not look into.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tutti.errors import ScriptError
from tutti.parallel.sharding.fsdp2_model import FsdpModel, FsdpUnit
from tutti.parallel.sharding.saved_weights import SavedTensorHooks, WeightKeeper


@dataclass(frozen=True, slots=True, eq=False)
class SavedFsdpWeight:
    """A tensor in the memory of a gathered unit, saved in step number `step`."""

    tensor: torch.Tensor
    unit: FsdpUnit
    step: int


class FsdpSavedWeights(WeightKeeper):
    """Gathers a unit again where backward needs what autograd saved of it.

    Args:
        sharded: the model.

    Attributes:
        step: counts the steps, after each of which the parameters change.
    """

    def __init__(self, sharded: FsdpModel) -> None:
        self.step = 0
        self._sharded = sharded
        self._hooks = SavedTensorHooks(self._pack, self._unpack)

    def begin_step(self) -> None:
        """Notice weights until the step ends."""
        self._hooks.clear()
        self._hooks.push_for_step()

    def end_step(self) -> None:
        """The parameters change now."""
        self._hooks.clear()
        self.step += 1

    def push(self) -> bool:
        """Notice weights until `pop`, unless that is done already; returns whether `pop` must be called."""
        return self._hooks.push()

    def pop(self) -> None:
        self._hooks.pop()

    def _pack(self, tensor: torch.Tensor) -> Any:
        unit = self._sharded.unit_of_memory(tensor)
        return tensor if unit is None else SavedFsdpWeight(tensor, unit, self.step)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, SavedFsdpWeight):
            return saved  # type: ignore[no-any-return]
        if saved.step != self.step and any(parameter.trained for parameter in saved.unit.parameters):
            raise ScriptError(
                f"backward reached {saved.unit.name or 'the model'!r} through what an earlier step computed with "
                "parameters that have been updated since; detach what is carried from step to step"
            )
        self._sharded.gather(saved.unit)
        return saved.tensor
