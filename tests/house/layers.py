"""The layers: which part of tutti may import which other parts, and which libraries the pure parts may use."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from house.tree import imports, module_name, syntax_nodes

_BASE = frozenset(
    {"errors", "machine", "host_memory", "host_topology", "direct_io", "float32_precision", "environment", "config"}
    | {"background_thread", "event_record", "stack_watch", "surviving_rank", "comm", "compression", "optim", "data"}
    | {"nn"}
)

ALLOWED: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "machine": frozenset(),
    "host_memory": frozenset(),
    "host_topology": frozenset(),
    "network_interfaces": frozenset({"errors"}),
    "direct_io": frozenset({"errors"}),
    "float32_precision": frozenset(),
    "background_thread": frozenset(),
    "event_record": frozenset({"errors"}),
    "stack_watch": frozenset({"errors", "event_record"}),
    "process_stacks": frozenset({"config", "stack_watch"}),
    "surviving_rank": frozenset(),
    "environment": frozenset({"errors", "config"}),
    "job_secret": frozenset({"errors", "environment"}),
    "terminal": frozenset({"config"}),
    "config": frozenset({"errors"}),
    "cost_model": frozenset({"errors", "config"}),
    "planner": frozenset({"errors", "config", "cost_model"}),
    "comm": frozenset({"errors", "machine", "host_topology", "network_interfaces", "environment", "config"})
    | {"event_record", "stack_watch", "surviving_rank", "job_secret"},
    "compression": frozenset({"errors", "config", "comm"}),
    "profile": frozenset({"errors", "machine", "direct_io", "float32_precision", "config", "compression", "comm"}),
    "validation": frozenset({"errors", "config", "cost_model", "profile"}),
    "optim": frozenset({"errors", "config"}),
    "data": frozenset({"errors", "machine", "config", "stack_watch", "process_stacks"}),
    "nn": frozenset({"errors", "config"}),
    "parallel": _BASE,
    "local_sgd": _BASE | {"parallel"},
    "async_sgd": _BASE | {"parallel", "local_sgd"},
    "checkpoint": _BASE | {"parallel", "local_sgd"},
    "trainer": _BASE | {"parallel", "local_sgd", "checkpoint", "terminal"},
    "verification": _BASE | {"profile", "parallel", "local_sgd", "checkpoint", "trainer"},
    "launch": frozenset({"errors", "machine", "host_topology", "network_interfaces", "config"})
    | {"event_record", "stack_watch", "process_stacks", "surviving_rank", "job_secret"},
    "lab": frozenset({"errors", "config"}),
    "clusters": frozenset({"errors", "environment", "job_secret", "network_interfaces", "config", "launch"}),
    "ray": frozenset({"errors", "launch", "clusters"}),
    "reporting": frozenset({"errors", "event_record", "config", "terminal"}),
}
"""Layer -> the lower layers that it may import, besides itself. `cli` may import all; no other layer imports it."""

ALLOWED["commands"] = frozenset(ALLOWED)
ALLOWED["cli"] = frozenset(ALLOWED) | {""}
ALLOWED[""] = frozenset({"errors", "config", "nn", "optim", "data", "parallel", "trainer", "commands"})
"""The root, tutti/__init__.py, has the public names, which are loaded when they are first used."""

ALLOWED["__main__"] = frozenset({"cli"})

LIBRARIES: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "config": frozenset({"pydantic"}),
    "cost_model": frozenset({"numpy"}),
    "planner": frozenset({"numpy"}),
    "validation": frozenset({"numpy"}),
}
"""Pure layer -> the only libraries outside the standard library that it may import; none of them loads torch."""

EFFECTS: dict[str, frozenset[str]] = {
    "cost_model": frozenset({"io", "os", "pathlib", "random", "socket", "subprocess", "tempfile", "time"}),
}
"""Layer -> modules of the standard library that it may not import: cost_model uses no clock and no file."""


def layer_of(module: str) -> str:
    """Return the layer of a dotted name: "config" for `tutti.config.plan`, and the empty string for the root."""
    part = module.partition(".")[2].partition(".")[0]
    return part if part in ALLOWED else ""


def upward_imports(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return a sentence for each import that does not point downward, or that a pure layer may not have."""
    layer = layer_of(module)
    findings = []
    for line, name in imports(source, module, is_package=is_package):
        top = name.partition(".")[0]
        if top == "tutti":
            target = layer_of(name)
            if target not in (layer, *ALLOWED[layer]):
                findings.append(f"line {line}: {layer or 'tutti'} may not import {target or 'the root'} ({name})")
        elif top in EFFECTS.get(layer, ()) or _foreign(top, layer):
            findings.append(f"line {line}: {layer} may not import {top}")
    return findings


def _foreign(top: str, layer: str) -> bool:
    """Return whether a pure layer may not use this library."""
    return layer in LIBRARIES and top not in sys.stdlib_module_names and top not in LIBRARIES[layer]


def import_circle(files: list[Path]) -> list[str]:
    """Return the modules of a circle of imports, or an empty list; type-checking and deferred imports count."""
    known = {module_name(path): path for path in files}
    graph = {}
    for module, path in known.items():
        graph[module] = _executed(path.read_text(encoding="utf-8")) & set(known) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _executed(source: str) -> set[str]:
    """Return the dotted names that imports may load: a and a.b for `from a import b`, a.b for `import a.b`."""
    names = set()
    for node in syntax_nodes(source):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names
