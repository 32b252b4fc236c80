"""The state a step starts from: taken whole from one device, given to the ranks, and recorded in part."""

from typing import Any

import torch

from tutti.runtime.state import Run
from tutti.verify.recording import State, Values, kept


def recorded_state(run: Run) -> State:
    """Parameters, buffers and optimizer state as they stand, large ones in part."""
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    optimizer: Values = {}
    for index, one in enumerate(run.optimizers):
        for parameter, entries in one.state.items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    optimizer[f"{index}.{names.get(id(parameter), '?')}.{key}"] = kept(value)
    return State(
        parameters={name: kept(parameter) for name, parameter in run.model.named_parameters()},
        buffers={name: kept(buffer) for name, buffer in run.model.named_buffers()},
        optimizer=optimizer,
    )


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
    """Everything `restore` needs: parameters, buffers, and each optimizer's entries in order of its parameters."""
    return {
        "model": {name: tensor.detach().cpu() for name, tensor in _tensors(run)},
        "optimizers": [
            [dict(one.state[p]) if p in one.state else None for group in one.param_groups for p in group["params"]]
            for one in run.optimizers
        ],
    }


@torch.no_grad()
def restore(run: Run, saved: dict[str, Any]) -> None:
    """Put one device's state in place; learning rates and other settings of the optimizers stay this rank's own."""
    for name, tensor in _tensors(run):
        if name in saved["model"] and saved["model"][name].shape == tensor.shape:
            tensor.copy_(saved["model"][name])
    for one, states in zip(run.optimizers, saved["optimizers"], strict=True):
        parameters = [p for group in one.param_groups for p in group["params"]]
        for parameter, entries in zip(parameters, states, strict=True):
            if entries is None:
                one.state.pop(parameter, None)
            else:
                one.state[parameter] = {
                    key: _on(one.state[parameter].get(key), value, parameter) for key, value in entries.items()
                }


def make_double(run: Run) -> None:
    """Optimizer state that a script brought along, in float64 like its parameters."""
    for one in run.optimizers:
        for parameter, entries in one.state.items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point():
                    entries[key] = value.double()


def _tensors(run: Run) -> list[tuple[str, torch.Tensor]]:
    return [*run.model.named_parameters(), *run.model.named_buffers()]


def _on(present: Any, value: Any, parameter: torch.Tensor) -> Any:
    """A saved entry where the optimizer keeps it: like the present one, else beside its parameter unless 0-d."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(present, torch.Tensor):
        return value.to(present.device, copy=True)
    return value.to(parameter.device if value.dim() else "cpu", copy=True)
