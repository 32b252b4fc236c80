"""The page: cells as tables a person can read, with reasons below them."""

import platform
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from matrix.cell import FLOOR, NOISES, STEPS
from matrix.launch import Cell
from matrix.plans import GROUPS, TOLERANCE, columns

SIGNS = {"refused": "refused", "WRONG": "**WRONG**", "CRASH": "**CRASH**", "HANG": "**HANG**", "not built": "—"}


def facts(seconds: float, cells: list[Cell]) -> dict[str, Any]:
    """When and with what the cells were made, and how many have which verdict."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seconds": round(seconds),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("tutti", "torch", "transformers", "numpy")},
        },
        "steps": STEPS,
        "tolerance": {str(dtype).removeprefix("torch."): value for dtype, value in TOLERANCE.items()},
        "counts": dict(Counter(cell.verdict for cell in cells)),
    }


def page(summary: dict[str, Any], cells: list[Cell]) -> str:
    """The page in Markdown."""
    by_name = {(cell.family, cell.plan): cell for cell in cells}
    rows = list(dict.fromkeys(cell.family for cell in cells))
    notes: dict[str, int] = {}
    parts = [_head(summary)]
    for group, heading in GROUPS.items():
        names = [name for name, column in columns().items() if column.group == group]
        names = [name for name in names if any((row, name) in by_name for row in rows)]
        if names:
            parts.append(f"## {heading}\n\n{_table(rows, names, by_name, notes)}")
    if notes:
        parts.append("## Reasons\n\n" + "\n".join(f"{number}. {text}" for text, number in notes.items()))
    parts.append(_memory(rows, by_name))
    return "\n\n".join(parts) + "\n"


def _head(summary: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in summary["versions"].items())
    counts = ", ".join(f"{count} {verdict}" for verdict, count in summary["counts"].items())
    (exact, low), (floor, high) = summary["tolerance"].values(), FLOOR.values()
    return (
        "# The matrix: model families by plans\n\n"
        f"Made by `make matrix` on {summary['date']} in {summary['seconds']} s, with {versions}. Do not edit: it is "
        "written by `tests/matrix/run.py`, with the same in `matrix.json`.\n\n"
        f"Every cell trains {summary['steps']} steps (AdamW, clipping, short last batches) on real processes by its "
        "plan, and compares losses, every gradient of every step, every parameter and buffer at the end and an "
        "evaluation with one device. Each rank compares its own part, and all parts together must be the whole. A "
        f"number is the largest difference of an element relative to the tensor's largest (at least {floor:g} of the "
        f"largest of its kind); in float64 it may be {exact:g}. In bfloat16, where one device computes in bfloat16 "
        f"too, it is the root mean square of a tensor's difference relative to the tensor's (at least {high:g} of the "
        f"largest of its kind), and may be {low:g} beyond {NOISES:g} times what bfloat16 itself changes in that tensor "
        "on one device.\n\n"
        "*refused*: the combination makes no sense or is not supported, said alike by all ranks; the number leads to "
        "the reason below. *—*: not built.\n\n"
        f"{counts}."
    )


def _table(rows: list[str], names: list[str], cells: dict[tuple[str, str], Cell], notes: dict[str, int]) -> str:
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for row in rows:
        shown = [_shown(cells.get((row, name)), notes) for name in names]
        lines.append(f"| {row} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _shown(cell: Cell | None, notes: dict[str, int]) -> str:
    if cell is None:
        return ""
    if cell.verdict == "exact":
        return f"{cell.gap:.0e}"
    if cell.verdict == "not built":
        return SIGNS[cell.verdict]
    number = notes.setdefault(cell.detail.replace("\n", " "), len(notes) + 1)
    return f"{SIGNS[cell.verdict]} [{number}]"


def _memory(rows: list[str], cells: dict[tuple[str, str], Cell]) -> str:
    """What one rank holds, as a part of what one device holds."""
    chosen = {"GPT, tied embeddings", "Llama", "DLRM", "Mixture of experts", "CosmoFlow"}
    lines = [
        "## Bytes held and sent",
        "",
        "The most that a rank holds of parameters, gradients and optimizer state between backward and the next step, "
        "measured as bytes of distinct storages, in parts of one device's; the equal part, 1 / (ranks that divide it), "
        "is behind it. Then the bytes a rank sends in a step for gradients and parameters (ring formula), in parts of "
        "one device's gradients, and those that the last step sent beside them (halos, tokens, rows of tables). Peak: "
        "the most bytes of tensors that are alive at once on a rank in forward and backward (from the allocations that "
        "torch records), in parts of one device's; predicted: what `tutti plan` says of it, in parts of the measured. "
        "The models here are tiny, so that what a step holds for itself weighs more than in any real one; and "
        "convolutions in float64, as here, unfold their input on the CPU (a 3-D one into 27 copies), which those in "
        "float32 do not and which is not predicted.",
        "",
        "| | plan | parameters | gradients | optimizer | peak | predicted | sent | exchanged, bytes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (row, name), cell in cells.items():
        if row in chosen and cell.verdict == "exact" and cell.bytes and columns()[name].precision == "full":
            shown = [
                _part(cell, kind, columns()[name].divides(kind)) for kind in ("parameters", "gradients", "optimizer")
            ]
            sent = cell.bytes["sent"] / max(cell.one["gradients"], 1)
            predicted = f"{cell.foreseen / cell.bytes['peak']:.2f}" if cell.foreseen else "—"
            shown += [
                f"{cell.bytes['peak'] / cell.one['peak']:.3f}",
                predicted,
                f"{sent:.2f}",
                str(cell.bytes["exchanged"]),
            ]
            lines.append(f"| {row} | {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _part(cell: Cell, kind: str, ranks: int) -> str:
    return f"{cell.bytes[kind] / max(cell.one[kind], 1):.3f} (1/{ranks})"
