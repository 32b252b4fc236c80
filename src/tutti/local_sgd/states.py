"""The optimizers' state of one replica: its mean over the replicas, and all of it for a resumed run."""

from typing import Any

import torch
from torch import nn

from tutti.checkpoint.contribution import pack_scalar, unpack_scalar
from tutti.checkpoint.tensor_files import parse_dtype
from tutti.local_sgd.vectors import Replicas, Vectors
from tutti.trainer.run_state import Run


def state_vectors(run: Run) -> Vectors:
    """State tensors of floating point that every replica has, by "optimizer-0/name/key". Collective.

    A replica has no state of a parameter that its samples never used.
    """
    mine = {name: value for name, value in _tensors(run).items() if value.is_floating_point()}
    everyone = run.world.gather([(name, tuple(value.shape)) for name, value in mine.items()])
    common = set(everyone[0]).intersection(*everyone[1:])
    return Vectors((name, mine[name]) for name, shape in everyone[0] if (name, shape) in common)


def average_states(run: Run, replicas: Replicas) -> None:
    """Give state tensors their mean over the replicas."""
    vectors = state_vectors(run)
    vectors.write(replicas.mean(vectors.read()))


def own_states(run: Run) -> tuple[dict[str, torch.Tensor], list[list[Any]]]:
    """Copies of all state tensors, and in plain values what stands for each entry: [optimizer, name, key, what]."""
    copies = {name: value.detach().clone() for name, value in _tensors(run).items()}
    plain: list[list[Any]] = []
    for number, name, _, key, value in _entries(run):
        tensor = copies.get(_called(number, name, key))
        what = (
            pack_scalar(value)
            if tensor is None
            else ["shaped", str(tensor.dtype).removeprefix("torch."), [*tensor.shape]]
        )
        plain.append([number, name, key, what])
    return copies, plain


def restore_states(run: Run, copies: dict[str, torch.Tensor]) -> None:
    """Give state tensors the values of their copies."""
    for name, value in _tensors(run).items():
        value.copy_(copies[name])


def make_states(run: Run, plain: list[list[Any]]) -> dict[str, torch.Tensor]:
    """Give the optimizers the entries that `own_states` told; returns the tensors, to be filled."""
    parameters = {(number, name): parameter for number, name, parameter in _parameters(run)}
    before = {_called(number, name, key): value for number, name, _, key, value in _entries(run)}
    for number, _, parameter in _parameters(run):
        run.optimizers[number].state.pop(parameter, None)
    tensors: dict[str, torch.Tensor] = {}
    for number, name, key, what in plain:
        parameter, called = parameters[number, name], _called(number, name, key)
        if what[0] == "shaped":
            value: Any = torch.empty(what[2], dtype=parse_dtype(what[1]), device=parameter.device)
            tensors[called] = value
        else:
            value, like = unpack_scalar(what), before.get(called)
            value = value.to(like.device) if isinstance(like, torch.Tensor) else value
        run.optimizers[number].state[parameter][key] = value
    return tensors


def _parameters(run: Run) -> list[tuple[int, str, nn.Parameter]]:
    names = run.layout.state_names(run.model, run.optimizers)
    return [(number, name, parameter) for number, some in names.items() for parameter, name in some.items()]


def _entries(run: Run) -> list[tuple[int, str, nn.Parameter, str, Any]]:
    return [
        (number, name, parameter, key, value)
        for number, name, parameter in _parameters(run)
        for key, value in run.optimizers[number].state.get(parameter, {}).items()
    ]


def _tensors(run: Run) -> dict[str, torch.Tensor]:
    return {
        _called(number, name, key): value
        for number, name, _, key, value in _entries(run)
        if isinstance(value, torch.Tensor) and value.numel() > 1
    }


def _called(number: int, name: str, key: str) -> str:
    return f"optimizer-{number}/{name}/{key}"
