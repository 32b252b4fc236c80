"""The vocabulary: retired words, and names that may have only one meaning."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from house.tree import name_of

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
"""Retired word -> the standard term. No identifier and no file name may contain the word, in singular or plural."""

IN_MESSAGES = frozenset(
    {"courier", "crowd", "desk", "dial", "errand", "gauge", "lane", "momenta", "parcel", "seat", "wards", "wish"}
)
"""Retired words that plain English does not need either: no message to the user may contain them."""

_SIMD_FILES = ("cpu_kernels", "blocks", "one_bit", "qsgd")

OTHER_MEANINGS: dict[tuple[str, str], str] = {
    (f"src/tutti/compression/{file}.py", "lane"): "a lane of a SIMD register" for file in _SIMD_FILES
}
"""(File, word) -> the standard meaning that the word has in this file."""

_WORD = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])")
_SENTENCE = re.compile(r"[A-Za-z]+")


def _retired(word: str) -> str | None:
    """Return the retired word of which this is a form, or None."""
    lower = word.lower()
    return next((form for form in (lower, lower.removesuffix("s"), lower.removesuffix("es")) if form in RETIRED), None)


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every identifier in a module: names, attributes, parameters, keywords."""
    for node in ast.walk(tree):
        for field in ("name", "id", "arg", "attr", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name


def retired_identifiers(source: str, name: str) -> list[str]:
    """Return a sentence for each identifier of a file, and for its own name, that contains a retired word."""
    findings = []
    for line, identifier in [(1, Path(name).stem), *identifiers(ast.parse(source))]:
        for part in _WORD.split(identifier):
            word = _retired(part)
            if word and (name, word) not in OTHER_MEANINGS:
                findings.append(f"line {line}: {identifier}: write {RETIRED[word]}")
    return sorted(set(findings))


def retired_in_messages(source: str, name: str) -> list[str]:
    """Return a sentence for each text of a file, without docstrings, that contains a retired word."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    findings = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            for part in _SENTENCE.findall(node.value):
                word = _retired(part)
                if word in IN_MESSAGES and (name, word) not in OTHER_MEANINGS:
                    findings.append(f"line {node.lineno}: {part!r} in a message: write {RETIRED[word]}")
    return sorted(set(findings))


def repeated_classes(files: list[Path]) -> list[str]:
    """Return a sentence for each class name that several files define at module level."""
    places = defaultdict(list)
    for path in files:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name_of(path))
    return [
        f"class {name} has several meanings: {', '.join(where)}" for name, where in places.items() if len(where) > 1
    ]


def repeated_files(files: list[Path]) -> list[str]:
    """Return a sentence for each file name that occurs in several folders. A command's file has the command's name."""
    places = defaultdict(list)
    for path in files:
        if path.name not in ("__init__.py", "__main__.py") and path.parent.name != "cli":
            places[path.name].append(name_of(path.parent))
    return [f"{name} stands in {', '.join(where)}" for name, where in places.items() if len(where) > 1]
