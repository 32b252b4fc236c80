"""The index of a checkpoint: which file holds which part of every tensor, and what else a run resumes from.

A checkpoint is a folder, `step-00000120`:

    index.json                 every tensor by its name in the user's model: whole shape, dtype, and where its parts are
    rank-00000.safetensors     the parts that rank 0 wrote; one file for each rank that had parts to write
    run.pt                     counters, seeds, optimizer settings and scalars, scheduler, generators; plain values only
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.errors import CheckpointError
from tutti.parallel.layout import Cut

FORMAT = 2
INDEX = "index.json"
SMALL = "run.pt"
OLD = "state.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Where one part of a tensor is: `cuts` say which."""

    file: str
    key: str
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One whole tensor, in parts. `anywhere`: of no parameter's shape and the same on every rank, so that it fits any
    part of its parameter."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]
    anywhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """`model`: parameters and buffers by name; `tied`: other names of the same tensors; `optimizers`: of each one,
    state tensors by parameter and key; `kept`: what compressed sums keep back, by "rank/bucket" and name. `step`,
    `world_size` and `mesh`: of the run that wrote it."""

    step: int
    world_size: int
    mesh: dict[str, int]
    made: str
    model: dict[str, Entry]
    tied: dict[str, str] = field(default_factory=dict)
    optimizers: tuple[dict[str, dict[str, Entry]], ...] = ()
    kept: dict[str, dict[str, Entry]] = field(default_factory=dict)


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def index_to_text(index: Index) -> str:
    """The index as JSON: one tensor a line, so that a person can look."""
    lines = [
        f'"format": {FORMAT}',
        *(f'"{name}": {json.dumps(getattr(index, name))}' for name in ("step", "world_size", "mesh", "made", "tied")),
        f'"model": {_block(index.model, 2)}',
        '"optimizers": [' + ", ".join(_states(one) for one in index.optimizers) + "]",
        f'"kept": {_states(index.kept)}',
    ]
    return "{\n" + ",\n".join("  " + line for line in lines) + "\n}\n"


def _states(states: dict[str, dict[str, Entry]]) -> str:
    rows = [f"    {json.dumps(name)}: {_block(keys, 4)}" for name, keys in states.items()]
    return "{\n" + ",\n".join(rows) + "\n  }" if rows else "{}"


def _block(entries: dict[str, Entry], indent: int) -> str:
    rows = [f"{' ' * (indent + 2)}{json.dumps(name)}: {json.dumps(_plain(one))}" for name, one in entries.items()]
    return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}" if rows else "{}"


def _plain(entry: Entry) -> dict[str, Any]:
    parts = [
        {"file": part.file, "key": part.key, "cuts": [[cut.dim, [list(r) for r in cut.ranges]] for cut in part.cuts]}
        for part in entry.parts
    ]
    anywhere = {"anywhere": True} if entry.anywhere else {}
    return {"shape": list(entry.shape), "dtype": entry.dtype, "parts": parts, **anywhere}


def index_of_text(text: str, path: Path) -> Index:
    """The index that a text says. Raises CheckpointError where it says none."""
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {data['format']}, this version of tutti reads {FORMAT}; read it with the version "
                "that wrote it"
            )
        return Index(
            **{name: data[name] for name in ("step", "world_size", "mesh", "made", "tied")},
            model={name: _entry(one) for name, one in data["model"].items()},
            optimizers=tuple(_entries(states) for states in data["optimizers"]),
            kept=_entries(data.get("kept", {})),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read: {reason}; name an earlier checkpoint") from None


def _entries(states: dict[str, Any]) -> dict[str, dict[str, Entry]]:
    return {name: {key: _entry(one) for key, one in keys.items()} for name, keys in states.items()}


def _entry(data: dict[str, Any]) -> Entry:
    parts = tuple(
        Part(
            file=part["file"],
            key=part["key"],
            cuts=tuple(Cut(dim=dim, ranges=tuple((a, b) for a, b in ranges)) for dim, ranges in part["cuts"]),
        )
        for part in data["parts"]
    )
    shape = tuple(int(size) for size in data["shape"])
    return Entry(shape=shape, dtype=data["dtype"], parts=parts, anywhere=bool(data.get("anywhere", False)))


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a whole checkpoint, of this format or the one before."""
    return (path / INDEX).is_file() or (path / OLD).is_file()


def latest_checkpoint(path: Path) -> Path | None:
    """The newest whole checkpoint of a run folder, or `path` itself if it is one."""
    if is_checkpoint(path):
        return path
    found = [one for one in (path / "checkpoints").glob("step-*") if is_checkpoint(one)]
    # "step-00000004.replaced" is what a kill left while step 4 was written a second time: older than "step-00000004"
    return max(found, key=lambda one: (one.name.partition(".")[0], "." not in one.name), default=None)
