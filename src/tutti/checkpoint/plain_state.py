"""Plain state, as one device has it: written from a checkpoint, or read as the initial values of a training run."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tutti.checkpoint.index import MODEL, Key, StoredPart, StoredTensor, read_plain
from tutti.checkpoint.integrity import open_sound_checkpoint
from tutti.checkpoint.sources import Source, find_checkpoint, in_memory, read_whole, reader_of
from tutti.checkpoint.tensor_files import TensorFiles, tensor_on_demand, write_tensors
from tutti.errors import CheckpointError
from tutti.parallel.saved_values import parse_dtype, unpack_scalar

DCP_METADATA = ".metadata"
"""The file that marks a folder as a checkpoint in torch's distributed format (DCP)."""


def is_dcp(path: Path) -> bool:
    """Whether a path is a folder in torch's distributed checkpoint format."""
    return (path / DCP_METADATA).is_file()


def to_state_dict(folder: Path) -> dict[str, Any]:
    """Read a checkpoint (or a run folder's newest) as one device would have it.

    Args:
        folder: a checkpoint's folder, or a run folder.

    Returns:
        {"model": state_dict, "optimizers": [state_dict, ...]}, each for load_state_dict.

    Raises:
        CheckpointError: the checkpoint cannot be read.

    Examples:
        After a run with `Job(folder="runs/first")`:

        >>> plain = torch.nn.Linear(3, 1)
        >>> plain.load_state_dict(to_state_dict(Path("runs/first"))["model"])
        <All keys matched successfully>
    """
    source = open_sound_checkpoint(find_checkpoint(folder))
    count = len(source.run_state["optimizers"])
    return {"model": _model_state(source), "optimizers": [_optimizer_state(source, n) for n in range(count)]}


def _model_state(source: Source) -> dict[str, Any]:
    """Return the model's state_dict, with tied tensors under all their names."""
    model: dict[str, Any] = {key[1]: read_whole(source, key) for key in source.tensors if key[0] == MODEL}
    model.update({name: model[first] for name, first in source.tied.items()})
    return {**model, **source.run_state.get("extra_state", {})}


def _optimizer_state(source: Source, number: int) -> dict[str, Any]:
    """Return one optimizer's state_dict, with parameters numbered in the order of its groups, as torch does."""
    saved = source.run_state["optimizers"][number]
    ordered = [name for _, names in saved["groups"] for name in names]
    places = {name: place for place, name in enumerate(ordered)}
    state: dict[Any, dict[str, Any]] = {}
    for name, scalars in saved["scalars"].items():
        state[places[name]] = {key: unpack_scalar(packed) for key, packed in scalars.items()}
    for key in source.tensors:
        if key[0] == number:
            state.setdefault(places[key[1]], {})[key[2]] = read_whole(source, key)
    groups = [{**settings, "params": [places[name] for name in names]} for settings, names in saved["groups"]]
    others = saved["other_state"]
    return {**others, "state": {**dict(sorted(state.items())), **others.get("state", {})}, "param_groups": groups}


def to_safetensors(folder: Path, file: Path) -> int:
    """Write the model of a checkpoint (or a run folder's newest) as one safetensors file.

    One tensor is in memory at a time. A tied tensor is written once; its other names are in the file's metadata, as
    safetensors.torch.save_model stores them.

    Args:
        folder: a checkpoint's folder, or a run folder.
        file: the file to write.

    Returns:
        The file's size in bytes.

    Raises:
        CheckpointError: the checkpoint cannot be read, the file cannot be written, or the format cannot hold the state.

    Examples:
        After a run with `Job(folder="runs/first")`:

        >>> file = Path("weights.safetensors")
        >>> to_safetensors(Path("runs/first"), file) == file.stat().st_size
        True
    """
    return _write_safetensors(open_sound_checkpoint(find_checkpoint(folder)), file)


def to_file(folder: Path, file: Path, *, optimizers: bool = False) -> int:
    """Write a checkpoint's model as FILE.safetensors or FILE.pt.

    Args:
        folder: a checkpoint's folder, or a run folder.
        file: the file to write; its suffix chooses the format.
        optimizers: write {"model": ..., "optimizers": [...]} to FILE.pt; ignored for safetensors.

    Returns:
        The file's size in bytes.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the file cannot be written; no file remains.
    """
    if optimizers and file.suffix != ".safetensors":
        return _save_whole(lambda: to_state_dict(folder), file)
    return write_model_file(open_sound_checkpoint(find_checkpoint(folder)), file)


