"""The layers: which part of tutti may import which, and which libraries the pure parts may stand on."""

import sys

from house.tree import imports

ALLOWED: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "machine": frozenset(),
    "spec": frozenset({"errors"}),
    "predict": frozenset({"errors", "spec"}),
    "plan": frozenset({"errors", "spec", "predict"}),
    "describe": frozenset({"errors", "machine", "spec", "compress", "collectives"}),
    "validate": frozenset({"errors", "spec", "predict", "describe"}),
    "optim": frozenset({"errors", "spec"}),
    "data": frozenset({"errors", "machine", "spec"}),
    "nn": frozenset({"errors", "spec"}),
    "compress": frozenset({"errors", "spec", "collectives"}),
    "collectives": frozenset({"errors"}),
    "runtime": frozenset({"errors", "machine", "spec", "nn", "optim", "data", "compress", "collectives"}),
    "verify": frozenset({"errors", "spec", "nn", "optim", "data", "compress", "collectives", "runtime", "describe"}),
    "launch": frozenset({"errors", "spec"}),
    "lab": frozenset({"errors", "spec"}),
    "report": frozenset({"errors", "spec"}),
    "bench": frozenset(
        {
            "errors",
            "spec",
            "predict",
            "plan",
            "describe",
            "validate",
            "nn",
            "optim",
            "data",
            "compress",
            "collectives",
            "runtime",
            "verify",
            "launch",
            "lab",
            "report",
        }
    ),
}
"""Layer -> the layers below it that it may import (itself always). `cli` stands on all; nobody imports it."""

ALLOWED["cli"] = ALLOWED["bench"] | {"bench", ""}
ALLOWED[""] = frozenset({"errors", "spec", "nn", "optim", "data", "runtime"})
"""The root, tutti/__init__.py: the public names, loaded when asked for."""

LIBRARIES: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "spec": frozenset({"pydantic"}),
    "predict": frozenset({"numpy"}),
    "plan": frozenset({"numpy"}),
    "validate": frozenset({"numpy"}),
}
"""Pure layers -> the only libraries beside the standard one they may import: none of them loads torch."""

EFFECTS: dict[str, frozenset[str]] = {
    "predict": frozenset({"io", "os", "pathlib", "random", "socket", "subprocess", "tempfile", "time"}),
}
"""Layer -> parts of the standard library it may not import: predict touches no clock and no file."""


def layer_of(module: str) -> str:
    """The layer of a dotted name: `tutti.spec.plan` is of `spec`; the root's is the empty string."""
    part = module.partition(".")[2].partition(".")[0]
    return part if part in ALLOWED else ""


def upward_imports(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """A sentence for each import that does not point downward, or that a pure layer may not have."""
    own = layer_of(module)
    findings = []
    for line, name in imports(source, module, is_package=is_package):
        top = name.partition(".")[0]
        if top == "tutti":
            target = layer_of(name)
            if target not in (own, *ALLOWED[own]):
                findings.append(f"line {line}: {own or 'tutti'} may not import {target or 'the root'} ({name})")
        elif top in EFFECTS.get(own, ()) or _foreign(top, own):
            findings.append(f"line {line}: {own} may not import {top}")
    return findings


def _foreign(top: str, layer: str) -> bool:
    """Whether a library is none of those a pure layer stands on."""
    return layer in LIBRARIES and top not in sys.stdlib_module_names and top not in LIBRARIES[layer]
