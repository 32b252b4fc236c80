"""Building a model without memory, and giving this rank's part of it memory and values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tutti.data.seeds import preserved_generators
from tutti.errors import ScriptError
from tutti.parallel.sharding.shards import Shards
from tutti.trainer.deferred.empty import WithoutMemory
from tutti.trainer.deferred.replay import bound, replay
from tutti.trainer.deferred.tape import Tape

REMEDY = "build the model without job.build, or leave that out of its constructor"


def build_whole(function: Callable[[], nn.Module]) -> nn.Module:
    """The model with memory. torch's generators are left as they were, as they are without memory."""
    with preserved_generators():
        return function()


def build_empty(function: Callable[[], nn.Module]) -> tuple[nn.Module, Tape]:
    """The model without memory, and the tape of how it was made.

    Raises ScriptError for a constructor that looks at values or seeds generators, which needs memory.
    """
    tape = Tape()
    try:
        with preserved_generators(), tape, WithoutMemory(tape):
            model = function()
            seeded = not torch.equal(torch.get_rng_state(), tape.generator)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
        reason = str(error).splitlines()[0]
        raise ScriptError(
            f"job.build: the constructor looks at values, which are not there yet ({reason}); {REMEDY}"
        ) from error
    if seeded:
        raise ScriptError(
            f"job.build: the constructor seeds torch's generator, so its values are not the Job's; {REMEDY}"
        )
    return model, tape


def materialise(model: nn.Module, tape: Tape, device: torch.device, shards: Shards) -> None:
    """Give all that this rank holds of the model memory on `device`, with the values one device would have."""
    wanted = [tensor for tensor in _tensors(model).values() if tensor.is_meta]
    storages = replay(tape, [*wanted, *shards.memory()])

    def real(tensor: torch.Tensor) -> torch.Tensor:
        ref = tape.ref(tensor)
        return bound(ref, storages[ref.storage])

    shards.materialise(real, device)
    made: dict[int, torch.Tensor] = {}
    for (module, kind, key), tensor in _tensors(model).items():
        new = made.get(id(tensor))
        if new is None:
            new = tensor if not tensor.is_meta else real(tensor)
            new = made[id(tensor)] = _as(tensor, new.to(device))
        _put(module, kind, key, new)


def _tensors(model: nn.Module) -> "dict[tuple[nn.Module, str, str], torch.Tensor]":
    """Parameters, buffers and plain attributes that are tensors, by (module, kind, name)."""
    found: dict[tuple[nn.Module, str, str], torch.Tensor] = {}
    for module in model.modules():
        for kind in ("_parameters", "_buffers", "__dict__"):
            for key, value in vars(module).get(kind, {}).items() if kind != "__dict__" else vars(module).items():
                if isinstance(value, torch.Tensor):
                    found[module, kind, key] = value
    return found


def _as(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if not isinstance(old, nn.Parameter) or new is old:
        return new
    parameter = nn.Parameter(new.detach(), requires_grad=old.requires_grad)
    parameter.__dict__.update(old.__dict__)
    return parameter


def _put(module: nn.Module, kind: str, key: str, tensor: Any) -> None:
    if kind == "_parameters" and type(module).__setattr__ is not nn.Module.__setattr__:
        setattr(module, key, tensor)  # an RNN keeps a list of its weights
    elif kind == "__dict__":
        vars(module)[key] = tensor
    else:
        vars(module)[kind][key] = tensor
