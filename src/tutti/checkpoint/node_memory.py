"""Checkpoints in the memory of the nodes, which outlive the ranks: a restart goes on from them (GEMINI, SOSP 2023).

Each node has a folder in its memory, which its launcher makes and removes. The ranks of a node write their files there,
as they would into the run folder. Where there are several nodes, each rank then sends its file to a rank of the next
node, so that the loss of a node loses no file. The checkpoint gets its name on all nodes once all copies are complete.
Its id is in the index and in every file, so files of different checkpoints are never mixed.
"""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from tutti.checkpoint.contribution import Contribution
from tutti.checkpoint.index import (
    INDEX,
    RUN_STATE,
    StoredFile,
    checkpoint_step,
    complete_checkpoints,
    rank_file,
)
from tutti.checkpoint.integrity import find_damage
from tutti.checkpoint.save import describe_failure
from tutti.checkpoint.sources import Source, open_checkpoint, read_index, reader_of
from tutti.checkpoint.tensor_files import (
    PendingCheckpoint,
    hidden_name,
    index_text,
    make_temporary_folder,
    publish_folder,
    remove_folder,
    take_checksums,
    write_file,
)
from tutti.comm.rendezvous import open_group
from tutti.comm.world import World
from tutti.config.run_folder import RunFolder
from tutti.errors import CheckpointError, DamagedCheckpointError
from tutti.parallel.layout import TensorShard
from tutti.parallel.saved_values import parse_dtype

KEPT = 2
"""Complete checkpoints that stay. The older one is removed when the next is begun, so that there is room for that."""

