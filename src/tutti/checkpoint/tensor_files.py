"""Files of a checkpoint: tensors in the safetensors format, and folders that get their name when they are complete.

The safetensors package's `save_file` needs all values at once and does not wait for the disk. The writer here asks for
one tensor at a time, because a model may be larger than the free memory.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import torch
import xxhash
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from tutti.background_thread import BackgroundTask
from tutti.checkpoint.checksums import checksum
from tutti.checkpoint.index import CheckpointIndex, Slices, StoredFile, index_to_text
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
_SUMS = ".sums"
"""Suffix of the file with the checksums of a rank's file."""

_HEADER_NBYTES = 100 * 10**6
"""No header is longer, as in the safetensors package."""

_CHUNK_NBYTES = 4 * 2**20
"""Bytes that are read or written at once: so few that their checksum finds them in the processor's cache."""


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


def write_tensors(path: Path, tensors: Sequence[TensorToWrite], metadata: dict[str, str] | None = None) -> StoredFile:
    """Write a safetensors file and wait until it is on disk.

    Args:
        path: the file.
        tensors: its tensors, written one at a time.
        metadata: text entries of the file's header.

    Returns:
        The file's size, and the checksums of its header and of every tensor.

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
        head = _write(file, memoryview(len(text).to_bytes(8, "little") + text))
        checksums = {tensor.key: _write(file, _bytes_of(tensor.make())) for tensor in ordered}
        os.fsync(file.fileno())
        return StoredFile(nbytes=file.tell(), checksum=head, tensors=checksums)


def in_file_order(tensors: Sequence[TensorToWrite]) -> list[TensorToWrite]:
    """Return tensors in the order of a file: large elements first, so that every tensor is aligned."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def _write(file: Any, data: memoryview) -> str:
    """Write all of `data` and return its checksum."""
    state = xxhash.xxh3_128()
    while data:
        chunk = data[:_CHUNK_NBYTES]
        chunk = chunk[: file.write(chunk)]
        state.update(chunk)
        data = data[len(chunk) :]
    return state.hexdigest()


def read_checksum(file: Any, nbytes: int) -> str:
    """Return the checksum of the next `nbytes` bytes of a file, or of fewer where it ends before."""
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(nbytes, _CHUNK_NBYTES)))
    while nbytes and (count := file.readinto(buffer[:nbytes])):
        state.update(buffer[:count])
        nbytes -= count
    return state.hexdigest()


@dataclass(frozen=True, slots=True)
class StoredValues:
    """The values of one tensor in a file: dtype, shape, and where they begin and end after the header."""

    dtype: str
    shape: tuple[Annotated[int, Field(ge=0, le=2**53)], ...]
    data_offsets: tuple[Annotated[int, Field(ge=0, le=2**53)], Annotated[int, Field(ge=0, le=2**53)]]

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a tensor file: its bytes with their length, and what they say."""

    data: bytes
    metadata: dict[str, str]
    tensors: dict[str, StoredValues]

    @property
    def checksum(self) -> str:
        return checksum(self.data)


_HEADER = TypeAdapter(dict[str, dict[str, str] | StoredValues])


def read_header(file: Any, nbytes: int) -> FileHeader:
    """Read the header of a tensor file that has `nbytes` bytes.

    Raises:
        ValueError: it is no header, or says what does not fit the file.
    """
    length = file.read(8)
    size = int.from_bytes(length, "little")
    if len(length) < 8 or not 2 <= size <= min(nbytes - 8, _HEADER_NBYTES):
        raise ValueError("it does not begin with the length of a header")
    text = file.read(size)
    try:
        entries = _HEADER.validate_json(text)
    except ValidationError as error:
        raise ValueError(f"its header is damaged: {error.errors(include_url=False)[0]['msg']}") from None
    metadata = entries.pop("__metadata__", {})
    tensors = {key: value for key, value in entries.items() if isinstance(value, StoredValues)}
    if not isinstance(metadata, dict) or len(tensors) < len(entries):
        raise ValueError("its header is damaged")
    return FileHeader(length + text, metadata, tensors)


def header_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the name of a dtype, "" if files have none, and a tensor's shape in a file; complex numbers are pairs."""
    real, stored = (dtype.to_real(), (*shape, 2)) if dtype.is_complex else (dtype, shape)
    return _DTYPE_NAMES.get(real, ""), stored


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
        index: on rank 0, the index, which lacks the files.
        asked: whether the script asked for it, so that it learns of a failure as an error.
        unsavable: whether `failure` is of the state, so that no later checkpoint could be written either.
        written_files: what this rank has written, with its checksums.
        nbytes: bytes written by this rank so far.
        blocked_s: how long training has waited for it.
        failure: what went wrong on this rank.
        writing: the task of the thread that writes.
        uploads: names of the files that this rank has written, which it uploads where there is a store.
    """

    step: int
    path: Path
    temporary: Path
    started_s: float
    background: bool
    files: list[str] = field(default_factory=list)
    index: CheckpointIndex | None = None
    asked: bool = False
    unsavable: bool = False
    written_files: dict[str, StoredFile] = field(default_factory=dict)
    nbytes: int = 0
    blocked_s: float = 0.0
    failure: str | None = None
    writing: BackgroundTask | None = None
    uploads: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Tells checkpoints of the same step apart."""
        return self.temporary.name.rpartition(".")[2]

    @property
    def written(self) -> bool:
        """Whether this rank has written its files, or failed to."""
        return self.writing is None or self.writing.done


def hidden_name(path: Path) -> str:
    """Return a new name for the hidden folder beside a checkpoint's, in which it is written."""
    return f".{path.name}.{uuid4().hex[:12]}"


def make_temporary_folder(path: Path, name: str | None = None) -> str:
    """Create a hidden folder beside a checkpoint's and return its name; remove unfinished ones of earlier runs.

    Args:
        path: folder of the checkpoint once it is complete.
        name: what `hidden_name` has returned; None: a new name.

    Raises:
        OSError: the folder cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(".step-*"):
        shutil.rmtree(stale, ignore_errors=True)
    for replaced in path.parent.glob("step-*.replaced"):
        if replaced.with_suffix("").exists():
            remove_folder(replaced)
    temporary = path.with_name(name or hidden_name(path))
    temporary.mkdir()
    return temporary.name


def write_file(path: Path, data: bytes) -> StoredFile:
    """Write a small file and wait until it is on disk; return its size and checksum."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(nbytes=len(data), checksum=checksum(data))


def write_checksums(file: Path, written: StoredFile) -> None:
    """Leave the checksums of a rank's file beside it, until rank 0 writes them into the index."""
    (file.with_name(file.name + _SUMS)).write_text(json.dumps(asdict(written)), encoding="utf-8")


def take_checksums(file: Path) -> StoredFile:
    """Read the checksums that `write_checksums` left beside a rank's file, and remove them.

    Raises:
        OSError: they are not there.
    """
    sums = file.with_name(file.name + _SUMS)
    stored = StoredFile(**json.loads(sums.read_text(encoding="utf-8")))
    sums.unlink()
    return stored


def index_text(pending: PendingCheckpoint, files: Mapping[str, StoredFile]) -> bytes:
    """On rank 0: return the contents of the index.

    Args:
        pending: the checkpoint, whose files are all written.
        files: the files of ranks, by name.
    """
    assert pending.index is not None
    return index_to_text(replace(pending.index, files={**pending.written_files, **files})).encode()


def publish_folder(temporary: Path, path: Path) -> None:
    """Give a complete checkpoint its name.

    Args:
        temporary: the complete folder.
        path: its new name; a checkpoint of the same step is replaced.

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
