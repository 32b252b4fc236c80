"""Conversion to and from torch's distributed checkpoint format (DCP), as torchtitan, FSDP2 scripts and Lightning use.

One process converts; no ranks are needed, and one tensor is in memory at a time.
"""

import importlib
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tutti.checkpoint.checksums import printable
from tutti.checkpoint.index import MODEL, Key, Slices, StoredPart, StoredTensor
from tutti.checkpoint.integrity import open_sound_checkpoint
from tutti.checkpoint.plain_state import DCP_METADATA, write_model_file
from tutti.checkpoint.sources import Source, find_checkpoint, read_whole
from tutti.checkpoint.tensor_files import dtype_name
from tutti.errors import CheckpointError
from tutti.parallel.saved_values import parse_dtype, unpack_scalar

_MODEL_ENTRIES = ("model", "state_dict")
"""Entries of a saved dict that usually hold the model's state_dict."""


def export_dcp(checkpoint: Path, folder: Path, *, optimizers: bool = True) -> int:
    """Write a checkpoint (or a run folder's newest) in torch's DCP format.

    The folder holds {"model": state_dict, "optimizer": state} with parameters identified by name, as
    torch.distributed.checkpoint.state_dict.get_state_dict gives them; with several optimizers {"optimizers": [...]}.
    Tied tensors are stored under each of their names, as dcp.save does.

    Args:
        checkpoint: a checkpoint's folder, or a run folder.
        folder: the folder to create; it must not exist.
        optimizers: whether to write the optimizers' state, too.

    Returns:
        Size of the written files in bytes.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the folder cannot be written; no folder remains.

    Examples:
        After a run with `Job(folder="runs/first")`:

        >>> export_dcp(Path("runs/first"), Path("for-torch")) > 0
        True
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists; name another folder, or remove it")
    source = open_sound_checkpoint(find_checkpoint(checkpoint))
    keys: dict[int, Key] = {}
    state: dict[str, Any] = {"model": _model_state(source, keys)}
    if optimizers:
        states = [_named_state(source, number, keys) for number in range(len(source.run_state["optimizers"]))]
        state.update({"optimizer": states[0]} if len(states) == 1 else {"optimizers": states})
    unfinished = folder.with_name(f".{folder.name}.{uuid4().hex[:12]}")
    try:
        with _quiet():
            writer = FileSystemWriter(unfinished, single_file_per_rank=True, thread_count=1)
            save(state, storage_writer=writer, planner=_StreamingPlanner(source, keys), no_dist=True)
        nbytes = sum(file.stat().st_size for file in unfinished.iterdir())
        unfinished.rename(folder)
        return nbytes
    except (OSError, RuntimeError, CheckpointException) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = (str(cause) or type(cause).__name__).splitlines()[0]
        raise CheckpointError(f"{folder} could not be written: {reason}; free space, or name another folder") from None


def import_dcp(folder: Path, file: Path) -> int:
    """Write the model of a DCP checkpoint as FILE.safetensors or FILE.pt.

    `job.prepare(..., weights=folder)` reads the folder itself.

    Args:
        folder: the DCP checkpoint.
        file: the file to write; its suffix chooses the format.

    Returns:
        The file's size in bytes.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the file cannot be written; no file remains.

    Examples:
        After a run with `Job(folder="runs/first")`:

        >>> _ = export_dcp(Path("runs/first"), Path("from-torch"))
        >>> import_dcp(Path("from-torch"), Path("model.safetensors")) > 0
        True
    """
    return write_model_file(open_dcp(folder), file)


def open_dcp(folder: Path) -> Source:
    """Open the model of a DCP checkpoint as a source.

    The model is the entry "model" or "state_dict" of the saved dict; without either, the tensors on its top level.

    Args:
        folder: the DCP checkpoint.

    Raises:
        CheckpointError: the folder cannot be read, or holds no model.
    """
    try:
        _refuse_code(folder / DCP_METADATA)
        reader = FileSystemReader(folder)
        metadata = reader.read_metadata()
    except Exception as error:  # the metadata is a pickle, perhaps of another torch, and may raise anything
        reason = printable(error) or type(error).__name__
        raise CheckpointError(f"{folder / DCP_METADATA} cannot be read: {reason}; name another checkpoint") from None
    _refuse_outside(folder, metadata)
    paths = metadata.planner_data or {}
    stored = {k: entry for k, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
    path_of = {key: tuple(paths.get(key, (key,))) for key in stored}
    model = next((name for name in _MODEL_ENTRIES if any(path[0] == name for path in path_of.values())), None)
    wanted = {key: path for key, path in path_of.items() if (path[0] == model if model else len(path) == 1)}
    if not wanted:
        raise CheckpointError(
            f'{folder} holds no model; save {{"model": model.state_dict()}} in it with torch.distributed.checkpoint'
        )
    tensors: dict[Key, StoredTensor] = {}
    for key, path in wanted.items():
        entry = stored[key]
        name = ".".join(str(part) for part in (path[1:] if model else path))
        tensors[(MODEL, name, "")] = StoredTensor(
            shape=tuple(entry.size), dtype=dtype_name(entry.properties.dtype), parts=(StoredPart(file="", key=key),)
        )
    return Source(path=folder, tensors=tensors, read=_Reader(folder, {t.parts[0].key: t for t in tensors.values()}))


_METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch",
    "torch.serialization",
    "pathlib",
    "collections",
)

_METADATA_NAMES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("collections", "OrderedDict"),
}
"""What torch's metadata is made of besides the classes of its own module."""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads torch's metadata of a DCP folder; any other class or function is refused, as it could run code."""

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 calls it
        found = getattr(importlib.import_module(module), name, None) if module in _METADATA_MODULES else None
        defined = isinstance(found, type) and found.__module__ == module == _METADATA_MODULES[0]
        if defined or isinstance(found, torch.dtype) or (module, name) in _METADATA_NAMES:
            return found
        raise CheckpointError(f"it holds the Python object {printable(f'{module}.{name}', 80)}, which could run code")


def _refuse_code(file: Path) -> None:
    """Read the metadata with its few classes only, before torch's reader does without a check."""
    with file.open("rb") as opened:
        _MetadataUnpickler(opened).load()


