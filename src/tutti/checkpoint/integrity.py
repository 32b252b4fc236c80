"""Whether a checkpoint's files are those that were saved: names, sizes, headers, and the checksum of every tensor."""

import heapq
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from tutti.checkpoint.checksums import UNREADABLE, check_inside, damaged, printable
from tutti.checkpoint.index import RUN_STATE, Key, StoredFile, stored_as
from tutti.checkpoint.sources import Source, open_checkpoint
from tutti.checkpoint.tensor_files import FileHeader, header_dtype, read_checksum, read_header
from tutti.comm.world import World
from tutti.errors import CheckpointError, DamagedCheckpointError
from tutti.parallel.layout import TensorShard
from tutti.parallel.saved_values import parse_dtype


def open_sound_checkpoint(path: Path) -> Source:
    """Open a checkpoint after a look at every byte of it.

    Raises:
        DamagedCheckpointError: it is not what was saved.
        CheckpointError: it cannot be read.
    """
    source = open_checkpoint(path)
    damage = find_damage(source)
    if damage is not None:
        raise damaged(path, damage)
    return source


def check_together(world: World, source: Source) -> None:
    """Look at every byte of a checkpoint once, shared out among the ranks that see it. Collective.

    Args:
        world: the ranks.
        source: the checkpoint, as `shared_source` returned it.

    Raises:
        DamagedCheckpointError: on every rank, if it is not what was saved.
    """
    readers = [rank for rank, reads in enumerate(world.gather(source.read is not None)) if reads]
    damage = None
    if world.rank in readers:
        try:
            damage = find_damage(source, readers.index(world.rank), len(readers))
        except DamagedCheckpointError as error:  # a file that is missing: ranks without a share in it must learn of it
            damage = error.finding
    found = next((other for other in world.gather(damage) if other is not None), None)
    if found is not None:
        raise damaged(source.path, found)


Opened = Callable[[Path, str, StoredFile], AbstractContextManager[tuple[Any, int]]]
"""(folder, name, what the index says) -> the opened file and its size."""


def find_damage(source: Source, share: int = 0, shares: int = 1, *, opened: Opened | None = None) -> str | None:
    """Return what is wrong with a checkpoint, with the names of the file and the tensor; None if nothing is.

    Args:
        source: the checkpoint, whose index and run state are sound.
        share: which share of the work to do, from 0.
        shares: how many shares there are.
        opened: opens a file that lies elsewhere, and is then read from its beginning to its end if there is one share;
            its errors are raised. None: the files of the checkpoint's own folder.
    """
    sizes = _part_sizes(source)
    mine: dict[str, list[str]] = {}
    for number, file in enumerate(sorted(source.files)):
        if file != RUN_STATE and number % shares == share:
            mine[file] = []
    loads = [(0, number) for number in range(shares)]
    for (file, key), nbytes in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        load, least = loads[0]
        heapq.heapreplace(loads, (load + nbytes, least))
        if least == share:
            mine.setdefault(file, []).append(key)
    parts = _parts_by_file(source)
    for file, keys in mine.items():
        try:
            damage = _file_damage(source, file, keys, parts.get(file, []), opened or _opened)
        except OSError as error:
            if opened is not None:
                raise
            damage = f"{file} {UNREADABLE}: {printable(error.strerror or error)}"
        if damage is not None:
            return damage
    return None


Part = tuple[Key, torch.dtype, tuple[int, ...], str]
"""A tensor of the index, its dtype, the shape of the part of it that a file has, and the part's name there."""


def _parts_by_file(source: Source) -> dict[str, list[Part]]:
    parts: dict[str, list[Part]] = defaultdict(list)
    for tensor, stored in source.tensors.items():
        for part in stored.parts:
            shape = TensorShard(shape=stored.shape, cuts=part.cuts).local_shape
            parts[part.file].append((tensor, parse_dtype(stored.dtype), shape, part.key))
    return parts


