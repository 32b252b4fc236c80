"""Tensor files in the safetensors format: written in a stream and on disk when the call returns, read by ranges.

Written here and not by the safetensors package, whose `save_file` wants all values at once and does not wait for the
disk. Here values are asked for one tensor at a time: a model may be larger than the memory that is left.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tutti.checkpoint.ranges import Index
from tutti.errors import CheckpointError

_NAMES = {
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
class Item:
    """One tensor to write. `make`: its values, asked for when their turn has come."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def stored_dtype(dtype: torch.dtype) -> str:
    """A dtype as the index writes it ("float32"). Raises CheckpointError for one that no file can hold."""
    if dtype not in _NAMES and not dtype.is_complex:
        raise CheckpointError(f"tensors of dtype {dtype} cannot be written; convert them")
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that `stored_dtype` wrote. Raises CheckpointError for an unknown one."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r} is no dtype of this torch ({torch.__version__}); use a newer one")
    return dtype


def item(key: str, tensor: torch.Tensor) -> Item:
    """A tensor to write, whose values are read when it is written."""
    return plain_item(key, tuple(tensor.shape), tensor.dtype, lambda: tensor)


def plain_item(key: str, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> Item:
    """The same with values made on demand; complex numbers become pairs, for which the format has no word."""
    if not dtype.is_complex:
        return Item(key=key, shape=shape, dtype=dtype, make=make)
    return Item(key=key, shape=(*shape, 2), dtype=dtype.to_real(), make=lambda: torch.view_as_real(make()))


def write_tensors(path: Path, items: Sequence[Item], metadata: dict[str, str] | None = None) -> int:
    """Write a file and wait until it is on disk; returns its size in bytes. Raises OSError when it cannot."""
    ordered = in_file_order(items)
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for one in ordered:
        place = [offset, offset + one.nbytes]
        header[one.key] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": place}
        offset += one.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write(file, memoryview(len(text).to_bytes(8, "little") + text))
        for one in ordered:
            _write(file, _bytes(one.make()))
        os.fsync(file.fileno())
        return file.tell()


def in_file_order(items: Sequence[Item]) -> list[Item]:
    """As a file holds them: large elements first, so that every tensor is aligned."""
    return sorted(items, key=lambda one: -one.dtype.itemsize)


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def _write(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data[:_CHUNK_NBYTES]) :]


@dataclass(slots=True)
class Files:
    """The tensor files of one folder, opened when they are first asked for. Nothing but the asked ranges is read."""

    folder: Path
    _open: dict[str, Any] = field(default_factory=dict)

    def read(self, file: str, key: str, dtype: torch.dtype, index: Index) -> torch.Tensor:
        """The values at `index` of the tensor stored as `key`, on the CPU. Raises CheckpointError."""
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
        """Shape and dtype of every tensor of a file, and the file's metadata. Raises CheckpointError."""
        by_name = {name: dtype for dtype, name in _NAMES.items()} | {"C64": torch.complex64}
        try:
            with safe_open(str(self.folder / file), framework="pt", device="cpu") as handle:
                slices = {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118 - it is no dict
                found = {key: (tuple(one.get_shape()), by_name[one.get_dtype()]) for key, one in slices.items()}
                return found, handle.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.folder / file} cannot be read as safetensors: {str(error).splitlines()[0]}; name another file"
            ) from None
        except KeyError as error:
            raise CheckpointError(
                f"{self.folder / file} holds tensors of dtype {error}, unknown here; convert them"
            ) from None
