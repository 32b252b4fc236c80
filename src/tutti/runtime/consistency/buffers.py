"""Buffers that training moves (running statistics): averaged whenever replicas exchange, in every mode."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tutti.runtime.consistency.vectors import Replicas, Vectors


class Buffers:
    """The floating-point buffers of a model that go into its state_dict. Those that no replica has changed stay out:
    they are equal already, and may hold infinities (masks).
    """

    def __init__(self, model: nn.Module, replicas: Replicas) -> None:
        self._model, self._replicas = model, replicas
        tracked = set(_tracked(model))
        self._seen = {name: (one, one._version) for name, one in self._now().items() if name not in tracked}

    def moved(self) -> Vectors:
        """Those that some replica has changed. Collective where the model has any."""
        now = self._now()
        flags = [name not in self._seen or _changed(tensor, *self._seen[name]) for name, tensor in now.items()]
        if not flags:
            return Vectors(())
        device = next(iter(now.values())).device
        anywhere = self._replicas.gather(torch.tensor(flags, dtype=torch.uint8, device=device)).amax(0).tolist()
        return Vectors((name, tensor) for (name, tensor), flag in zip(now.items(), anywhere, strict=True) if flag)

    def called(self, names: list[str]) -> Vectors:
        """Those of these names, which some replica has changed before."""
        now = self._now()
        for name in names:
            self._seen.pop(name, None)
        return Vectors((name, now[name]) for name in names)

    def average(self) -> None:
        """Give those that were changed their mean over the replicas."""
        moved = self.moved()
        moved.write(self._replicas.mean(moved.read()))

    def _now(self) -> dict[str, torch.Tensor]:
        persistent = set(self._model.state_dict(keep_vars=True))
        named = ((name, tensor) for name, tensor in self._model.named_buffers() if name in persistent)
        return {name: tensor for name, tensor in named if tensor.is_floating_point()}


def _tracked(model: nn.Module) -> Iterator[str]:
    """Running statistics of torch's own norms, whose kernels write to them without a trace."""
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase):
            yield from (f"{prefix}.{name}" if prefix else name for name in module._buffers)


def _changed(tensor: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    """Whether a buffer is another tensor than at the beginning, or has been written to."""
    return tensor is not before or tensor._version != version
