"""The index of a checkpoint: which file holds which part of every tensor.

A checkpoint is a folder, `step-00000120`:

    index.json                 every tensor by its name in the user's model: global shape, dtype, files of its parts
    rank-00000.safetensors     the parts that rank 0 wrote; one file for each rank that wrote any
    run.pt                     run state: counters, seeds, optimizer settings and scalars, scheduler, generators
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tutti.errors import CheckpointError
from tutti.parallel.layout import Cut, Range

FORMAT = 3
INDEX = "index.json"
RUN_STATE = "run.pt"

Key = tuple[int, str, str]
"""Identifies a tensor of a checkpoint: (optimizer, parameter, name of the state), (MODEL, name, "") or
(RANK_STATE, "rank/bucket", name) or (AVERAGE, name, name of the average).
"""

MODEL = -1
"""First entry of a Key for parameters and buffers."""

RANK_STATE = -2
"""First entry of a Key for tensors of one rank: residuals of error feedback, or state of a diverged replica."""

AVERAGE = -3
"""First entry of a Key for averages of parameters and buffers."""

Slices = tuple[slice, ...]
"""An index into a tensor, one slice per dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """The place where one part of a tensor is stored.

    Attributes:
        file: name of the file in the checkpoint's folder.
        key: name of the part in the file.
        cuts: which part of the global tensor it is.
    """

    file: str
    key: str
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One global tensor, in parts.

    Attributes:
        replicated: whether this is optimizer state that does not have its parameter's shape and is equal on all ranks,
            so that it fits any part of the parameter.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredPart, ...]
    replicated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """All tensors of a checkpoint.

    Attributes:
        step: updates made.
        world_size: number of ranks that wrote it.
        mesh: their mesh.
        id: tells checkpoints of the same step apart.
        model: parameters and buffers by name.
        tied: further names of tensors in `model` -> the name there.
        optimizers: for each optimizer, state tensors by parameter and name of the state.
        rank_state: tensors that belong to one rank, by "rank/bucket" and name.
        averages: averages of parameters and buffers, by their name and that of the average.
    """

    step: int
    world_size: int
    mesh: dict[str, int]
    id: str
    model: dict[str, StoredTensor]
    tied: dict[str, str] = field(default_factory=dict)
    optimizers: tuple[dict[str, dict[str, StoredTensor]], ...] = ()
    rank_state: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    averages: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def index_to_text(index: CheckpointIndex) -> str:
    """Format the index as JSON, one tensor per line, so that a person can read it."""
    lines = [
        f'"format": {FORMAT}',
        *(f'"{name}": {json.dumps(getattr(index, name))}' for name in ("step", "world_size", "mesh", "id", "tied")),
        f'"model": {_format_tensors(index.model, 2)}',
        '"optimizers": [' + ", ".join(_format_states(states) for states in index.optimizers) + "]",
        f'"rank_state": {_format_states(index.rank_state)}',
        f'"averages": {_format_states(index.averages)}',
    ]
    return "{\n" + ",\n".join("  " + line for line in lines) + "\n}\n"


def _format_states(states: dict[str, dict[str, StoredTensor]]) -> str:
    rows = [f"    {json.dumps(name)}: {_format_tensors(tensors, 4)}" for name, tensors in states.items()]
    return "{\n" + ",\n".join(rows) + "\n  }" if rows else "{}"


def _format_tensors(tensors: dict[str, StoredTensor], indent: int) -> str:
    rows = [f"{' ' * (indent + 2)}{json.dumps(name)}: {json.dumps(_to_json(t))}" for name, t in tensors.items()]
    return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}" if rows else "{}"


def _to_json(tensor: StoredTensor) -> dict[str, Any]:
    parts = [
        {"file": part.file, "key": part.key, "cuts": [[cut.dim, [list(r) for r in cut.ranges]] for cut in part.cuts]}
        for part in tensor.parts
    ]
    replicated = {"replicated": True} if tensor.replicated else {}
    return {"shape": list(tensor.shape), "dtype": tensor.dtype, "parts": parts, **replicated}


