"""Encode the values that ranks tell each other: JSON and the raw bytes of tensors. Decoding runs no code of a sender.

A pickle can call any function of the process that reads it; here only the types below exist. Classes are looked up
among the modules that the reader has loaded already, and only dataclasses, named tuples, enumerations and tutti's
errors are made.
"""

import dataclasses
import enum
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

import tutti.errors as errors
from tutti.errors import SpecError, TuttiError

MAX_NBYTES = 2**30
"""The largest message of one rank, in bytes."""

_HEAD_NBYTES = 8


def encode(value: Any, *, limit: int | None = None) -> bytes:
    """Return a value as bytes that `decode` reads back.

    Plain values, containers, tensors, arrays, paths, dataclasses, named tuples, enumerations and tutti's errors can be
    sent. Tensors arrive contiguous and without gradient; mappings of other classes arrive as dicts.

    Args:
        value: the value.
        limit: the most bytes; None: `MAX_NBYTES`.

    Raises:
        SpecError: some part of the value is of a type that cannot be sent, or the message is larger than the limit.

    Examples:
        >>> decode(encode({"ranks": (0, 1), "mean": 0.5}))
        {'ranks': (0, 1), 'mean': 0.5}
    """
    blobs: list[bytes | memoryview] = []
    tree = _Encoder(blobs).of(value)
    text = json.dumps([[len(blob) for blob in blobs], tree], separators=(",", ":")).encode("ascii")
    nbytes = _HEAD_NBYTES + len(text) + sum(map(len, blobs))
    limit = MAX_NBYTES if limit is None else limit
    if nbytes > limit:
        raise SpecError(
            f"a value for other ranks takes {nbytes / 2**20:.0f} MiB; at most {limit // 2**20} MiB can be sent at "
            "once: send less, or write it to a file"
        )
    return b"".join((len(text).to_bytes(_HEAD_NBYTES, "little"), text, *blobs))


def decode(message: bytes | bytearray | memoryview, *, limit: int | None = None) -> Any:
    """Return the value of a message.

    Args:
        message: what `encode` has returned on some rank.
        limit: the most bytes; None: `MAX_NBYTES`.

    Raises:
        SpecError: it is no such message.
    """
    view = memoryview(message)
    try:
        end = _HEAD_NBYTES + int.from_bytes(view[:_HEAD_NBYTES], "little")
        if not _HEAD_NBYTES < end <= len(view) <= (MAX_NBYTES if limit is None else limit):
            raise ValueError(f"its length is {len(view)} bytes")
        lengths, tree = json.loads(bytes(view[_HEAD_NBYTES:end]))
        blobs = []
        for length in lengths:
            if not isinstance(length, int) or not 0 <= length <= len(view) - end:
                raise ValueError("a part is longer than the message")
            blobs.append(view[end : end + length])
            end += length
        if end != len(view):
            raise ValueError("parts and length differ")
        return _Decoder(blobs).of(tree)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, RuntimeError) as error:
        raise SpecError(
            f"a message of another rank cannot be read ({type(error).__name__}: {error}); run the same version of "
            "tutti and of the script on all hosts"
        ) from None


