"""The index of a checkpoint: which file holds which part of every tensor.

A checkpoint is a folder, `step-00000120`:

    index.json                 every tensor by its name in the user's model: global shape, dtype, files of its parts
    rank-00000.safetensors     the parts that rank 0 wrote; one file for each rank that wrote any
    run.pt                     run state: counters, seeds, optimizer settings and scalars, scheduler, generators
"""

import io
import itertools
import json
import math
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from tutti.checkpoint.checksums import check_inside, checksum, damaged, printable
from tutti.errors import CheckpointError
from tutti.parallel.layout import Cut, Range

FORMAT = 4
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

_CHECKPOINT_NAME = re.compile(r"step-([0-9]{1,15})(\.replaced)?")

_CHECKSUM_LINE = ',\n  "checksum": "'

_Name = Annotated[str, Field(max_length=4096)]
_Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_FileName = Annotated[str, Field(pattern=r"^(rank-[0-9]{5,9}\.safetensors|run\.pt)$")]
_Size = Annotated[int, Field(ge=0, le=2**53)]
_EXACT = with_config(ConfigDict(extra="forbid", strict=True))


@_EXACT
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint, as it was written. Every byte of it is in one of the checksums.

    Attributes:
        nbytes: its size in bytes.
        checksum: of the header, if it holds tensors; otherwise of the whole file.
        tensors: the checksum of every tensor's bytes, by the name of the tensor in the file.
    """

    nbytes: _Size
    checksum: _Checksum
    tensors: dict[_Name, _Checksum] = field(default_factory=dict)


@_EXACT
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """The place where one part of a tensor is stored.

    Attributes:
        file: name of the file in the checkpoint's folder.
        key: name of the part in the file.
        cuts: which part of the global tensor it is.
    """

    file: _FileName
    key: str
    cuts: tuple[Cut, ...] = ()


@_EXACT
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One global tensor, in parts.

    Attributes:
        replicated: whether this is optimizer state that does not have its parameter's shape and is equal on all ranks,
            so that it fits any part of the parameter.
    """

    shape: Annotated[tuple[_Size, ...], Field(max_length=64)]
    dtype: str
    parts: tuple[StoredPart, ...]
    replicated: bool = False


