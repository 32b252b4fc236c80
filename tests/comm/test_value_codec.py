"""Values between ranks: what can be sent arrives equal, and no message runs code or takes memory without bound."""

import collections
import enum
import json
import math
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tutti.comm import value_codec
from tutti.comm.value_codec import decode, encode
from tutti.errors import CheckpointError, DamagedCheckpointError, PlanError, SpecError, TuttiError


class Point(NamedTuple):
    x: int
    y: float


class Kind(enum.Enum):
    A = "a"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    names: dict[str, Any]
    count: int = 0
    derived: int = field(default=7, init=False)


VALUES = [
    None, True, 0, -1, 2**62, 2**200, -(2**70), 1.5, "é\ud800\x1b", b"\x00\xff", bytearray(b"a"), 1 + 2j,
    [], (), {}, set(), frozenset({(1, "a")}), [1, (2, [3])], {"a": 1}, {(1, 2): {3}}, {"": None}, {1: 2, "1": 3},
    range(1, 9, 2), slice(1, None), torch.float16, torch.device("cpu"), torch.Size([2, 3]), Path("/a/b"),
    Point(1, 2.5), Kind.A, View(names={"a": (1, Kind.A)}, count=3), [["list"], ["tensor", "float32"]],
    np.float32(1.5), np.datetime64("2026-01-01"), math.inf,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_arrives_equal_and_of_its_type(value: Any) -> None:
    read = decode(encode(value))
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("error", [CheckpointError("no"), PlanError("no", code="a"), DamagedCheckpointError("no", "b")])
def test_an_error_of_ours_arrives_with_what_it_holds(error: TuttiError) -> None:
    read = decode(encode({"failure": error}))["failure"]
    assert (type(read), read.args, vars(read)) == (type(error), error.args, vars(error))


@pytest.mark.parametrize("name", ["sys", "types", "Exception", "TuttiErrors"])
def test_no_other_error_is_made(name: str) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        decode(_message(["error", name, ["list"], ["names", {}]]))


def test_nan_arrives() -> None:
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_a_tensor_arrives_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 9).to(dtype)
    read = decode(encode([tensor.transpose(0, -1) if tensor.ndim else tensor]))[0]
    assert torch.equal(read, tensor.transpose(0, -1) if tensor.ndim else tensor)
    assert read.dtype == dtype
    read.zero_()  # its memory is its own


def test_arrays_and_mappings_of_other_classes_arrive() -> None:
    array = np.arange(6.0).reshape(2, 3)[:, ::2]
    assert np.array_equal(decode(encode(array)), array)
    assert decode(encode(collections.OrderedDict(a=1))) == {"a": 1}
    assert decode(encode(torch.max(torch.eye(2), 0)))[0].tolist() == [1, 1]


class Unknown:
    pass


@pytest.mark.parametrize("value", [Unknown(), lambda: 0, np.array([Unknown()]), torch.eye(2).to_sparse()])
def test_what_cannot_be_sent_is_refused_with_its_type(value: Any) -> None:
    with pytest.raises(SpecError, match="cannot be sent to other ranks; "):
        encode({"a": [value]})


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


def _message(tree: Any, blobs: tuple[bytes, ...] = (), lengths: Any = None) -> bytes:
    text = json.dumps([[len(blob) for blob in blobs] if lengths is None else lengths, tree]).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(blobs)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        pickle.dumps(Bomb()),
        b"\xff" * 40,
        encode([1, 2])[:-1],
        encode([1, 2]) + b"x",
        _message(["data", "subprocess", "Popen", {"args": "true"}]),
        _message(["data", "os", "system", {"command": "true"}]),
        _message(["named", "builtins", "tuple", 1]),
        _message(["enum", "os", "environ", "PATH"]),
        _message(["data", "no_such_module", "A", {}]),
        _message(["data", "pydantic.main", "BaseModel", {}]),
        _message(["data", __name__, "View", {"names": ["names", {}]}]),
        _message(["dtype", "load"]),
        _message(["tensor", "load", [2], "cpu", 0], (b"12345678",)),
        _message(["tensor", "float32", [2**40], "cpu", 0], (b"12345678",)),
        _message(["tensor", "float32", [2**40], "cpu", 0], (b"",)),
        _message(["tensor", "float32", [-1], "cpu", 0], (b"12345678",)),
        _message(["array", "|O", [1], False, 0], (b"12345678",)),
        _message(["bytes", 3]),
        _message(1, lengths=[2**40]),
        _message(1, lengths=[-1]),
        _message(["what", 1]),
        _message({"a": 1}),
        (9).to_bytes(8, "little") + b"[[],[[[[[",
        (200002).to_bytes(8, "little") + b"[" * 200002,
        (2**62).to_bytes(8, "little") + b"[[],1]",
    ],
)
def test_a_false_message_is_refused_in_words(message: bytes) -> None:
    with pytest.raises(SpecError, match="a message of another rank cannot be read"):
        decode(message)


def test_a_message_over_the_limit_is_neither_made_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    message = encode(b"x" * 2000)
    monkeypatch.setattr(value_codec, "MAX_NBYTES", 1000)
    with pytest.raises(SpecError, match="at most 0 MiB can be sent"):
        encode(b"x" * 2000)
    with pytest.raises(SpecError, match="cannot be read"):
        decode(message)
