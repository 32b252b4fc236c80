"""One codec for every spec: frozen dataclass <-> plain JSON, with the path of an offending field in the error.

Validation is pydantic's (strict types, unknown fields refused); this file only turns its findings into one
sentence each, with a remedy.
"""

import dataclasses
import difflib
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from tutti.errors import SpecError, TuttiError

T = TypeVar("T")


@cache
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def to_data(value: Any) -> Any:
    """The plain JSON form (dicts, lists, strings, numbers) of a spec."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_data(cls: type[T], data: Any, *, source: str = "the given data") -> T:
    """Build a spec from its plain JSON form. Raises SpecError naming `source` and the field's path."""
    try:
        return _adapter(cls).validate_json(json.dumps(data), strict=True)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise SpecError(_sentence(cls, error, source)) from None
    except TuttiError as error:
        raise type(error)(f"{source}: {error}") from None


def dumps(value: Any) -> str:
    """Readable JSON text of a spec."""
    return json.dumps(to_data(value), indent=2) + "\n"


def loads(cls: type[T], text: str, *, source: str = "the given text") -> T:
    """Parse JSON text into a spec."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(
            f"{source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}; "
            "repair the file or make a new one with tutti"
        ) from None
    return from_data(cls, data, source=source)


def save(value: Any, path: Path) -> Path:
    """Write a spec to a file (parents are made) and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(value), encoding="utf-8")
    return path


def load(cls: type[T], path: Path) -> T:
    """Read a spec from a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"{path} does not exist; name an existing {cls.__name__} file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read ({error}); name a readable {cls.__name__} file") from None
    return loads(cls, text, source=str(path))


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON form: equal specs have equal digests."""
    text = json.dumps(to_data(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sentence(cls: type[Any], error: ValidationError, source: str) -> str:
    finding = error.errors()[0]
    path = ".".join(str(part) for part in finding["loc"] if part != "[key]") or "the document"
    if finding["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{source}: unknown field {path}; {_nearest(cls, str(finding['loc'][-1]))}"
    if finding["type"] in ("missing", "missing_argument"):
        return f"{source}: field {path} is missing; add it"
    return f"{source}: {path} = {finding['input']!r} is not allowed: {finding['msg'].lower()}; correct this field"


def _nearest(cls: type[Any], name: str) -> str:
    names = {f.name for c in _nested(cls, set()) for f in dataclasses.fields(c)}
    close = difflib.get_close_matches(name, sorted(names), n=1)
    return f"did you mean {close[0]!r}?" if close else "remove it"


def _nested(cls: Any, seen: set[Any]) -> set[Any]:
    """`cls` and all dataclasses its fields mention."""
    if dataclasses.is_dataclass(cls) and cls not in seen:
        seen.add(cls)
        for field in dataclasses.fields(cls):
            _nested(field.type, seen)
    for argument in getattr(cls, "__args__", ()):
        _nested(argument, seen)
    return seen
