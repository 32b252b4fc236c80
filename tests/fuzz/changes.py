"""Strategies of bad inputs: valid documents with a few structural changes, and files with changed bytes."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

Path_ = tuple[str | int, ...]

_RAW = "raw text "
RAW_TEXTS = {
    f"{_RAW}deep": "[" * 100_000 + "]" * 100_000,
    f"{_RAW}objects": '{"a":' * 5_000 + "1" + "}" * 5_000,
    f"{_RAW}digits": "9" * 5_000,
    f"{_RAW}infinite": "1e999",
    f"{_RAW}unfinished": "[",
}
"""JSON that no Python value expresses, by the text that stands for it until the document is written."""

HOSTILE_TEXTS = (
    "", " ", "x" * 300, "x" * 5_000, "a\0b", "\x1b[31mred", "\x1b]0;title\x07", "\u202egnp.exe", "\ud800", "é",
    "../../x", "/etc/nothere", "nan", "inf", "-1", "0", "1e999", "9" * 5_000, "%s%n", "{0}", "[bold]x",
    "<script>alert(1)</script>", "line\nline", "step-00000001", "float32", "replicate",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 7, 2**31, 2**53, 2**63, 2**64, 10**30, 10**400, -(10**30), 0.0, -0.0, 0.5, 1e-300, 5e-324, 1e300,
    -1e300, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
HOSTILE_VALUES = (*NUMBERS, *HOSTILE_TEXTS, *RAW_TEXTS, None, True, False, [], {}, [[]], [None], {"": ""}, [0] * 1_000)

values = st.sampled_from(range(len(HOSTILE_VALUES))).map(lambda index: copy.deepcopy(HOSTILE_VALUES[index]))
texts = st.sampled_from(HOSTILE_TEXTS) | st.text(max_size=8)


def places(value: Any, prefix: Path_ = ()) -> list[Path_]:
    """Return the paths of all parts of a document, that of the document first."""
    children: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    return [prefix, *(path for name, child in children for path in places(child, (*prefix, name)))]


def part(document: Any, path: Path_) -> Any:
    for name in path:
        document = document[name]
    return document


def _put(document: Any, path: Path_, value: Any) -> Any:
    """Put a value in a document's place; returns the document, which the value is if the path is empty."""
    if not path:
        return value
    part(document, path[:-1])[path[-1]] = value
    return document


def _drop(draw: st.DrawFn, document: Any, path: Path_) -> Any:
    if path:
        del part(document, path[:-1])[path[-1]]
    return document


def _retype(draw: st.DrawFn, document: Any, path: Path_) -> Any:
    return _put(document, path, draw(values))


def _wrap(draw: st.DrawFn, document: Any, path: Path_) -> Any:
    value = part(document, path)
    return _put(document, path, draw(st.sampled_from(([value], {"value": value}, str(value)[:100]))))


def _repeat(draw: st.DrawFn, document: Any, path: Path_) -> Any:
    """Repeat an entry of a list or an object, or the parts of one."""
    if not path:
        return document
    parent, value = part(document, path[:-1]), copy.deepcopy(part(document, path))
    if isinstance(parent, list):
        parent.insert(int(path[-1]), value)
    else:
        parent[draw(texts)] = value
    return document


def _rename(draw: st.DrawFn, document: Any, path: Path_) -> Any:
    parent = part(document, path[:-1]) if path else None
    if isinstance(parent, dict):
        parent[draw(texts)] = parent.pop(path[-1])
    return document


def _swap(draw: st.DrawFn, document: Any, path: Path_) -> Any:
    other = draw(st.sampled_from(places(document)))
    return _put(document, path, copy.deepcopy(part(document, other)))


def _scale(draw: st.DrawFn, document: Any, path: Path_) -> Any:
    """Change a number to another of its type; other values are replaced by anything."""
    value = part(document, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _retype(draw, document, path)
    number = draw(st.sampled_from(NUMBERS))
    return _put(document, path, number if type(number) is type(value) else type(value)(value + 1))


_CHANGES = (_drop, _retype, _scale, _scale, _wrap, _repeat, _rename, _swap)


@st.composite
def changed(draw: st.DrawFn, document: Any, most: int = 3) -> Any:
    """A document with up to `most` changes; `written` makes its text."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        path = draw(st.sampled_from(places(document)))
        document = draw(st.sampled_from(_CHANGES))(draw, document, path)
    return document


def written(document: Any) -> bytes:
    """Return a document as JSON, with NaN, infinite numbers and what no Python value expresses."""
    text = json.dumps(document)
    for name, raw in RAW_TEXTS.items():
        text = text.replace(json.dumps(name), raw)
    return text.encode()


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """A file that is cut, repeated, flipped, or has other bytes in it."""
    at = draw(st.integers(0, max(0, len(content) - 1)))
    other = draw(st.sampled_from((b"", b"\0", b"\xff\xfe", b"\x1b[31m", b"{", b"\x80\x05", b"\x1f\x8b", b"PK\x03\x04")))
    kind = draw(st.sampled_from(("cut", "insert", "flip", "repeat", "replace")))
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        return content[:at] + other + content[at:]
    if kind == "flip":
        return (
            content[:at] + bytes((content[at] ^ 1 << draw(st.integers(0, 7)),)) + content[at + 1 :] if content else b""
        )
    return content[:at] + content[at:] * 2 if kind == "repeat" else other
