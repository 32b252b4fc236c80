"""Checkpoints of the first format, one file state.pt with whole tensors, as a source like any other."""

from pathlib import Path
from typing import Any

import torch

from tutti.checkpoint.collect import MODEL, Key, pack
from tutti.checkpoint.index import INDEX, OLD
from tutti.checkpoint.merge import read_small
from tutti.checkpoint.source import Source, in_memory, open_checkpoint
from tutti.errors import CheckpointError


def open_any(path: Path, groups: list[list[list[str]]]) -> Source:
    """A checkpoint of either format. `groups`: the optimizers' parameters by name, which the first format lacks."""
    if (path / INDEX).is_file() or not (path / OLD).is_file():
        return open_checkpoint(path)
    saved = read_small(path / OLD)
    if saved.get("format") != 1:
        raise CheckpointError(f"{path / OLD} has format {saved.get('format')!r}, unknown here; name another checkpoint")
    tensors: dict[Key, torch.Tensor] = {}
    extra = {}
    for name, value in saved["model"].items():
        if isinstance(value, torch.Tensor):
            tensors[(MODEL, name, "")] = value
        else:
            extra[name] = value
    optimizers = []
    for number, state_dict in enumerate(saved["optimizers"]):
        names = groups[number] if number < len(groups) else []
        optimizers.append(_optimizer(path, number, state_dict, names, tensors))
    return in_memory(path, tensors, {**saved, "optimizers": optimizers, "extra_state": extra})


def _optimizer(
    path: Path, number: int, saved: dict[str, Any], names: list[list[str]], tensors: dict[Key, torch.Tensor]
) -> dict[str, Any]:
    """One optimizer's state by name; tensors that have a parameter's shape go to `tensors`."""
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != [len(group) for group in names]:
        raise CheckpointError(
            f"{path}: optimizer {number} was saved with {sum(sizes)} parameters in {len(sizes)} groups and has "
            f"{sum(map(len, names))} in {len(names)} now; make it with the same groups"
        )
    called = {
        place: name
        for group, some in zip(saved["param_groups"], names, strict=True)
        for place, name in zip(group["params"], some, strict=True)
    }
    scalars: dict[str, dict[str, Any]] = {}
    for place, state in saved["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() > 1:
                tensors[(number, called[place], str(key))] = value
            else:
                scalars.setdefault(called[place], {})[key] = pack(value)
    groups = [
        [{key: value for key, value in group.items() if key not in ("params", "param_names")}, some]
        for group, some in zip(saved["param_groups"], names, strict=True)
    ]
    return {"groups": groups, "scalars": scalars, "beside": {}}