def _part_sizes(source: Source) -> dict[tuple[str, str], int]:
    """Return the size of every tensor in every file, which the index lists; 0 of copies that it does not use."""
    sizes = {(name, key): 0 for name, file in source.files.items() for key in file.tensors}
    for stored in source.tensors.values():
        itemsize = parse_dtype(stored.dtype).itemsize
        for part in stored.parts:
            shape = TensorShard(shape=stored.shape, cuts=part.cuts).local_shape
            sizes[(part.file, part.key)] = math.prod(shape) * itemsize
    return sizes


def _file_damage(source: Source, name: str, keys: list[str], parts: list[Part], opened: Opened) -> str | None:
    """Return what is wrong with a file's size, its header, or the values of some of its tensors."""
    expected = source.files[name]
    with opened(source.path, name, expected) as (file, nbytes):
        try:
            header = read_header(file, nbytes)
        except ValueError as error:
            return f"{name}: {error}" + _cut_short(expected, nbytes)
        other = header.metadata.get("checkpoint")
        if other is not None and other != source.id:
            step = printable(header.metadata.get("step"), 20)
            return f"{name} belongs to another checkpoint (of step {step}, {printable(other, 40)})"
        begin = len(header.data)
        if nbytes < expected.nbytes:
            ends = sorted((begin + values.data_offsets[1], key) for key, values in header.tensors.items())
            lost = next((f", {printable(key)!r} is not whole" for end, key in ends if end > nbytes), "")
            return f"{name} is truncated: it has {nbytes:,} of {expected.nbytes:,} bytes{lost}"
        damage = _header_damage(expected, name, header, nbytes, parts)
        if damage is not None:
            return damage
        for key in sorted(keys, key=lambda key: header.tensors[key].data_offsets):
            values = header.tensors[key]
            file.seek(begin + values.data_offsets[0])
            if read_checksum(file, values.nbytes) != expected.tensors[key]:
                return f"{name}: the values of {printable(key)!r} are not those that were saved"
    return None


def _cut_short(expected: StoredFile, nbytes: int) -> str:
    return f" (it has {nbytes:,} of {expected.nbytes:,} bytes)" if nbytes != expected.nbytes else ""


def _header_damage(expected: StoredFile, name: str, header: FileHeader, nbytes: int, parts: list[Part]) -> str | None:
    if nbytes != expected.nbytes:
        return f"{name} has {nbytes:,} bytes, {expected.nbytes:,} were saved"
    if header.checksum != expected.checksum:
        return f"{name}: its header is not the one that was saved"
    end = 0
    for key, values in sorted(header.tensors.items(), key=lambda item: item[1].data_offsets):
        if values.data_offsets[0] != end or values.nbytes < 0:
            return f"{name}: {printable(key)!r} does not begin where the tensor before it ends"
        end = values.data_offsets[1]
    if end + len(header.data) != nbytes or header.tensors.keys() != expected.tensors.keys():
        return f"{name} does not hold the tensors that the index says"
    for tensor, kind, shape, key in parts:
        found, (dtype, wanted) = header.tensors[key], header_dtype(kind, shape)
        if (found.dtype, found.shape) != (dtype, wanted) or found.nbytes != math.prod(shape) * kind.itemsize:
            return f"{name}: {printable(stored_as(tensor))!r} has another shape or dtype than the index says"
    return None


@contextmanager
def _opened(folder: Path, name: str, expected: StoredFile) -> Iterator[tuple[Any, int]]:
    """Open a file that lies in the folder itself; yield it and its size.

    Raises:
        DamagedCheckpointError: it is missing, or is no plain file of the folder.
    """
    holds = f", which holds {printable(next(iter(expected.tensors)))!r}" if expected.tensors else ""
    more = f" and {len(expected.tensors) - 1} more tensors" if len(expected.tensors) > 1 else ""
    check_inside(folder, name, f"{holds}{more}")
    with (folder / name).open("rb", buffering=0) as file:
        yield file, os.fstat(file.fileno()).st_size


def damage_of(path: Path) -> str | None:
    """Look at every byte of a checkpoint; return what is wrong with it, None if nothing is."""
    try:
        open_sound_checkpoint(path)
    except CheckpointError as error:
        return error.finding if isinstance(error, DamagedCheckpointError) else str(error)
    return None
