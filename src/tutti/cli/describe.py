"""`tutti describe`: the costs of a script's model, module by module, from shapes alone."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tutti.cli.options import (
    SCRIPT_CONTEXT,
    ScriptCommand,
    emit,
    json_option,
    script_arguments,
    timeout_option,
)
from tutti.commands.describe import describe_target
from tutti.commands.messages import console
from tutti.config.model import ModelSpec, ModuleSpec

if TYPE_CHECKING:
    from rich.table import Table


@click.command(cls=ScriptCommand, context_settings=SCRIPT_CONTEXT)
@json_option
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the ModelSpec to this file.")
@click.option("--depth", type=click.IntRange(0), help="Show modules down to this depth; sums include deeper ones.")
@click.option("--all", "every", is_flag=True, help="Show a row for every module; do not merge equal layers.")
@timeout_option
@script_arguments
def command(
    script: Path,
    arguments: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    depth: int | None,
    every: bool,
    timeout_s: float,
) -> None:
    """Show what the model of SCRIPT costs for one sample: parameters, FLOPs and bytes, by module.

    The script runs up to job.prepare; the model is not run and takes no memory. Options that tutti does not know, and
    all after --, are the script's. Instead of a script, a name with sizes: llama --layers 80, or llama3-70b.
    """
    model = describe_target((str(script), *arguments), output, timeout_s)
    if as_json:
        emit(model)
        return
    from tutti.cost_model.loading_time import loading_words
    from tutti.terminal import results_console

    out = results_console()
    out.print(table(model, depth=depth, every=every))
    if model.loading is not None:
        out.print(f"data: {loading_words(model.loading)}", markup=False, soft_wrap=True)
    for note in model.notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True)
    if output is not None:
        console.print(f"ModelSpec written to {output}", soft_wrap=True)


@dataclass(slots=True, kw_only=True)
class ModuleNode:
    """A module with its submodules.

    Attributes:
        names: its own name, and those of equal siblings merged into it.
    """

    module: ModuleSpec
    children: list["ModuleNode"] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def own(self) -> tuple[float, ...]:
        """Return its own parameters, forward and backward FLOPs, and bytes of activations, gradients and optimizer."""
        return (
            self.module.parameters,
            sum(op.flops_forward for op in self.module.ops),
            sum(op.flops_backward for op in self.module.ops),
            self.module.activation_nbytes,
            self.module.gradient_nbytes,
            self.module.optimizer_nbytes,
        )

    def total(self) -> tuple[float, ...]:
        """Return the sums over the module and everything below it, times the number of merged siblings."""
        rows = [self.own(), *(child.total() for child in self.children)]
        return tuple(len(self.names) * sum(column) for column in zip(*rows, strict=True))

    def alike(self, other: "ModuleNode") -> bool:
        """Return whether two subtrees differ only in their names."""
        return (
            self.module.kind == other.module.kind
            and self.own() == other.own()
            and len(self.children) == len(other.children)
            and all(
                child.names == theirs.names and child.alike(theirs)
                for child, theirs in zip(self.children, other.children, strict=True)
            )
        )


def tree(model: ModelSpec, *, every: bool = False) -> ModuleNode:
    """Return the modules as a tree by dotted name.

    Args:
        model: what to show.
        every: keep every module; else consecutive numbered siblings that are equal are merged.
    """
    nodes = {module.name: ModuleNode(module=module, names=[module.name.rpartition(".")[2]]) for module in model.modules}
    root = nodes.setdefault("", ModuleNode(module=ModuleSpec(name="", kind=model.name), names=[""]))
    for name, node in nodes.items():
        if name:
            nodes.get(name.rpartition(".")[0], root).children.append(node)
    if not every:
        _gather(root)
    return root


def _gather(node: ModuleNode) -> None:
    gathered: list[ModuleNode] = []
    for child in node.children:
        _gather(child)
        last = gathered[-1] if gathered else None
        if last is not None and child.names[0].isdecimal() and last.names[0].isdecimal() and last.alike(child):
            last.names += child.names
        else:
            gathered.append(child)
    node.children = gathered


def table(model: ModelSpec, *, depth: int | None = None, every: bool = False) -> "Table":
    """Return a table of the costs of one sample: an indented row for each module.

    A container's row holds the sums over its modules.

    Args:
        model: what to show.
        depth: deepest level to show; None for all.
        every: a row for every module; else equal numbered siblings share a row.
    """
    from tutti.reporting.fitted_table import FittedTable

    tokens = f", {model.tokens_per_sample} tokens" if model.tokens_per_sample else ""
    inputs = ", ".join(f"{tensor.name} {list(tensor.shape)} {tensor.dtype}" for tensor in model.inputs)
    result = FittedTable(
        title=f"{model.name}: costs of one sample ({inputs}{tokens})",
        caption=f"{model.evidence}: shapes traced, nothing run. {model.optimizer or 'no optimizer'}; {model.dtype}. "
        "Rows of modules with submodules are sums.",
        title_justify="left",
        caption_justify="left",
    )
    result.add_column("module", no_wrap=True)
    result.add_column("kind")
    result.below = ("kind",)
    for heading in ("param-\neters", "forward", "backward", "activa-\ntions", "gradi-\nents", "opti-\nmizer"):
        result.add_column(heading, justify="right", no_wrap=True)
    for level, node, times in _rows(tree(model, every=every), 0, 1):
        if depth is None or level <= depth:
            result.add_row(*_cells(level, node, times), style="bold" if level == 0 else None)
    return result


def _rows(node: ModuleNode, level: int, times: int) -> Iterator[tuple[int, ModuleNode, int]]:
    """Yield the nodes in order, each with its depth and how often merged siblings above repeat it."""
    yield level, node, times
    for child in node.children:
        yield from _rows(child, level + 1, times * len(node.names))


def _cells(level: int, node: ModuleNode, times: int) -> Iterator[Any]:
    from rich.text import Text

    first, last = node.names[0], node.names[-1]
    name = first or "(model)"
    if len(node.names) > 1:
        name = f"{first}-{last} ({len(node.names)}x)"
    kind = node.module.kind
    if node.module.tied_to is not None:
        kind += f", tied to {node.module.tied_to}"
    if node.module.batch_statistics:
        kind += ", batch statistics"
    yield Text("  " * level + name)
    yield Text(kind)
    units = ("", "FLOP", "FLOP", "B", "B", "B")
    for value, unit in zip(node.total(), units, strict=True):
        yield scaled(value * times, unit)


def scaled(value: float, unit: str) -> str:
    """Format a number with three digits and a prefix.

    (134217728, "B") is "134 MB", (7e10, "") is "70.0 B"; 0 is "".
    """
    if value == 0:
        return ""
    billions = "B" if unit == "" else "G"  # parameters are counted in billions
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, billions), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            value /= factor
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {prefix}{unit}"
    return f"{value:.4g} {unit}".strip()