@_EXACT
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
        files: all other files of the folder, by name.
    """

    step: _Size
    world_size: Annotated[int, Field(ge=1, le=2**24)]
    mesh: dict[_Name, Annotated[int, Field(ge=1, le=2**24)]]
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{1,32}$")]
    model: dict[_Name, StoredTensor]
    tied: dict[_Name, _Name] = field(default_factory=dict)
    optimizers: tuple[dict[_Name, dict[_Name, StoredTensor]], ...] = ()
    rank_state: dict[_Name, dict[_Name, StoredTensor]] = field(default_factory=dict)
    averages: dict[_Name, dict[_Name, StoredTensor]] = field(default_factory=dict)
    files: dict[_FileName, StoredFile] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _IndexFile(CheckpointIndex):
    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    checksum: _Checksum


_INDEX_FILE = TypeAdapter(_IndexFile)


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def index_to_text(index: CheckpointIndex) -> str:
    """Format the index as JSON, one tensor per line, so that a person can read it; its last line is its checksum."""
    lines = [
        f'"format": {FORMAT}',
        *(f'"{name}": {json.dumps(getattr(index, name))}' for name in ("step", "world_size", "mesh", "id", "tied")),
        f'"model": {_format_tensors(index.model, 2)}',
        '"optimizers": [' + ", ".join(_format_states(states) for states in index.optimizers) + "]",
        f'"rank_state": {_format_states(index.rank_state)}',
        f'"averages": {_format_states(index.averages)}',
        f'"files": {_format_rows({name: asdict(file) for name, file in index.files.items()}, 2)}',
    ]
    text = "{\n" + ",\n".join("  " + line for line in lines)
    return f'{text}{_CHECKSUM_LINE}{checksum(text.encode())}"\n}}\n'


def _format_states(states: dict[str, dict[str, StoredTensor]]) -> str:
    rows = [f"    {json.dumps(name)}: {_format_tensors(tensors, 4)}" for name, tensors in states.items()]
    return "{\n" + ",\n".join(rows) + "\n  }" if rows else "{}"


def _format_tensors(tensors: dict[str, StoredTensor], indent: int) -> str:
    return _format_rows({name: asdict(tensor) for name, tensor in tensors.items()}, indent)


def _format_rows(values: dict[str, Any], indent: int) -> str:
    rows = [f"{' ' * (indent + 2)}{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}" if rows else "{}"


def parse_index(data: bytes, folder: Path) -> CheckpointIndex:
    """Parse and check what `index_to_text` wrote.

    Args:
        data: the bytes of the file.
        folder: the checkpoint's folder, for messages.

    Raises:
        DamagedCheckpointError: the bytes are not those that were written, or describe no checkpoint.
        CheckpointError: they have another format version.
    """
    text, _, ending = data.rpartition(_CHECKSUM_LINE.encode())
    if ending != f'{checksum(text)}"\n}}\n'.encode():
        version = re.match(rb'\{\s*"format": ([0-9]{1,3}),', data)
        if version is not None and int(version[1]) < FORMAT and not text:
            raise CheckpointError(
                f"{folder / INDEX} has format {int(version[1])}, which has no checksums; this version of tutti reads "
                f"{FORMAT}; read it with the version that wrote it"
            )
        raise damaged(folder, f"{INDEX} does not have the checksum that it was saved with")
    try:
        parsed = _INDEX_FILE.validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise damaged(folder, f"{INDEX} at {printable(place)}: {printable(first['msg'])}") from None
    index = CheckpointIndex(**{each.name: getattr(parsed, each.name) for each in fields(CheckpointIndex)})
    mistake = _mistake(index)
    if mistake is not None:
        raise damaged(folder, f"{INDEX}: {mistake}")
    return index


def stored_tensors(index: CheckpointIndex) -> dict[Key, StoredTensor]:
    """Return all tensors of an index by their keys."""
    tensors: dict[Key, StoredTensor] = {(MODEL, name, ""): tensor for name, tensor in index.model.items()}
    for number, states in [
        *enumerate(index.optimizers),
        (RANK_STATE, index.rank_state),
        (AVERAGE, index.averages),
    ]:
        for name, by_state in states.items():
            tensors.update({(number, name, state): tensor for state, tensor in by_state.items()})
    return tensors


def stored_as(key: Key) -> str:
    """Return the name of a tensor in the files of ranks."""
    number, name, state = key
    if number == RANK_STATE:
        return f"rank/{name}/{state}"
    if number == AVERAGE:
        return f"average/{state}/{name}"
    return f"model/{name}" if number == MODEL else f"optimizer-{number}/{name}/{state}"


def _mistake(index: CheckpointIndex) -> str | None:
    """Return what contradicts itself in an index, so that nothing is allocated for what no file can hold."""
    if RUN_STATE not in index.files:
        return f"it does not list {RUN_STATE}"
    tensors = stored_tensors(index)
    known = {stored_as(key) for key in tensors}
    for file, stored_file in index.files.items():
        lacking = next((key for key in stored_file.tensors if key not in known), None)
        if lacking is not None:
            return f"{printable(lacking)!r} is in {file} but is not listed"
    for key, tensor in tensors.items():
        mistake = _tensor_mistake(index, stored_as(key), tensor)
        if mistake is not None:
            return f"{printable(stored_as(key))!r} {mistake}"
    lost = next((name for name, first in index.tied.items() if first not in index.model), None)
    return None if lost is None else f"{printable(lost)!r} is tied to a tensor that is not listed"


def _tensor_mistake(index: CheckpointIndex, key: str, tensor: StoredTensor) -> str | None:
    kind = getattr(torch, tensor.dtype, None)
    if not isinstance(kind, torch.dtype):
        return f"has the unknown dtype {printable(tensor.dtype, 40)!r}"
    elements, numel = 0, math.prod(tensor.shape)
    for part in tensor.parts:
        file = index.files.get(part.file)
        if file is None or part.key != key or part.key not in file.tensors:
            return f"is not in {part.file}"
        sizes = list(tensor.shape)
        for cut in part.cuts:
            size = tensor.shape[cut.dim] if 0 <= cut.dim < len(sizes) else -1
            if not all(0 <= start <= stop <= size for start, stop in cut.ranges):
                return f"has shape {tensor.shape}, and a part of it lies outside"
            sizes[cut.dim] = cut.size
        if len({cut.dim for cut in part.cuts}) < len(part.cuts) or math.prod(sizes) > numel:
            return "has a part that is cut twice along one dim"
        if math.prod(sizes) * kind.itemsize > file.nbytes:
            return f"has shape {tensor.shape}, which is more than {part.file} holds"
        elements += math.prod(sizes)
    return None if elements >= numel else f"has shape {tensor.shape}, and its parts hold less"


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
    return next(iter(complete_checkpoints(path)[::-1]), None)


def candidate_checkpoints(path: Path) -> list[Path]:
    """Return what a run may resume from: `path` itself if it is a checkpoint, else a run folder's, the newest first."""
    return [path] if is_checkpoint(path) else checkpoint_folders(path)[::-1]