def write_model_file(source: Source, file: Path) -> int:
    """Write the model of a source as FILE.safetensors or FILE.pt.

    Args:
        source: the source; its `read` must not be None.
        file: the file to write; its suffix chooses the format.

    Returns:
        The file's size in bytes.

    Raises:
        CheckpointError: the source cannot be read, or the file cannot be written; no file remains.
    """
    if file.suffix == ".safetensors":
        return _write_safetensors(source, file)
    return _save_whole(lambda: _model_state(source), file)


def _write_safetensors(source: Source, file: Path) -> int:
    extra = list(source.run_state.get("extra_state", {}))
    if extra:
        raise CheckpointError(
            f"{source.path} holds state that is not a tensor ({extra[0]!r}), which safetensors cannot store; write a "
            ".pt file"
        )
    model = {key[1]: stored for key, stored in source.tensors.items() if key[0] == MODEL}
    if any(parse_dtype(stored.dtype).is_complex for stored in model.values()):
        raise CheckpointError(f"{source.path} holds complex numbers, which safetensors cannot store; write a .pt file")
    tensors = [
        tensor_on_demand(name, stored.shape, parse_dtype(stored.dtype), partial(read_whole, source, (MODEL, name, "")))
        for name, stored in model.items()
    ]
    metadata = {**source.tied, "format": "pt"}
    return _write_then_rename(file, lambda unfinished: write_tensors(unfinished, tensors, metadata).nbytes)


def _save_whole(make_state: Callable[[], dict[str, Any]], file: Path) -> int:
    """Write the state that `make_state` returns with torch.save; return the file's size in bytes."""
    state = make_state()

    def write(unfinished: Path) -> int:
        with unfinished.open("wb") as opened:
            torch.save(state, opened)
            return opened.tell()

    return _write_then_rename(file, write)


def _write_then_rename(file: Path, write: Callable[[Path], int]) -> int:
    """Write under a temporary name and rename the file, so that it is complete or does not exist."""
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


def open_weights(path: Path) -> Source:
    """Open a file with a model's state_dict as a source.

    Args:
        path: a .safetensors file, or a .pt file that holds the state_dict itself or under "model" or "state_dict".

    Raises:
        CheckpointError: the file cannot be read, or holds no state_dict.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not a file; name a .safetensors or .pt file with the model's state_dict, or a folder in "
            "torch's distributed checkpoint format"
        )
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    saved = read_plain(path, str(path))
    for name in ("model", "state_dict"):
        if isinstance(saved, Mapping) and isinstance(saved.get(name), Mapping):
            saved = saved[name]
    if not isinstance(saved, Mapping) or not saved or not all(isinstance(v, torch.Tensor) for v in saved.values()):
        raise CheckpointError(f"{path} holds no state_dict (names with tensors); save model.state_dict() in it")
    return in_memory(path, {(MODEL, _without_wrapper(str(name)), ""): value for name, value in saved.items()})


def _without_wrapper(name: str) -> str:
    """Return a tensor's name without the prefix that torch.compile's wrapper gives it."""
    return name.replace("_orig_mod.", "")


def _open_safetensors(path: Path) -> Source:
    contents, metadata = TensorFiles(path.parent).contents(path.name)
    tensors: dict[Key, StoredTensor] = {}
    for name, (shape, dtype) in contents.items():
        part = StoredPart(file=path.name, key=name)
        key = (MODEL, _without_wrapper(name), "")
        tensors[key] = StoredTensor(shape=shape, dtype=str(dtype).removeprefix("torch."), parts=(part,))
    tied = {name: first for name, first in metadata.items() if first in contents and name not in contents}
    tied = {_without_wrapper(name): _without_wrapper(first) for name, first in tied.items()}
    return Source(path=path, tensors=tensors, tied=tied, read=reader_of(path.parent))


def with_tied_names(source: Source, tied: list[list[str]]) -> Source:
    """Add to a source the names of tied tensors that it stores under another name.

    Args:
        source: the source, which may store a tied tensor under any of its names.
        tied: groups of names that are one tensor in the model.
    """
    names = dict(source.tied)
    for group in tied:
        stored = [name for name in group if (MODEL, name, "") in source.tensors]
        names.update({name: stored[0] for name in group if stored and name not in stored})
    return replace(source, tied=names)
