"""Forwards: the placement of each, traced anew, or an earlier one's where they cannot differ.

A program may serve again only where what leads to it is known to the end: the modules that call the units are plain
`nn.Sequential`s, whose code is torch's and looks at nothing. A model's own code may look at anything (the batch, a
counter, random numbers), so it is run for every forward; a trace costs some 50 us for every unit.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from tutti.parallel.pipeline.build import Stages
from tutti.parallel.pipeline.infer import signature
from tutti.parallel.pipeline.place import Placement
from tutti.parallel.pipeline.program import Argument, Copied, Program
from tutti.parallel.pipeline.standin import HOOKS, is_unknown
from tutti.parallel.pipeline.trace import Ending
from tutti.parallel.pipeline.tree import flatten


class Forwards:
    """Places the forwards of one model."""

    def __init__(self, stages: Stages) -> None:
        self._stages, self._tracer = stages, stages.tracer
        self._placed: dict[Any, Placement] = {}

    def place(self, function: Callable[[], Any], ending: Ending | None) -> Placement:
        """What `function()`, which calls the model, does on which stage; see Tracer.trace."""
        call = self._tracer.call_of(function) if ending and self._is_plain() else None
        leaves, form = flatten(call)
        described = None if call is None else signature(leaves)
        if call is None or described is None or any(map(is_unknown, leaves)):
            return self._stages.place(self._tracer.trace(function, ending))
        key = (described, form.count, form.names, str(form.spec), ending, *self._surroundings())
        if key not in self._placed:
            args, kwargs = call
            model = self._tracer.model
            program, known = self._tracer.traced(lambda: model(*args, **kwargs), ending)
            if not known or not _serves_again(program, leaves):
                return self._stages.place(program)
            self._placed[key] = self._stages.place(program)
        return replace(self._placed[key], arguments=tuple(leaves))

    def _is_plain(self) -> bool:
        """Whether nothing but torch's own Sequential decides which units are called, and with what."""
        if modules._global_forward_hooks or modules._global_forward_pre_hooks:
            return False
        return all(map(_is_bare_sequential, self._glue()))

    def _glue(self) -> list[nn.Module]:
        return [self._tracer.model.get_submodule(name) for name in sorted(self._tracer.units.glue)]

    def _surroundings(self) -> tuple[Any, ...]:
        children = [(name, id(child)) for module in self._glue() for name, child in module._modules.items()]
        return self._tracer.stand_ins.modes(), tuple(children)


def _is_bare_sequential(module: nn.Module) -> bool:
    own = module.__dict__
    hooked = any(own[key] for key in (*HOOKS, "_backward_hooks", "_backward_pre_hooks"))
    return type(module) is nn.Sequential and "forward" not in own and not hooked


def _serves_again(program: Program, leaves: list[Any]) -> bool:
    """Put `Argument`s in place of the tensors that the model was called with; False where others are in the program,
    or one is written to."""
    places = {id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}

    def bound(leaf: Any) -> Any:
        return Argument(places[id(leaf)]) if id(leaf) in places else leaf

    program.nodes = [replace(node, leaves=tuple(map(bound, node.leaves))) for node in program.nodes]
    program.output = tuple(map(bound, program.output))
    rest = [*program.output, *(leaf for node in program.nodes for leaf in node.leaves)]
    return not any(isinstance(leaf, torch.Tensor | Copied) for leaf in rest)
