"""A model's parameters, without a walk through its modules in every step."""

from itertools import chain
from operator import is_
from typing import Any

from torch import nn


class ModelParameters:
    """Gives what `model.parameters()` gives now; modules are walked through again where one has changed.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._note()

    def __call__(self) -> list[nn.Parameter]:
        """Return the parameters, in the model's order; a list that is not to be changed."""
        parts = self._parts()
        if len(parts) != len(self._noted) or not all(map(is_, parts, self._noted)):
            self._note()
        return self._parameters

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that require a gradient."""
        return [parameter for parameter in self() if parameter.requires_grad]

    def _note(self) -> None:
        modules = self._model.modules()
        self._entries: list[dict[str, Any]] = [e for module in modules for e in (module._parameters, module._modules)]
        self._noted: list[Any] = self._parts()
        self._parameters = list(self._model.parameters())

    def _parts(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._entries))]
