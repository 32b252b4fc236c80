"""Plain state, as one device has it: made of a checkpoint, and taken as the values that training begins with."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tutti.checkpoint.collect import MODEL, Key, unpack
from tutti.checkpoint.index import OLD, Entry, Part, latest_checkpoint
from tutti.checkpoint.load import load_model, model_misfit
from tutti.checkpoint.merge import read_small
from tutti.checkpoint.ranges import Index as Place
from tutti.checkpoint.source import Source, in_memory, open_checkpoint, read_whole, shared_source
from tutti.checkpoint.tensors import Files, dtype_of, plain_item, write_tensors
from tutti.errors import CheckpointError
from tutti.trainer.run_state import Run


def to_state_dict(folder: Path) -> dict[str, Any]:
    """A checkpoint (or a run folder's newest) as one device would have it: {"model": state_dict, "optimizers": [...]}.

    Each takes its part with load_state_dict. Raises CheckpointError.
    """
    path = checkpoint_in(folder)
    if (path / OLD).is_file():
        saved = read_small(path / OLD)
        return {"model": saved["model"], "optimizers": saved["optimizers"]}
    source = open_checkpoint(path)
    model: dict[str, Any] = {key[1]: read_whole(source, key) for key in source.entries if key[0] == MODEL}
    model.update({name: model[first] for name, first in source.tied.items()})
    model.update(source.small["extra_state"])
    count = len(source.small["optimizers"])
    return {"model": model, "optimizers": [_optimizer_state(source, number) for number in range(count)]}


def _optimizer_state(source: Source, number: int) -> dict[str, Any]:
    saved = source.small["optimizers"][number]
    names = [name for _, some in saved["groups"] for name in some]
    places = {name: place for place, name in enumerate(names)}
    state: dict[Any, dict[str, Any]] = {}
    for name, scalars in saved["scalars"].items():
        state[places[name]] = {key: unpack(packed) for key, packed in scalars.items()}
    for key in source.entries:
        if key[0] == number:
            state.setdefault(places[key[1]], {})[key[2]] = read_whole(source, key)
    groups = [{**settings, "params": [places[name] for name in some]} for settings, some in saved["groups"]]
    beside = saved["beside"]
    return {**beside, "state": {**dict(sorted(state.items())), **beside.get("state", {})}, "param_groups": groups}


def to_safetensors(folder: Path, file: Path) -> int:
    """Write the model of a checkpoint (or a run folder's newest) as one safetensors file; returns its size in bytes.

    One tensor is in memory at a time. A tied tensor is written once; its other names are in the file's metadata, as
    safetensors.torch.save_model has them. Raises CheckpointError.
    """
    path = checkpoint_in(folder)
    if (path / OLD).is_file():
        saved = read_small(path / OLD)
        model = {name: value for name, value in saved["model"].items() if isinstance(value, torch.Tensor)}
        extra = [name for name in saved["model"] if name not in model]
        source = in_memory(path, {(MODEL, name, ""): value for name, value in model.items()}, {})
    else:
        source = open_checkpoint(path)
        extra = list(source.small["extra_state"])
    if extra:
        raise CheckpointError(
            f"{path} holds state that is no tensor ({extra[0]!r}), for which safetensors has no place; write a .pt file"
        )
    entries = {key[1]: entry for key, entry in source.entries.items() if key[0] == MODEL}
    if any(dtype_of(entry.dtype).is_complex for entry in entries.values()):
        raise CheckpointError(f"{path} holds complex numbers, for which safetensors has no word; write a .pt file")
    items = [
        plain_item(name, entry.shape, dtype_of(entry.dtype), partial(read_whole, source, (MODEL, name, "")))
        for name, entry in entries.items()
    ]
    metadata = {**source.tied, "format": "pt"}
    return _written(file, lambda unfinished: write_tensors(unfinished, items, metadata))


def to_file(folder: Path, file: Path, *, optimizers: bool = False) -> int:
    """Write a checkpoint's model as FILE.safetensors or FILE.pt, there with its optimizers if asked; returns its size.

    Raises CheckpointError; then there is no file.
    """
    if file.suffix == ".safetensors":
        return to_safetensors(folder, file)
    state = to_state_dict(folder)

    def write(unfinished: Path) -> int:
        with unfinished.open("wb") as opened:
            torch.save(state if optimizers else state["model"], opened)
            return opened.tell()

    return _written(file, write)


def _written(file: Path, write: Callable[[Path], int]) -> int:
    """Write under another name first, so that a file is whole or is not there."""
    unfinished = file.with_name(f".{file.name}.part")
    try:
        nbytes = write(unfinished)
        unfinished.rename(file)
        return nbytes
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{file} could not be written: {str(error).splitlines()[0]}; free space, or name another file"
        ) from None
    finally:
        unfinished.unlink(missing_ok=True)


def checkpoint_in(path: Path) -> Path:
    """The checkpoint a path means: itself, or the newest of a run folder. Raises CheckpointError."""
    found = latest_checkpoint(path)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint; name a run folder, or a checkpoint in one")
    return found


def load_weights(run: Run, path: Path) -> None:
    """Give the model the values of a plain state_dict (.safetensors or .pt) as those it starts with, under any plan.

    Every rank must call it; each takes what it holds. Names must be the model's, all of them; a tied tensor may be
    stored under any of its names. Raises CheckpointError, on every rank.
    """
    source = shared_source(run.world, path, open_weights)
    tied = dict(source.tied)
    for names in run.layout.tied:
        stored = [name for name in names if (MODEL, name, "") in source.entries]
        tied.update({name: stored[0] for name in names if stored and name not in stored})
    source = replace(source, tied=tied)
    misfits = [words for words in run.world.gather(model_misfit(run, source)) if words is not None]
    if misfits:
        raise CheckpointError(misfits[0])
    load_model(run, source)


def open_weights(path: Path) -> Source:
    """A file with a model's state_dict as a source; a .pt may hold it under "model" or "state_dict"."""
    if not path.is_file():
        raise CheckpointError(f"{path} is no file; name a .safetensors or .pt file with the model's state_dict")
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    saved = read_small(path)
    for name in ("model", "state_dict"):
        if isinstance(saved, Mapping) and isinstance(saved.get(name), Mapping):
            saved = saved[name]
    if not isinstance(saved, Mapping) or not saved or not all(isinstance(v, torch.Tensor) for v in saved.values()):
        raise CheckpointError(f"{path} holds no state_dict (names with tensors); save model.state_dict() in it")
    return in_memory(path, {(MODEL, str(name), ""): value for name, value in saved.items()}, {})


def _open_safetensors(path: Path) -> Source:
    files = Files(path.parent)
    found, metadata = files.contents(path.name)
    entries: dict[Key, Entry] = {}
    for name, (shape, dtype) in found.items():
        part = Part(file=path.name, key=name)
        entries[(MODEL, name, "")] = Entry(shape=shape, dtype=str(dtype).removeprefix("torch."), parts=(part,))

    def read(part: Part, dtype: torch.dtype, place: Place) -> torch.Tensor:
        return files.read(part.file, part.key, dtype, place)

    tied = {name: first for name, first in metadata.items() if first in found and name not in found}
    return Source(path=path, entries=entries, tied=tied, read=read)
