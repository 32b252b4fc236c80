"""Conversion between this package's frozen dataclasses and plain JSON. Errors name the path of the offending field.

pydantic validates: types are strict, and unknown fields and numbers that are not finite are refused. This module turns
each finding into one sentence with a remedy.
"""

import dataclasses
import difflib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from tutti.config.safe_text import shorten
from tutti.errors import SpecError, TuttiError

T = TypeVar("T")

_STRICT = with_config(ConfigDict(extra="forbid", allow_inf_nan=False))


@cache
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    for part in _nested(cls, set()):
        _STRICT(part)
    return TypeAdapter(cls)


def build_validators(*classes: type[Any]) -> None:
    """Build the validators of these dataclasses, which takes about 0.05 s each and is otherwise done at first use."""
    for cls in classes:
        _adapter(cls)  # type: ignore[arg-type]


def to_data(value: Any) -> Any:
    """Return the plain JSON form (dicts, lists, strings, numbers) of a value."""
    return _adapter(type(value)).dump_python(value, mode="json")  # type: ignore[arg-type]


def from_data(cls: type[T], data: Any, *, source: str = "the given data") -> T:
    """Build a value from its plain JSON form.

    Args:
        cls: dataclass of the value.
        data: dicts, lists, strings and numbers.
        source: where the data came from, for error messages.

    Raises:
        SpecError: the data does not have the form of `cls`. Errors of the class's own checks pass through. Both name
            `source` and the path of the field.
    """
    _check_version(cls, data, source)
    try:
        return _adapter(cls).validate_json(json.dumps(data), strict=True)  # type: ignore[no-any-return, arg-type]
    except RecursionError:
        raise SpecError(f"{source} is nested too deeply to be a {cls.__name__}; name another file") from None
    except ValidationError as error:
        raise _explained(cls, error, source) from None
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:  # a check that expects another type
        raise SpecError(
            f"{source} does not have the form of a {cls.__name__} ({type(error).__name__}: {error}); correct it, or "
            "make it again with tutti"
        ) from None


def dumps(value: Any) -> str:
    """Return the readable JSON text of a value.

    Raises:
        SpecError: a number is not finite, which JSON cannot express.
    """
    try:
        return json.dumps(to_data(value), indent=2, allow_nan=False) + "\n"
    except ValueError:
        raise SpecError(
            f"a {type(value).__name__} holds a number that is not finite, which JSON cannot express; leave it out or "
            "use null"
        ) from None


def loads(cls: type[T], text: str, *, source: str = "the given text") -> T:
    """Parse JSON text into a value of class `cls`.

    Raises:
        SpecError: the text is not JSON, or does not have the form of `cls`.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise SpecError(f"{source} is nested too deeply to be a {cls.__name__}; name another file") from None
    except json.JSONDecodeError as error:
        raise SpecError(
            f"{source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}; "
            "repair the file or make a new one with tutti"
        ) from None
    except ValueError:  # Python's limit on the digits of a whole number
        raise SpecError(f"{source} has a number of too many digits; correct it, or name another file") from None
    return from_data(cls, data, source=source)


def save(value: Any, path: Path) -> Path:
    """Write a value to a file, creating its parent folders, and return the path.

    Who reads the file meanwhile, such as another rank, gets the whole text from before or from after.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text, target = dumps(value), path.resolve()
    if target.exists() and not target.is_file():  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return path
    partial = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load(cls: type[T], path: Path) -> T:
    """Read a value of class `cls` from a file.

    Raises:
        SpecError: the file cannot be read, is not JSON, or does not have the form of `cls`.
    """
    if path.suffix == ".py":
        raise SpecError(f"{path} is a Python script; name a {cls.__name__} file, which tutti writes as JSON")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"{path} does not exist; name an existing {cls.__name__} file") from None
    except (OSError, ValueError) as error:  # also a path with a null byte, and text that is not UTF-8
        raise SpecError(f"{path} cannot be read ({error}); name a readable {cls.__name__} file") from None
    return loads(cls, text, source=str(path))


def digest(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON form: equal values have equal digests."""
    text = json.dumps(to_data(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_version(cls: type[Any], data: Any, source: str) -> None:
    """Refuse another version of the format, before pydantic finds its fields wrong one by one."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if "version" not in fields or not isinstance(data, dict) or "version" not in data:
        return
    known = fields["version"].default
    if data["version"] != known:
        raise SpecError(
            f"{source}: version = {shorten(repr(data['version']))}, but this tutti reads {cls.__name__} version "
            f"{known}; make the file again with this tutti"
        )


def _explained(cls: type[Any], error: ValidationError, source: str) -> TuttiError:
    """Turn pydantic's first finding into an error: one sentence with the field's path and the remedy."""
    finding = error.errors()[0]
    location = tuple(str(part) for part in finding["loc"] if part != "[key]")
    path = shorten(".".join(location))
    raised = finding.get("ctx", {}).get("error")
    if isinstance(raised, TuttiError):
        return type(raised)(f"{source}: {path}: {raised}" if path else f"{source}: {raised}")
    if finding["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return SpecError(f"{source}: unknown field {path}; {_nearest(cls, location)}")
    if finding["type"] in ("missing", "missing_argument"):
        return SpecError(f"{source}: field {path} is missing from this {cls.__name__}; add it, or name another file")
    message = finding["msg"][0].lower() + finding["msg"][1:]
    if finding["loc"] and finding["loc"][-1] == "[key]":
        return SpecError(f"{source}: {path} is not allowed: {message}; rename or remove this key")
    shown = f"{path or 'the document'} = {shorten(repr(finding['input']))}"
    return SpecError(f"{source}: {shown} is not allowed: {message}; correct this field")


def _nearest(cls: type[Any], location: tuple[str, ...]) -> str:
    """Suggest a remedy for an unknown field: the closest name among its siblings, or else the path of one elsewhere."""
    parent, name = tuple(part for part in location[:-1] if not part.isdigit()), location[-1]
    paths = list(_field_paths(cls))
    siblings = {path[-1]: path[-1] for path in paths if path[:-1] == parent}
    anywhere = {path[-1]: ".".join(path) for path in reversed(paths)}
    for candidates in (siblings, anywhere):
        close = difflib.get_close_matches(name, sorted(candidates), n=1)
        if close:
            return f"did you mean {candidates[close[0]]!r}?"
    return "remove it"


def _field_paths(cls: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all fields, outermost first. Positions in lists are left out."""
    fields = dataclasses.fields(cls)
    yield from ((*prefix, field.name) for field in fields)
    for field in fields:
        for part in _direct(field.type):
            yield from _field_paths(part, (*prefix, field.name))


def _direct(hint: Any) -> list[type[Any]]:
    """Return the dataclasses that a type hint names, also within a tuple, dict or union."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return [hint]
    return [part for argument in getattr(hint, "__args__", ()) for part in _direct(argument)]


def _nested(cls: type[Any], seen: set[type[Any]]) -> set[type[Any]]:
    """Return `cls` and every dataclass within it."""
    if cls not in seen:
        seen.add(cls)
        for field in dataclasses.fields(cls):
            for part in _direct(field.type):
                _nested(part, seen)
    return seen