_CHUNK_NBYTES = 4 * 2**20
"""Bytes of a message: so few that the small messages of steps do not wait long behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCheckpoint:
    """A checkpoint of which at least one node has files in its memory.

    Attributes:
        step: updates in it.
        id: tells checkpoints of the same step apart; empty where a node's index cannot be read.
    """

    step: int
    id: str

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"memory (step {self.step})"


class NodeMemory:
    """Where checkpoints in memory lie; see the module, and `tutti.checkpoint.save.CheckpointPlace`. Collective.

    Args:
        world: the ranks.
        folder: this node's folder, which all its ranks see, and no other node.
    """

    kind, lasting = "checkpoint in memory", False
    remedy = "Enlarge that file system, or name another one in memory in TUTTI_MEMORY_FOLDER"

    def __init__(self, world: World, folder: Path) -> None:
        self.folder, self._world = RunFolder(folder), world
        by_node: dict[tuple[str, str], list[int]] = {}
        for rank, node in enumerate(world.gather((world.host, str(folder)))):
            by_node.setdefault(node, []).append(rank)
        self._nodes, self._hosts = [*by_node.values()], [host for host, _ in by_node]
        self._node = next(number for number, ranks in enumerate(self._nodes) if world.rank in ranks)
        self._leads = self._members[0] == world.rank
        self._rooms: list[_Room | None] = []
        self._group: Any = None
        if len(self._nodes) > 1:
            self._group = open_group(range(world.world_size), backend="gloo", connect=False)

    @property
    def _members(self) -> list[int]:
        return self._nodes[self._node]

    # Saving.

    def make_folder(self, path: Path) -> tuple[str | None, str | None]:
        """Make the hidden folder on every node; only the newest complete checkpoint stays beside it. Collective."""
        name, failure = self._world.broadcast(hidden_name(path)), None
        room: _Room | None = None
        if self._leads:
            try:
                self._keep(KEPT - 1)
                make_temporary_folder(path, name)
                files = os.statvfs(self.folder.path)
                missing = KEPT - len(complete_checkpoints(self.folder.path))
                room = _Room(missing, files.f_bavail * files.f_frsize, psutil.virtual_memory().available)
            except OSError as error:
                failure = describe_failure(error)
        gathered = self._world.gather((failure, room))
        self._rooms = [room for _, room in gathered]
        failure = self._first([failure for failure, _ in gathered])
        return (name if failure is None else None), failure

    def refusal(self, contributions: Sequence[Contribution]) -> str | None:
        """Return why a node has no room for its files and copies, as `make_folder` has found it on all nodes."""
        for number, ranks in enumerate(self._nodes):
            own = sum(_nbytes(contributions[rank]) for rank in ranks)
            copies = sum(_nbytes(contributions[rank]) for rank in self._before(number))
            here = self._rooms[ranks[0]]
            if here is not None and here.missing * (own + copies) > min(here.folder, here.memory):
                return here.refusal(self._hosts[number], own, copies, self.folder.path.parent)
        return None

    def after_writing(self, pending: PendingCheckpoint) -> None:
        """Send this rank's file to a rank of the next node, and write what a rank of the node before sends.

        All ranks take part, also those that have failed or have no file.
        """
        if self._group is None:
            return
        file, outgoing = pending.temporary / rank_file(self._world.rank), torch.empty(0, dtype=torch.uint8)
        try:
            if pending.failure is None and file.exists():
                outgoing = _mapped(file, file.stat().st_size)
        except (OSError, RuntimeError) as error:
            pending.failure = describe_failure(error)
        receiver = self._receiver(self._world.rank)
        senders = [rank for rank in self._before(self._node) if self._receiver(rank) == self._world.rank]
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in senders}
        works = [dist.isend(torch.tensor([len(outgoing)]), receiver, group=self._group)]
        works += [dist.irecv(size, rank, group=self._group) for rank, size in sizes.items()]
        _wait(works)
        incoming = {
            rank: _ReceivedFile(pending.temporary / rank_file(rank), int(size))
            for rank, size in sizes.items()
            if size > 0  # else it has failed, or has no file
        }
        longest = max([len(outgoing), *(copy.nbytes for copy in incoming.values())])
        for begin in range(0, longest, _CHUNK_NBYTES):
            chunk = slice(begin, begin + _CHUNK_NBYTES)
            works = [dist.isend(outgoing[chunk], receiver, group=self._group)] if begin < len(outgoing) else []
            works += [
                dist.irecv(copy.part(chunk), rank, group=self._group)
                for rank, copy in incoming.items()
                if begin < copy.nbytes
            ]
            _wait(works)
        for copy in incoming.values():
            copy.finish()

    def publish(self, pending: PendingCheckpoint) -> tuple[str | None, int]:
        """Give every node the index and the run state, then name the checkpoint on every node. Collective."""
        file = pending.temporary / rank_file(self._world.rank)
        own: tuple[str, StoredFile] | None = None
        state, failure = b"", None
        try:
            own = (file.name, take_checksums(file)) if file.exists() else None
            state = (pending.temporary / RUN_STATE).read_bytes() if self._world.is_main else b""
        except OSError as error:
            failure = describe_failure(error)
        gathered = self._world.gather((failure, own))
        if (failure := self._first([failure for failure, _ in gathered])) is not None:
            return failure, 0
        files = dict(written for _, written in gathered if written is not None)
        index = index_text(pending, files) if self._world.is_main else b""
        if len(self._nodes) > 1:
            index, state = self._world.broadcast((index, state))
        # A kill while nodes name it leaves some without the name; all of them still have the checkpoint before.
        for do in (
            partial(_write_shared, pending, index, state),
            partial(publish_folder, pending.temporary, pending.path),
        ):
            try:
                if self._leads:
                    do()
            except OSError as error:
                failure = describe_failure(error)
            if (failure := self._first(self._world.gather(failure))) is not None:
                return failure, 0
        with suppress(OSError):
            self._keep(KEPT)
        return None, len(index)

    def discard(self, pending: PendingCheckpoint) -> None:
        """Remove what this node has of a checkpoint that is not complete on all nodes."""
        with suppress(OSError):
            if self._leads and pending.temporary.exists():
                remove_folder(pending.temporary)
            elif self._leads and self._id_of(pending.path) == pending.id:
                remove_folder(pending.path)

    def _keep(self, count: int) -> None:
        """Remove all but the newest complete checkpoints of this node, on its first rank."""
        for path in complete_checkpoints(self.folder.path)[:-count] if self._leads else ():
            remove_folder(path)

    def _first(self, failures: Sequence[str | None]) -> str | None:
        """Return the first failure among those of all ranks, with its host; None if there is none."""
        rank, found = next(((rank, found) for rank, found in enumerate(failures) if found is not None), (0, None))
        return None if found is None else f"host {self._host_of(rank)}: {found}"

    def _host_of(self, rank: int) -> str:
        return next(host for host, ranks in zip(self._hosts, self._nodes, strict=True) if rank in ranks)

    def _before(self, node: int) -> list[int]:
        """Return the ranks of the node whose files a node has copies of."""
        return self._nodes[node - 1] if len(self._nodes) > 1 else []

    def _receiver(self, rank: int) -> int:
        """Return the rank of the next node that a rank sends its file to."""
        node = next(number for number, ranks in enumerate(self._nodes) if rank in ranks)
        following = self._nodes[(node + 1) % len(self._nodes)]
        return following[self._nodes[node].index(rank) % len(following)]

    # Loading.

    def held(self) -> list[HeldCheckpoint]:
        """Return what any node has, the newest first. Collective."""
        own = [
            HeldCheckpoint(step=checkpoint_step(path), id=self._id_of(path))
            for path in (complete_checkpoints(self.folder.path) if self._leads else ())
        ]
        anywhere = {held for of_rank in self._world.gather(own) for held in of_rank}
        return sorted(anywhere, key=lambda held: (-held.step, not held.id, held.id))

    def open(self, held: HeldCheckpoint) -> tuple[Source, list[str]]:
        """Open a checkpoint whose files are on any of the nodes. Each file is looked at before it is used. Collective.

        Returns:
            The source, and a sentence about each damaged file that another node has a sound copy of.

        Raises:
            DamagedCheckpointError: on every rank, if no node has a sound copy of one of its files.
        """
        path = self._path_of(held)
        source, finding = None, None
        try:
            source = None if path is None else open_checkpoint(path)
        except CheckpointError as error:
            finding = error.finding if isinstance(error, DamagedCheckpointError) else str(error)
        opened = self._world.gather((source is not None, finding))
        owner = next((rank for rank, (reads, _) in enumerate(opened) if reads), None)
        if owner is None:
            raise _damaged(held, next(filter(None, (found for _, found in opened)), f"{INDEX} is on no node"))
        if not all(reads for reads, _ in opened):
            sent = self._world.broadcast(replace(source, read=None) if source is not None else None, owner)
            source = source or sent
        assert source is not None
        damage = {} if path is None else self._damage_here(source, path)
        holders, findings = self._holders(held, source, self._world.gather(damage))
        unread = [f"{found} (host {self._host_of(rank)})" for rank, (_, found) in enumerate(opened) if found]
        findings += [f"{each}: another node's copy is used" for each in dict.fromkeys(unread)]
        place = path or Path(held.name)
        return replace(source, path=place, read=reader_of(place), holders=holders), findings

    def reopen(self, held: HeldCheckpoint) -> Source:
        """Open a checkpoint again. Collective."""
        return self.open(held)[0]

    def forget_newer(self, step: int) -> None:
        """Remove this node's checkpoints of later steps than the one that the run goes on from: it makes them again."""
        for path in complete_checkpoints(self.folder.path) if self._leads else ():
            if checkpoint_step(path) > step:
                with suppress(OSError):
                    remove_folder(path)

    def _damage_here(self, source: Source, path: Path) -> dict[str, str | None]:
        """Look at this rank's share of the node's files; return what is wrong with each, None if nothing is."""
        here = [name for name in sorted(source.files) if name != RUN_STATE and (path / name).exists()]
        place = self._members.index(self._world.rank)
        damage: dict[str, str | None] = {}
        for name in here[place :: len(self._members)]:
            try:
                damage[name] = find_damage(_only(source, path, name))
            except DamagedCheckpointError as error:
                damage[name] = error.finding
        return damage

    def _holders(
        self, held: HeldCheckpoint, source: Source, gathered: list[dict[str, str | None]]
    ) -> tuple[dict[str, int], list[str]]:
        """Return the rank that reads each file which is not sound on all nodes, and sentences about damaged ones.

        Raises:
            DamagedCheckpointError: a file is sound nowhere.
        """
        holders, findings, lost = dict[str, int](), list[str](), list[str]()
        for name in sorted(source.files.keys() - {RUN_STATE}):
            sound, damaged = list[int](), list[str]()
            for number, ranks in enumerate(self._nodes):
                looked = [gathered[rank][name] for rank in ranks if name in gathered[rank]]
                if looked and looked[0] is None:
                    sound.append(number)
                elif looked:
                    damaged.append(f"{looked[0]} (host {self._hosts[number]})")
            if not sound:
                lost.append(damaged[0] if damaged else f"{name} was lost with the nodes that had it")
            elif len(sound) < len(self._nodes):
                holders[name] = self._nodes[sound[0]][0]
            findings += [f"{each}: another node's copy is used" for each in damaged if sound]
        if lost:
            raise _damaged(held, "; ".join(lost))
        return holders, findings

    def _path_of(self, held: HeldCheckpoint) -> Path | None:
        """Return where this node has a checkpoint; None if it has nothing of it."""
        paths = complete_checkpoints(self.folder.path)
        return next((p for p in paths if (checkpoint_step(p), self._id_of(p)) == (held.step, held.id)), None)

    @staticmethod
    def _id_of(path: Path) -> str:
        try:
            return read_index(path).id
        except CheckpointError:
            return ""