def parse_index(text: str, path: Path) -> CheckpointIndex:
    """Parse what `index_to_text` wrote.

    Args:
        text: the JSON text.
        path: names the index in messages.

    Raises:
        CheckpointError: the text is not an index, or has another format version.
    """
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {data['format']}, this version of tutti reads {FORMAT}; read it with the version "
                "that wrote it"
            )
        return CheckpointIndex(
            **{name: data[name] for name in ("step", "world_size", "mesh", "id", "tied")},
            model={name: _from_json(tensor) for name, tensor in data["model"].items()},
            optimizers=tuple(_parse_states(states) for states in data["optimizers"]),
            rank_state=_parse_states(data["rank_state"]),
            averages=_parse_states(data.get("averages", {})),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read: {reason}; name an earlier checkpoint") from None


def _parse_states(states: dict[str, Any]) -> dict[str, dict[str, StoredTensor]]:
    return {name: {key: _from_json(tensor) for key, tensor in tensors.items()} for name, tensors in states.items()}


def _from_json(data: dict[str, Any]) -> StoredTensor:
    parts = tuple(
        StoredPart(
            file=part["file"],
            key=part["key"],
            cuts=tuple(Cut(dim=dim, ranges=tuple((a, b) for a, b in ranges)) for dim, ranges in part["cuts"]),
        )
        for part in data["parts"]
    )
    shape = tuple(int(size) for size in data["shape"])
    return StoredTensor(shape=shape, dtype=data["dtype"], parts=parts, replicated=bool(data.get("replicated", False)))


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a complete checkpoint."""
    return (path / INDEX).is_file()


def latest_checkpoint(path: Path) -> Path | None:
    """Return the newest complete checkpoint of a run folder, `path` itself if it is a checkpoint, or None.

    Examples:
        After a run of two steps with `Job(folder="runs/first")`:

        >>> latest_checkpoint(Path("runs/first")).name
        'step-00000002'
        >>> latest_checkpoint(Path("runs/none")) is None
        True
    """
    if is_checkpoint(path):
        return path
    complete = [folder for folder in (path / "checkpoints").glob("step-*") if is_checkpoint(folder)]
    # A kill while step 4 was being replaced leaves "step-00000004.replaced", which is older than "step-00000004".
    return max(complete, key=lambda folder: (folder.name.partition(".")[0], "." not in folder.name), default=None)


def read_run_state(file: Path) -> dict[str, Any]:
    """Read plain values and tensors that torch.save wrote.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{file} cannot be read: {reason}; name an earlier checkpoint") from None


def overlaps(
    shape: tuple[int, ...], stored: tuple[Cut, ...], wanted: tuple[Cut, ...]
) -> Iterator[tuple[Slices, Slices]]:
    """Yield the intersection of two parts of one tensor, in blocks as large as their ranges allow.

    Args:
        shape: global shape of the tensor.
        stored: the part that is stored; a dim without a cut is whole.
        wanted: the part that is needed.

    Yields:
        (slices of the stored part, slices of the wanted part). Every common element is in exactly one pair.
    """
    along = [_common(_ranges(stored, dim, size), _ranges(wanted, dim, size)) for dim, size in enumerate(shape)]
    for blocks in itertools.product(*along):
        yield (
            tuple(slice(start, start + size) for start, _, size in blocks),
            tuple(slice(start, start + size) for _, start, size in blocks),
        )


def _ranges(cuts: tuple[Cut, ...], dim: int, size: int) -> tuple[Range, ...]:
    """Return the ranges of a part along one dim."""
    return next((cut.ranges for cut in cuts if cut.dim == dim), ((0, size),))


def _common(stored: tuple[Range, ...], wanted: tuple[Range, ...]) -> list[tuple[int, int, int]]:
    """Return (position in the stored part, position in the wanted part, length) of the intersection along one dim."""
    blocks: list[tuple[int, int, int]] = []
    source = 0
    for low, high in stored:
        target = 0
        for begin, end in wanted:
            first, last = max(low, begin), min(high, end)
            if first < last:
                _append(blocks, (source + first - low, target + first - begin, last - first))
            target += end - begin
        source += high - low
    return blocks


def _append(blocks: list[tuple[int, int, int]], block: tuple[int, int, int]) -> None:
    """Add a block, or lengthen the last one if this one continues it in both parts."""
    if blocks:
        source, target, size = blocks[-1]
        if (source + size, target + size) == block[:2]:
            blocks[-1] = (source, target, size + block[2])
            return
    blocks.append(block)
