"""The state that a script's loss function keeps outside of the model, so that a call can be undone.

It is what the function reaches by itself: attributes of its object, variables of its closures, and globals that its
code names. Only objects of the script's own classes and modules are looked into, not those of other packages.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from tutti.trainer.restored_values import CONTAINERS, SavedContainers, SavedTensors

_DEPTH = 6
"""How many references away from the function state is looked for."""

_LARGEST_LIST, _LARGEST_TENSOR = 10_000, 2**24
"""Numbers of elements. Larger ones are taken for data, and are not copied."""

_PLAIN = (int, float, complex, str, tuple, torch.Tensor, type(None))
"""Types of values that a script replaces rather than changes."""


class ScriptState:
    """What functions of the script keep, as it is now.

    Args:
        functions: the functions, or objects that are called.
        known: ids of modules that somebody else restores.

    Attributes:
        values: the values that they reach.
    """

    def __init__(self, functions: Iterable[Any], known: set[int]) -> None:
        self._seen, self._roots = known, {"__main__"}
        self._cells: list[tuple[CellType, Any]] = []
        self._entries: list[tuple[dict[str, Any], str, Any]] = []
        self._objects: list[tuple[dict[str, Any], dict[str, Any]]] = []
        functions = [*functions]
        self._note_classes(one.__self__ if isinstance(one, MethodType) else one for one in functions)
        self.values = [value for one in functions for held in self._reached(one, _DEPTH) for value in held]
        self._containers = SavedContainers(self.values, _LARGEST_LIST)
        self._tensors = SavedTensors(self.values, _LARGEST_TENSOR)

    def restore(self) -> None:
        """Put back what calls have changed."""
        for cell, value in self._cells:
            if cell.cell_contents is not value:
                cell.cell_contents = value
        for space, name, value in self._entries:
            if space.get(name) is not value:
                space[name] = value
        for attributes, before in self._objects:
            for name in attributes.keys() - before.keys():
                del attributes[name]
            for name, value in before.items():
                if attributes.get(name, self) is not value:
                    attributes[name] = value
        self._containers.restore()
        self._tensors.restore()

    def _reached(self, value: Any, depth: int) -> Iterator[list[Any]]:
        """Note the state of what is reached from a value, and yield lists of the values that it holds."""
        if depth == 0 or id(value) in self._seen or isinstance(value, type):
            return
        self._seen.add(id(value))
        if isinstance(value, partial):
            following = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            following = [value.__self__, value.__func__]
        elif isinstance(value, FunctionType):
            following = [*self._variables(value), *self._attributes(value)]
            yield following
        elif isinstance(value, nn.Module):
            self._seen.update(map(id, value.modules()))
            following = [one for module in value.modules() for one in self._attributes(module)]
            yield following
        elif type(value).__module__.startswith("tutti."):
            following = [getattr(value, "function", None)]
            self._note_classes(following)
        elif type(value) in CONTAINERS:
            following = []
            yield [value]
        elif type(value).__module__.partition(".")[0] in self._roots and hasattr(value, "__dict__"):
            following = self._attributes(value)
            yield following
            following = [*following, vars(type(value)).get("__call__")]
        else:
            return
        for other in following:
            yield from self._reached(other, depth - 1)

    def _variables(self, function: FunctionType) -> list[Any]:
        """The variables of a function's closure and the globals that its code names."""
        root = function.__module__.partition(".")[0] if function.__module__ else "torch"
        if root in ("torch", "numpy"):
            return []
        values = []
        for cell in function.__closure__ or ():
            try:
                values.append(cell.cell_contents)
            except ValueError:  # not yet assigned
                continue
            self._cells.append((cell, values[-1]))
        if root == "tutti":
            self._note_classes(values)
            return values
        self._roots.add(root)
        for name in function.__code__.co_names:
            if name in function.__globals__:
                values.append(function.__globals__[name])
                if isinstance(values[-1], _PLAIN):
                    self._entries.append((function.__globals__, name, values[-1]))
        return values

    def _note_classes(self, values: Iterable[Any]) -> None:
        """Take what the script has given tutti to be of the script's own classes."""
        roots = {type(value).__module__.partition(".")[0] for value in values}
        self._roots |= roots - {"torch", "numpy", "tutti", "builtins", "functools"}

    def _attributes(self, value: Any) -> list[Any]:
        """The attributes of an object; of a module also its buffers, by their names."""
        own = vars(value)
        spaces = [own, value._buffers] if isinstance(value, nn.Module) else [own]
        self._objects += [(space, dict(space)) for space in spaces]
        public = [one for name, one in own.items() if not name.startswith("_") or not isinstance(value, nn.Module)]
        return [*public, *(one for space in spaces[1:] for one in space.values())]