@dataclass(frozen=True, slots=True)
class _Room:
    """How many checkpoints a node is to hold beside those that it has, and the free bytes of its folder and memory."""

    missing: int
    folder: int
    memory: int

    def refusal(self, host: str, own: int, copies: int, root: Path) -> str:
        """Say that there is too little room for files of `own` and `copies` bytes on a host."""
        several = f"{self.missing} checkpoints of " if self.missing > 1 else "a checkpoint of "
        of = (
            f" (files of its ranks {own / 1e9:.3g} GB, copies of another node's {copies / 1e9:.3g} GB)"
            if copies
            else ""
        )
        free, where, remedy = (
            f"{min(self.folder, self.memory) / 1e9:.3g} GB",
            "memory",
            "divide the state among more nodes",
        )
        if self.folder <= self.memory:
            where = str(root)
            remedy = (
                f"enlarge {root} (mount -o remount,size=...; of a container: --shm-size), or name another folder in "
                "memory in TUTTI_MEMORY_FOLDER"
            )
        return (
            f"host {host} needs room for {several}{(own + copies) / 1e9:.3g} GB{of}, and {free} are free in {where}; "
            f"{remedy}, or leave out --memory-checkpoint-every"
        )


class _ReceivedFile:
    """A file that another rank sends. What cannot be written is received all the same, so that the sender can go on."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.nbytes, self._path = nbytes, path
        self._failure: Exception | None = None
        self._dropped = torch.empty(min(nbytes, _CHUNK_NBYTES), dtype=torch.uint8)
        self._unfinished = path.with_name(f"{path.name}.copy")
        try:
            with self._unfinished.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # a memory that is full says so here, not by a signal
            self._values = _mapped(self._unfinished, nbytes)
        except (OSError, RuntimeError) as error:
            self._failure = error

    def part(self, chunk: slice) -> torch.Tensor:
        """Return where the next bytes go."""
        if self._failure is not None:
            return self._dropped[: min(chunk.stop, self.nbytes) - chunk.start]
        return self._values[chunk]

    def finish(self) -> None:
        """Name the file.

        Raises:
            OSError, RuntimeError: it could not be written.
        """
        if self._failure is not None:
            raise self._failure
        self._unfinished.rename(self._path)


def _mapped(file: Path, nbytes: int) -> torch.Tensor:
    """Return the bytes of a file as a tensor that shares its memory."""
    return torch.from_file(str(file), shared=True, size=nbytes, dtype=torch.uint8)


def _write_shared(pending: PendingCheckpoint, index: bytes, state: bytes) -> None:
    """Write the files that every node has."""
    write_file(pending.temporary / RUN_STATE, state)
    write_file(pending.temporary / INDEX, index)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _nbytes(contribution: Contribution) -> int:
    """Return the size of the tensors that a rank writes, in bytes."""
    return sum(
        math.prod(TensorShard(shape=part.shape, cuts=part.cuts).local_shape) * parse_dtype(part.dtype).itemsize
        for part in contribution.parts
    )


def _only(source: Source, path: Path, name: str) -> Source:
    """Return what a source says about one of its files."""
    tensors = {}
    for key, stored in source.tensors.items():
        parts = tuple(part for part in stored.parts if part.file == name)
        if parts:
            tensors[key] = replace(stored, parts=parts)
    return replace(source, path=path, tensors=tensors, files={name: source.files[name]})


def _damaged(held: HeldCheckpoint, finding: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"the checkpoint in {held.name} is damaged: {finding}; use another one", finding)
