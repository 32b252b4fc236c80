"""The vocabulary: retired words, and names that may have only one meaning."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from house.tree import name_of, syntax_nodes

RETIRED: dict[str, str] = {
    "apart": "diverged, piecewise",
    "alone": "asynchronous, uncontended",
    "courier": "comm_thread",
    "crowd": "oversubscription",
    "desk": "communicator",
    "dial": "relaxation",
    "errand": "work",
    "flight": "work, handle",
    "gauge": "tolerance",
    "lane": "channel, branch",
    "looks": "gradient_statistics",
    "meeting": "rendezvous",
    "momenta": "momentum_compression",
    "pace": "relative_speed, the time that is meant",
    "parcel": "handle, message",
    "party": "local_group, shard_group",
    "seat": "host_group",
    "travel": "transfer, delayed",
    "travelling": "delayed, pending",
    "wards": "relay_ranks",
    "way": "the noun that is meant: strategy, direction, route",
    "wish": "option",
}
"""Retired word -> the standard term. No identifier and no file name may contain the word in any of its forms."""

IN_MESSAGES = frozenset(
    {"courier", "crowd", "desk", "dial", "errand", "gauge", "lane", "momenta", "parcel", "seat", "wards", "wish"}
)
"""Retired words that plain English does not need either: no message to the user may contain a form of them."""

_SIMD_FILES = ("cpu_kernels", "blocks", "one_bit", "qsgd")

OTHER_MEANINGS: dict[tuple[str, str], str] = {
    (f"src/tutti/compression/{file}.py", "lane"): "a lane of a SIMD register" for file in _SIMD_FILES
}
"""(File, word) -> the standard meaning that the word has in this file."""

_BETWEEN_WORDS = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])")
_NO_LETTERS = re.compile(r"[^A-Za-z]+")
_ANY_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_CLASS = re.compile(r"^class (\w+)[:(]", re.MULTILINE)


def _forms(word: str) -> set[str]:
    """Return a word with its plural, "-ed" and "-ing" forms: party, parties; crowd, crowded; dial, dialled, dialing."""
    stem = word[:-1] if word.endswith("e") else word
    past = word[:-1] + "i" if word.endswith("y") and word[-2] not in "aeiou" else stem
    plural = f"{past}es" if past.endswith(("i", "s", "sh", "ch", "x")) else f"{word}s"
    forms = {word, plural, f"{past}ed", f"{stem}ing", f"{stem}ings"}
    return forms | {f"{word}led", f"{word}ling"} if word.endswith("l") else forms


_RETIRED_FORMS = {form: word for word in RETIRED for form in _forms(word)}


def _has_retired_word(text: str) -> bool:
    """Return whether a retired word occurs anywhere, also in comments and docstrings; only such files are parsed."""
    return not _RETIRED_FORMS.keys().isdisjoint(word.lower() for word in _ANY_WORD.findall(text))


@cache
def _retired_in(text: str, separator: re.Pattern[str]) -> tuple[str, ...]:
    """Return the retired words of which the parts of a text are forms."""
    parts = (part.lower() for part in separator.split(text))
    return tuple(_RETIRED_FORMS[part] for part in parts if part in _RETIRED_FORMS)


def identifiers(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every identifier in a module: names, attributes, parameters, keywords."""
    for node in syntax_nodes(source):
        for field in ("name", "id", "arg", "attr", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name


def retired_identifiers(source: str, name: str) -> list[str]:
    """Return a sentence for each identifier of a file, and for its own name, that contains a retired word."""
    if not _has_retired_word(f"{name}\n{source}"):
        return []
    findings = {
        f"line {line}: {identifier}: write {RETIRED[word]}"
        for line, identifier in [(1, Path(name).stem), *identifiers(source)]
        for word in _retired_in(identifier, _BETWEEN_WORDS)
        if (name, word) not in OTHER_MEANINGS
    }
    return sorted(findings)


def retired_in_messages(source: str, name: str) -> list[str]:
    """Return a sentence for each text of a file, without docstrings, that contains a retired word."""
    if not _has_retired_word(source):
        return []
    nodes = syntax_nodes(source)
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    findings = {
        f"line {node.lineno}: {word!r} in a message: write {RETIRED[word]}"
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        for word in _retired_in(node.value, _NO_LETTERS)
        if word in IN_MESSAGES and (name, word) not in OTHER_MEANINGS
    }
    return sorted(findings)


def repeated_classes(files: list[Path]) -> list[str]:
    """Return a sentence for each class name that several files define at module level."""
    places = defaultdict(list)
    for path in files:
        for name in _CLASS.findall(path.read_text(encoding="utf-8")):
            places[name].append(name_of(path))
    return [
        f"class {name} has several meanings: {', '.join(where)}" for name, where in places.items() if len(where) > 1
    ]


def repeated_files(files: list[Path]) -> list[str]:
    """Return a sentence for each file name that occurs in several folders. A command's file has the command's name."""
    places = defaultdict(list)
    for path in files:
        if path.name not in ("__init__.py", "__main__.py") and path.parent.name not in ("cli", "commands"):
            places[path.name].append(name_of(path.parent))
    return [f"{name} stands in {', '.join(where)}" for name, where in places.items() if len(where) > 1]
