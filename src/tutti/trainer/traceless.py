"""Computes the model once more and leaves no trace in its modules, the loss or the generators of random numbers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tutti.data.seeds import preserved_generators
from tutti.trainer.restored_values import SavedContainers, SavedGenerators, SavedTensors
from tutti.trainer.script_state import ScriptState


@contextmanager
def untouched(model: nn.Module, functions: Iterable[Any] = ()) -> Iterator[None]:
    """On exit, restore every module's attributes, buffers, lists and modes, what `functions` keep, and all generators.

    Args:
        model: the model.
        functions: of the script: its loss function and hooks.
    """
    modules = [*model.modules()]
    saved = [_SavedModule(module) for module in modules]
    script = ScriptState(functions, {*map(id, modules)})
    devices = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    with preserved_generators(), torch.random.fork_rng(devices=sorted(devices), enabled=bool(devices)):
        try:
            yield
        finally:
            for state in saved:
                state.restore()
            script.restore()


@contextmanager
def own_generators_kept(model: nn.Module, functions: Iterable[Any] = ()) -> Iterator[None]:
    """On exit, set back the generators that modules and `functions` keep for themselves; meanwhile they go on.

    Within several computations, so that a model which draws from them is seen to be random.
    """
    modules = [*model.modules()]
    values = [value for module in modules for value in vars(module).values()]
    saved = SavedGenerators([*values, *ScriptState(functions, {*map(id, modules)}).values])
    try:
        yield
    finally:
        saved.restore()


_OF_TORCH = frozenset(vars(nn.Module()))


class _SavedModule:
    """The attributes of one module, by value where forward may change them in place."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(module.__dict__)
        self.buffers = dict(module._buffers)
        own = [value for name, value in self.attributes.items() if name not in _OF_TORCH]
        self.containers = SavedContainers(own)
        self.tensors = SavedTensors([*own, *self.buffers.values()])

    def restore(self) -> None:
        """Put back what forward has changed."""
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        self.containers.restore()
        self.tensors.restore()
