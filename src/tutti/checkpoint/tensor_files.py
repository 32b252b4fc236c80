"""Files of a checkpoint: tensors in the safetensors format, and folders that get their name when they are complete.

The safetensors package's `save_file` needs all values at once and does not wait for the disk. The writer here asks for
one tensor at a time, because a model may be larger than the free memory.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open

from tutti.checkpoint.index import Slices
from tutti.errors import CheckpointError

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_CHUNK_NBYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorToWrite:
    """One tensor of a file.

    Attributes:
        key: its name in the file.
        make: returns its values; called when they are written.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def tensor_to_write(key: str, tensor: torch.Tensor) -> TensorToWrite:
    """Describe an existing tensor, whose values are read when the file is written."""
    return tensor_on_demand(key, tuple(tensor.shape), tensor.dtype, lambda: tensor)


def tensor_on_demand(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], torch.Tensor]
) -> TensorToWrite:
    """Describe a tensor whose values `make` returns. Complex numbers become pairs: the format has no complex dtype."""
    if not dtype.is_complex:
        return TensorToWrite(key=key, shape=shape, dtype=dtype, make=make)
    return TensorToWrite(key=key, shape=(*shape, 2), dtype=dtype.to_real(), make=lambda: torch.view_as_real(make()))


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in the index ("float32").

    Raises:
        CheckpointError: no file can hold the dtype.
    """
    if dtype not in _DTYPE_NAMES and not dtype.is_complex:
        raise CheckpointError(f"tensors of dtype {dtype} cannot be written to a checkpoint; convert them")
    return str(dtype).removeprefix("torch.")


def write_tensors(path: Path, tensors: Sequence[TensorToWrite], metadata: dict[str, str] | None = None) -> int:
    """Write a safetensors file and wait until it is on disk.

    Args:
        path: the file.
        tensors: its tensors, written one at a time.
        metadata: text entries of the file's header.

    Returns:
        The file's size in bytes.

    Raises:
        OSError: the file cannot be written.
    """
    ordered = in_file_order(tensors)
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for tensor in ordered:
        offsets = [offset, offset + tensor.nbytes]
        header[tensor.key] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write(file, memoryview(len(text).to_bytes(8, "little") + text))
        for tensor in ordered:
            _write(file, _bytes_of(tensor.make()))
        os.fsync(file.fileno())
        return file.tell()


def in_file_order(tensors: Sequence[TensorToWrite]) -> list[TensorToWrite]:
    """Return tensors in the order of a file: large elements first, so that every tensor is aligned."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def _write(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data[:_CHUNK_NBYTES]) :]


@dataclass(slots=True)
class TensorFiles:
    """The tensor files of one folder, opened when they are first read. Only the requested ranges are read."""

    folder: Path
    _open: dict[str, Any] = field(default_factory=dict)

    def read(self, file: str, key: str, dtype: torch.dtype, index: Slices) -> torch.Tensor:
        """Read part of a tensor to the CPU.

        Args:
            file: name of the file in the folder.
            key: name of the tensor in the file.
            dtype: dtype of the tensor, which may be complex.
            index: the part; empty for the whole tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        try:
            if file not in self._open:
                self._open[file] = safe_open(str(self.folder / file), framework="pt", device="cpu")
            handle = self._open[file]
            if dtype.is_complex:
                return torch.view_as_complex(handle.get_slice(key)[(*index, slice(None))].contiguous())
            return handle.get_slice(key)[index] if index else handle.get_tensor(key)  # type: ignore[no-any-return]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.folder / file} cannot be read: {str(error).splitlines()[0]}; name an earlier checkpoint"
            ) from None

    def contents(self, file: str) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], dict[str, str]]:
        """Return the (shape, dtype) of every tensor of a file by key, and the file's metadata.

        Raises:
            CheckpointError: the file cannot be read, or holds an unknown dtype.
        """
        by_name = {name: dtype for dtype, name in _DTYPE_NAMES.items()} | {"C64": torch.complex64}
        try:
            with safe_open(str(self.folder / file), framework="pt", device="cpu") as handle:
                slices = {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118 - not a dict
                tensors = {key: (tuple(s.get_shape()), by_name[s.get_dtype()]) for key, s in slices.items()}
                return tensors, handle.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.folder / file} cannot be read as safetensors: {str(error).splitlines()[0]}; name another file"
            ) from None
        except KeyError as error:
            raise CheckpointError(
                f"{self.folder / file} holds tensors of the unsupported dtype {error}; convert them"
            ) from None


@dataclass(slots=True, kw_only=True)
class PendingCheckpoint:
    """A checkpoint that is being written.

    Attributes:
        path: its folder once it is complete.
        temporary: its folder until then.
        started_s: time.perf_counter() at its beginning.
        background: whether a thread writes while training continues.
        files: on rank 0, the files of all ranks.
        nbytes: bytes written by this rank so far.
        blocked_s: how long training has waited for it.
        failure: what went wrong on this rank.
        thread: the thread that writes.
    """

    step: int
    path: Path
    temporary: Path
    started_s: float
    background: bool
    files: list[str] = field(default_factory=list)
    nbytes: int = 0
    blocked_s: float = 0.0
    failure: str | None = None
    thread: threading.Thread | None = None

    @property
    def written(self) -> bool:
        """Whether this rank has written its files, or failed to."""
        return self.thread is None or not self.thread.is_alive()


def make_temporary_folder(path: Path) -> str:
    """Create a hidden folder beside a checkpoint's and return its name; remove unfinished ones of earlier runs.

    Args:
        path: folder of the checkpoint once it is complete.

    Raises:
        OSError: the folder cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(".step-*"):
        shutil.rmtree(stale, ignore_errors=True)
    for replaced in path.parent.glob("step-*.replaced"):
        if replaced.with_suffix("").exists():
            remove_folder(replaced)
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:12]}")
    temporary.mkdir()
    return temporary.name


def write_file(path: Path, data: bytes) -> int:
    """Write a small file and wait until it is on disk; return its size in bytes."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data)


def publish_folder(temporary: Path, path: Path, keep: int) -> None:
    """Give a complete checkpoint its name, and remove old ones.

    Args:
        temporary: the complete folder.
        path: its new name; a checkpoint of the same step is replaced.
        keep: how many of the newest checkpoints stay, at least 1.

    Raises:
        OSError: the folder cannot be renamed.
    """
    sync_folder(temporary)
    replaced = path.with_name(f"{path.name}.replaced")
    if path.exists():
        if replaced.exists():
            remove_folder(replaced)
        path.rename(replaced)  # `latest_checkpoint` still finds it if the process is killed here
    try:
        temporary.rename(path)
    except OSError:
        if replaced.exists():
            replaced.rename(path)
        raise
    sync_folder(path.parent)
    with suppress(OSError):  # the new checkpoint is valid even if an old one cannot be removed
        if replaced.exists():
            remove_folder(replaced)
        others = sorted(folder for folder in path.parent.glob("step-*") if folder != path)
        for old in others[: len(others) - max(keep, 1) + 1]:
            remove_folder(old)


def remove_folder(folder: Path) -> None:
    """Remove a checkpoint: first its name, in one step, then its files."""
    hidden = folder.with_name(f".{folder.name.lstrip('.')}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
