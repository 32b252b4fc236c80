"""Buffers that training moves (running statistics, counters): made equal whenever replicas exchange, in every mode."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tutti.local_sgd.vectors import Flats, Replicas, Vectors


class Buffers:
    """The buffers of a model that go into its state_dict. Those that no replica has changed stay out: they are equal
    already, and may hold infinities (masks). Replicas agree on the mean of numbers and on the largest of counters.
    """

    def __init__(self, model: nn.Module, replicas: Replicas) -> None:
        self._model, self._replicas = model, replicas
        tracked = set(_tracked(model))
        self._seen = {name: (one, one._version) for name, one in self._now().items() if name not in tracked}

    def moved(self) -> tuple[Vectors, Vectors]:
        """Those that some replica has changed: of floating point, and counters. Collective where the model has any."""
        now = self._now()
        flags = [name not in self._seen or _changed(tensor, *self._seen[name]) for name, tensor in now.items()]
        if not flags:
            return Vectors(()), Vectors(())
        device = next(iter(now.values())).device
        anywhere = self._replicas.gather(torch.tensor(flags, dtype=torch.uint8, device=device)).amax(0).tolist()
        return self.called([name for name, flag in zip(now, anywhere, strict=True) if flag])

    def called(self, names: list[str]) -> tuple[Vectors, Vectors]:
        """Those of these names: of floating point, and counters. They count as changed from here on."""
        now = self._now()
        for name in names:
            self._seen.pop(name, None)
        numbers = Vectors((name, now[name]) for name in names if now[name].is_floating_point())
        return numbers, Vectors((name, now[name]) for name in names if not now[name].is_floating_point())

    def agreed(self, numbers: Flats, counters: Flats) -> tuple[Flats, Flats]:
        """What replicas agree on, of values that `moved` read. Collective."""
        return self._replicas.mean(numbers), [self._replicas.gather(flat).amax(0) for flat in counters]

    def agree(self) -> None:
        """Make those that were changed equal."""
        numbers, counters = self.moved()
        mean, largest = self.agreed(numbers.read(), counters.read())
        numbers.write(mean)
        counters.write(largest)

    def _now(self) -> dict[str, torch.Tensor]:
        persistent = set(self._model.state_dict(keep_vars=True))
        named = ((name, tensor) for name, tensor in self._model.named_buffers() if name in persistent)
        return {name: tensor for name, tensor in named if not tensor.is_complex()}


def _tracked(model: nn.Module) -> Iterator[str]:
    """Running statistics of torch's own norms, whose kernels write to them without a trace."""
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase):
            yield from (f"{prefix}.{name}" if prefix else name for name in module._buffers)


def _changed(tensor: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    """Whether a buffer is another tensor than at the beginning, or has been written to."""
    return tensor is not before or tensor._version != version