class _Encoder:
    """Makes a JSON tree of a value. Every node that is no plain value is a list whose first entry is its kind.

    Args:
        blobs: takes the bytes that do not fit in JSON.
    """

    def __init__(self, blobs: list[bytes | memoryview]) -> None:
        self._blobs = blobs

    def of(self, value: Any) -> Any:
        """Return the tree of a value."""
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if abs(value) < 2**63 else ["int", hex(value)]
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, *map(self.of, value)]
        if kind is dict:
            return self._mapping(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        return self._scalar(value) if kind in _SCALARS else self._instance(value)

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        if all(type(key) is str for key in value):
            return ["names", {key: self.of(entry) for key, entry in value.items()}]
        return ["dict", *([self.of(key), self.of(entry)] for key, entry in value.items())]

    def _blob(self, data: bytes | memoryview) -> int:
        self._blobs.append(data)
        return len(self._blobs) - 1

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.is_quantized or hasattr(tensor, "to_local"):
            raise SpecError(
                f"a {'DTensor' if hasattr(tensor, 'to_local') else tensor.layout} cannot be sent to other ranks; send "
                "a dense tensor: tensor.to_dense(), or tensor.to_local()"
            )
        dtype, shape, device = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type
        if device == "meta":
            return ["tensor", dtype, shape, device, self._blob(b"")]
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = memoryview(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""  # type: ignore[arg-type]
        return ["tensor", dtype, shape, device, self._blob(data)]

    def _scalar(self, value: Any) -> Any:
        name = _SCALARS[type(value)]
        if name in ("bytes", "bytearray"):
            return [name, self._blob(bytes(value))]
        if name == "complex":
            return [name, value.real, value.imag]
        if name == "size":
            return [name, *value]
        if name in ("range", "slice"):
            return [name, self.of(value.start), self.of(value.stop), self.of(value.step)]
        return [name, str(value).removeprefix("torch.")]

    def _instance(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, enum.Enum):
            return ["enum", *_name(kind), value.name]
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject or value.dtype.names or isinstance(value, np.ma.MaskedArray):
                raise SpecError(
                    "an array of objects, with named fields or with a mask cannot be sent to other ranks; send arrays "
                    "of numbers, or a list"
                )
            data = self._blob(np.ascontiguousarray(value).tobytes())
            return ["array", value.dtype.str, list(value.shape), isinstance(value, np.generic), data]
        if dataclasses.is_dataclass(value):
            entries = {entry.name: self.of(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
            return ["data", *_name(kind), entries]
        if isinstance(value, tuple):
            parts = map(self.of, value)
            return ["named", *_name(kind), *parts] if hasattr(kind, "_fields") else ["tuple", *parts]
        if isinstance(value, PurePath):
            return ["path", str(value)]
        if isinstance(value, TuttiError) and kind.__module__ == errors.__name__:
            return ["error", kind.__name__, self.of(list(map(str, value.args))), self._mapping(vars(value))]
        if isinstance(value, Mapping):
            return self._mapping(value)
        plain: Any
        for plain in (str, int, float, list, set, frozenset):
            if isinstance(value, plain):
                return self.of(plain(value))
        raise SpecError(
            f"a value of type {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks; use numbers, text, "
            "tensors, and lists, tuples, dicts or dataclasses of them"
        )


_SCALARS: dict[type, str] = {
    bytes: "bytes",
    bytearray: "bytearray",
    complex: "complex",
    range: "range",
    slice: "slice",
    torch.dtype: "dtype",
    torch.device: "device",
    torch.Size: "size",
}


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _class(module: Any, name: Any) -> type:
    """Return a class of a module that this process has loaded. Nothing is imported, because importing runs code."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise TypeError(f"{module}.{name} is no class")
    return found


class _Decoder:
    """Makes the value of a JSON tree.

    Args:
        blobs: the bytes that the tree refers to by number.
    """

    def __init__(self, blobs: list[memoryview]) -> None:
        self._blobs = blobs

    def of(self, tree: Any) -> Any:
        """Return the value of a tree."""
        if not isinstance(tree, list):
            if isinstance(tree, dict):
                raise TypeError("an object without a kind")
            return tree
        return _KINDS[tree[0]](self, *tree[1:])

    def mapping(self, *entries: Any) -> dict[Any, Any]:
        return {self.of(key): self.of(entry) for key, entry in entries}

    def names(self, entries: dict[str, Any]) -> dict[str, Any]:
        return {key: self.of(entry) for key, entry in entries.items()}

    def blob(self, number: int) -> memoryview:
        return self._blobs[number]

    def tensor(self, dtype: str, shape: list[int], device: str, number: int) -> torch.Tensor:
        kind = getattr(torch, dtype)
        if not isinstance(kind, torch.dtype) or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise TypeError(f"no tensor of {dtype} and shape {shape}")
        if device == "meta":
            return torch.empty(shape, dtype=kind, device=device)
        data = self.blob(number)
        if not len(data):
            return torch.empty(shape, dtype=kind) if 0 in shape else self._refuse(shape)
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).view(shape)
        return values if device == "cpu" else values.to(device)

    def _refuse(self, shape: list[int]) -> torch.Tensor:
        raise ValueError(f"a tensor of shape {shape} without values")

    def array(self, dtype: str, shape: list[int], scalar: bool, number: int) -> Any:
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError("an array of objects")
        values = np.frombuffer(bytearray(self.blob(number)), dtype=kind).reshape(shape)
        return values[()] if scalar else values

    def data(self, module: str, name: str, entries: dict[str, Any]) -> Any:
        kind = _class(module, name)
        fields = {entry.name for entry in dataclasses.fields(kind)}
        if fields != set(entries):
            raise ValueError(f"{name} has the fields {sorted(fields)}, the message {sorted(entries)}")
        values = self.names(entries)
        if issubclass(kind, Mapping):  # such as the outputs of models of Hugging Face, which fill themselves
            return kind(**values)
        made = object.__new__(kind)
        for key, value in values.items():
            object.__setattr__(made, key, value)
        return made

    def named(self, module: str, name: str, *parts: Any) -> Any:
        kind: Any = _class(module, name)
        if not issubclass(kind, tuple) or len(parts) != len(kind._fields):
            raise TypeError(f"{name} is no named tuple of {len(parts)} fields")
        return tuple.__new__(kind, map(self.of, parts))

    def error(self, name: str, words: Any, attributes: Any) -> TuttiError:
        kind = getattr(errors, name)
        if not isinstance(kind, type) or not issubclass(kind, TuttiError):
            raise TypeError(f"{name} is no error of tutti's")
        made: TuttiError = kind.__new__(kind)
        made.args = tuple(self.of(words))
        vars(made).update(self.of(attributes))
        return made

    def enumeration(self, module: str, name: str, member: str) -> Any:
        kind = _class(module, name)
        if not issubclass(kind, enum.Enum):
            raise TypeError(f"{name} is no enumeration")
        return kind[member]

    def dtype(self, name: str) -> torch.dtype:
        found = getattr(torch, name)
        if not isinstance(found, torch.dtype):
            raise TypeError(f"{name} is no dtype")
        return found


_KINDS: dict[str, Callable[..., Any]] = {
    "list": lambda decoder, *parts: [decoder.of(part) for part in parts],
    "tuple": lambda decoder, *parts: tuple(decoder.of(part) for part in parts),
    "set": lambda decoder, *parts: {decoder.of(part) for part in parts},
    "frozenset": lambda decoder, *parts: frozenset(decoder.of(part) for part in parts),
    "names": _Decoder.names,
    "dict": _Decoder.mapping,
    "int": lambda decoder, text: int(text, 16),
    "bytes": lambda decoder, number: bytes(decoder.blob(number)),
    "bytearray": lambda decoder, number: bytearray(decoder.blob(number)),
    "complex": lambda decoder, real, imaginary: complex(real, imaginary),
    "range": lambda decoder, *ends: range(*map(decoder.of, ends)),
    "slice": lambda decoder, *ends: slice(*map(decoder.of, ends)),
    "dtype": _Decoder.dtype,
    "device": lambda decoder, name: torch.device(name),
    "size": lambda decoder, *sizes: torch.Size(sizes),
    "path": lambda decoder, text: Path(text),
    "error": _Decoder.error,
    "tensor": _Decoder.tensor,
    "array": _Decoder.array,
    "data": _Decoder.data,
    "named": _Decoder.named,
    "enum": _Decoder.enumeration,
}
"""How each kind of node is read."""