def complete_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, that of the last step last."""
    return [folder for folder in checkpoint_folders(run) if is_checkpoint(folder)]


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the folders of a run folder that are named as checkpoints, that of the last step last."""
    named = [path for path in (run / "checkpoints").glob("step-*") if _CHECKPOINT_NAME.fullmatch(path.name)]
    named = [path for path in named if path.is_dir()]
    # A kill while step 4 was being replaced leaves "step-00000004.replaced", which is older than "step-00000004".
    return sorted(named, key=lambda path: (checkpoint_step(path), "." not in path.name))


def checkpoint_step(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder; -1 if it has another name."""
    match = _CHECKPOINT_NAME.fullmatch(path.name)
    return -1 if match is None else int(match[1])


def read_plain(file: Path | io.BytesIO, name: str) -> Any:
    """Read plain values and tensors that torch.save wrote.

    Args:
        file: the file, or its contents.
        name: the file, for messages.

    Raises:
        CheckpointError: the file cannot be read, or holds anything else, which could run code.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own message advises how to switch its check off.
        foreign = re.search(r"(?:GLOBAL|[Tt]rying to (?:load|call)|unsupported global:?)\W+([\w.]{1,80})", str(error))
        if isinstance(error, pickle.UnpicklingError) and "eights" in str(error):
            reason = f"it holds Python objects{f' ({foreign[1]})' if foreign else ''}, which could run code when read"
            raise CheckpointError(f"{name} is refused: {reason}; save tensors and plain values only") from None
        reason = printable(error) or type(error).__name__
        raise CheckpointError(f"{name} cannot be read: {reason}; name another file") from None


def read_run_state(folder: Path, index: CheckpointIndex) -> dict[str, Any]:
    """Read run.pt of a checkpoint.

    Args:
        folder: the checkpoint's folder.
        index: its index, which has the checksum.

    Raises:
        DamagedCheckpointError: it is not the file that was saved with the index.
    """
    check_inside(folder, RUN_STATE)
    expected = index.files[RUN_STATE]
    with (folder / RUN_STATE).open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        data = file.read(expected.nbytes) if nbytes == expected.nbytes else b""
    if len(data) != expected.nbytes:
        raise damaged(folder, f"{RUN_STATE} has {nbytes:,} bytes, {expected.nbytes:,} were saved")
    if checksum(data) != expected.checksum:
        raise damaged(folder, f"{RUN_STATE} is not the one that was saved: it is damaged, or of another checkpoint")
    state = read_plain(io.BytesIO(data), str(folder / RUN_STATE))
    try:
        return _RUN_STATE.validate_python(state)  # type: ignore[return-value]  # a TypedDict
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = printable(".".join(map(str, first["loc"])) or "the top")
        raise damaged(folder, f"{RUN_STATE} at {place}: {printable(first['msg'])}") from None


class _OptimizerState(TypedDict):
    groups: list[tuple[dict[str, Any], list[str]]]
    scalars: dict[str, dict[str, Any]]
    other_state: dict[str, Any]


@with_config(ConfigDict(extra="allow"))
class _RunState(TypedDict):
    """What every run.pt has; tensors and plain values of mechanisms come besides."""

    seed: int
    batch: list[Any]
    ramp: list[Any]
    step: int
    samples_seen: int
    tokens_seen: int
    clocks: list[Any]
    epoch: int
    position: int
    before: int
    optimizers: list[_OptimizerState]
    schedules: Any
    scaler: dict[str, Any]
    noise: dict[str, Any]
    extra_state: dict[str, Any]
    generators: list[dict[str, Any]]


_RUN_STATE = TypeAdapter(_RunState)


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