def _refuse_outside(folder: Path, metadata: Metadata) -> None:
    """Refuse metadata whose tensors lie in files outside the folder."""
    root = folder.resolve()
    for storage in (metadata.storage_data or {}).values():
        path = str(getattr(storage, "relative_path", ""))
        if not (folder / path).resolve().is_relative_to(root):
            raise CheckpointError(
                f"{folder / DCP_METADATA} names {printable(path)!r}, which lies outside it; name another checkpoint"
            )


class _Reader:
    """Reads whole tensors with torch's dcp.load, and keeps the last one for further slices of it."""

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        self._folder, self._tensors = folder, tensors
        self._last: tuple[str, torch.Tensor] | None = None

    def __call__(self, part: StoredPart, dtype: torch.dtype, index: Slices) -> torch.Tensor:
        if self._last is None or self._last[0] != part.key:
            state = {part.key: torch.empty(self._tensors[part.key].shape, dtype=dtype)}
            try:
                with _quiet():
                    load(state, storage_reader=FileSystemReader(self._folder), no_dist=True)
            except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
                reason = (str(error) or type(error).__name__).splitlines()[0]
                raise CheckpointError(f"{self._folder} cannot be read: {reason}; name another checkpoint") from None
            self._last = part.key, state[part.key]
        return self._last[1][index]


class _StreamingPlanner(DefaultSavePlanner):
    """Saves tensors that are placeholders until their turn, when each is read from the source.

    Args:
        source: the checkpoint to read.
        keys: id of a placeholder -> key of the stored tensor.
    """

    def __init__(self, source: Source, keys: dict[int, Key]) -> None:
        super().__init__()
        self._source, self._keys = source, keys

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        key = self._keys.get(id(value))
        return value if key is None else read_whole(self._source, key)


def _placeholder(source: Source, key: Key, keys: dict[int, Key]) -> torch.Tensor:
    """Return a tensor without memory in place of a stored one, and register it in `keys`."""
    stored = source.tensors[key]
    tensor = torch.empty(stored.shape, dtype=parse_dtype(stored.dtype), device="meta")
    keys[id(tensor)] = key
    return tensor


def _model_state(source: Source, keys: dict[int, Key]) -> dict[str, Any]:
    """Return the model's state_dict with placeholders."""
    names = [key[1] for key in source.tensors if key[0] == MODEL]
    model: dict[str, Any] = {name: _placeholder(source, (MODEL, name, ""), keys) for name in names}
    model.update({name: _placeholder(source, (MODEL, first, ""), keys) for name, first in source.tied.items()})
    return {**model, **source.run_state["extra_state"]}


def _named_state(source: Source, number: int, keys: dict[int, Key]) -> dict[str, Any]:
    """Return the state of one optimizer, with placeholders and with parameters identified by name."""
    saved = source.run_state["optimizers"][number]
    state: dict[str, dict[str, Any]] = {}
    for name, scalars in saved["scalars"].items():
        state[name] = {key: unpack_scalar(packed) for key, packed in scalars.items()}
    for key in source.tensors:
        if key[0] == number:
            state.setdefault(key[1], {})[key[2]] = _placeholder(source, key, keys)
    return {"state": state, "param_groups": [{**settings, "params": names} for settings, names in saved["groups"]]}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings that only one process takes part, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.checkpoint")
        yield
