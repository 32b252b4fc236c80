"""The state a step starts from: taken whole from one device, given to the ranks, and recorded in part."""

from typing import Any

import torch

from tutti.parallel.layout import Held, local
from tutti.trainer.state import Run
from tutti.verify.parts import kept, named_tensors
from tutti.verify.recording import State, Values


def recorded_state(run: Run) -> State:
    """Parameters, buffers and optimizer state as they stand, large ones in part."""
    layout, optimizer = run.layout, dict[str, torch.Tensor]()
    names: dict[int, dict[Any, str]] = {**layout.state_names(run.model, run.optimizers)}
    for index, one in enumerate(run.optimizers):
        for parameter, entries in one.state.items():
            name = names[index].get(parameter)
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    first = "?" if name is None else layout.first_name(name)
                    optimizer[f"{index}.{first}.{key}"] = kept(value, None if name is None else layout.state_of(name))
    return State(parameters=_kept(run, "parameters"), buffers=_kept(run, "buffers"), optimizer=optimizer)


def _kept(run: Run, kind: str) -> Values:
    layout = run.layout
    named = run.model.named_parameters() if kind == "parameters" else run.model.named_buffers()
    return {
        layout.first_name(name): kept(local(tensor), layout.of_name(name) if name in layout.names else None)
        for name, tensor in named
    }


def changes(one: State, other: State) -> State:
    """What `other` adds to `one`, tensor by tensor; tensors that are equal in both are left out."""
    return State(
        parameters=_changed(one.parameters, other.parameters),
        buffers=_changed(one.buffers, other.buffers),
        optimizer=_changed(one.optimizer, other.optimizer),
    )


def _changed(one: Values, other: Values) -> Values:
    return {
        name: value.double() - one[name].double()
        for name, value in other.items()
        if name in one and value.shape == one[name].shape and not torch.equal(value, one[name])
    }


def whole_state(run: Run) -> dict[str, Any]:
    """Everything `restore` needs, on one device: parameters and buffers, and each optimizer's entries, by name."""
    layout = run.layout
    names = layout.state_names(run.model, run.optimizers)
    return {
        "model": {layout.first_name(name): tensor.detach().cpu() for name, tensor in named_tensors(run)},
        "optimizers": [
            {layout.first_name(name): dict(one.state[p]) for p, name in names[index].items() if p in one.state}
            for index, one in enumerate(run.optimizers)
        ],
    }


@torch.no_grad()
def restore(run: Run, saved: dict[str, Any]) -> None:
    """Put this rank's part of one device's state in place; learning rates and other settings of the optimizers stay
    this rank's own."""
    layout = run.layout
    for name, tensor in named_tensors(run):
        whole = saved["model"].get(layout.first_name(name))
        if whole is not None:
            part = whole if whole.shape == tensor.shape else layout.of_name(name).take(whole)
            if part.shape == tensor.shape:
                tensor.copy_(part)
    for follow in layout.states.loaded:
        follow()
    names = layout.state_names(run.model, run.optimizers)
    for index, (one, states) in enumerate(zip(run.optimizers, saved["optimizers"], strict=True)):
        for parameter, name in names[index].items():
            entries = states.get(layout.first_name(name))
            if entries is None:
                one.state.pop(parameter, None)
            else:
                one.state[parameter] = {
                    key: _on(one.state[parameter].get(key), _part(value, layout.state_of(name)), parameter)
                    for key, value in entries.items()
                }


def _part(value: Any, held: Held) -> Any:
    """A saved entry, or this rank's part of it where it has the parameter's shape."""
    whole = isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) == held.shape
    return held.take(value) if whole else value


def make_double(run: Run) -> None:
    """Optimizer state that a script brought along, in float64 like its parameters."""
    for one in run.optimizers:
        for parameter, entries in one.state.items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point():
                    entries[key] = value.double()


def _on(present: Any, value: Any, parameter: torch.Tensor) -> Any:
    """A saved entry where the optimizer keeps it: like the present one, else beside its parameter unless 0-d."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(present, torch.Tensor):
        return value.to(present.device, copy=True)
    return value.to(parameter.device if value.dim() else "cpu", copy=True)
