"""Saving: each distinct part is written once, by the rank that owns it, in the background where memory allows.

All ranks begin a checkpoint together: rank 0 makes a hidden folder, ranks tell each other what they will write, and
each writes its own file. When every file is on disk, rank 0 renames the folder. A kill, a full disk or a failure before
that leaves the earlier checkpoints as they are.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist

from tutti.background_thread import BackgroundThread
from tutti.checkpoint.averages import collect_averages
from tutti.checkpoint.contribution import (
    Collected,
    Contribution,
    WrittenPart,
    collect,
    find_conflict,
    merge_contributions,
)
from tutti.checkpoint.index import INDEX, RUN_STATE, latest_checkpoint, rank_file
from tutti.checkpoint.rank_state import collect_replica_state, collect_residuals
from tutti.checkpoint.retention import Retention, prune
from tutti.checkpoint.tensor_files import (
    PendingCheckpoint,
    TensorToWrite,
    in_file_order,
    index_text,
    make_temporary_folder,
    publish_folder,
    remove_folder,
    take_checksums,
    tensor_on_demand,
    tensor_to_write,
    write_checksums,
    write_file,
    write_tensors,
)
from tutti.checkpoint.training_state import TrainingState
from tutti.checkpoint.uploads import Uploads
from tutti.comm.world import World
from tutti.config.run_folder import RunFolder
from tutti.errors import CheckpointError
from tutti.host_memory import long_lived_blocks
from tutti.local_sgd.consistency import ReplicaState
from tutti.parallel.layout import TensorShard
from tutti.parallel.saved_values import parse_dtype

UNFINISHED, FAILED = ".part", ".failed"
"""Suffixes of a file that is being written, and of the marker that it could not be written."""

PATIENT = 10
"""A checkpoint that is due waits for the next batch for so many updates, or `every` if that is more."""

_PATIENCE_S = 10.0
"""Seconds that rank 0, when its process ends, waits for other ranks' files that do not grow."""

_THREAD = BackgroundThread("tutti-checkpoint")
"""Writes the checkpoints of the process in the background."""

RowWriter = Callable[[dict[str, Any]], None]
"""Is called with the fields of the row about a finished checkpoint, for rank 0's metrics."""


class CheckpointPlace(Protocol):
    """Where a writer's checkpoints lie.

    Attributes:
        folder: the run folder, or a folder of the same form.
        kind: what its checkpoints are called in messages.
        remedy: what to do when there is no room, as a sentence.
        lasting: whether a checkpoint that is being written is finished when the process ends.
    """

    folder: RunFolder
    kind: str
    remedy: str
    lasting: bool

    def make_folder(self, path: Path) -> tuple[str | None, str | None]:
        """Make the hidden folder in which a checkpoint is written; return its name, or why there is none. Collective.

        Args:
            path: the checkpoint's folder once it is complete.
        """
        ...

    def refusal(self, contributions: Sequence[Contribution]) -> str | None:
        """Return why there is no room for what the ranks are about to write, the same on all of them. Collective."""
        ...

    def after_writing(self, pending: PendingCheckpoint) -> None:
        """Do what follows when this rank has written its files, or has failed to. Called by the thread that writes."""
        ...

    def publish(self, pending: PendingCheckpoint) -> tuple[str | None, int]:
        """Name the complete checkpoint; return what went wrong, if anything, and the index's size. Collective."""
        ...

    def discard(self, pending: PendingCheckpoint) -> None:
        """Remove what there is of a checkpoint that will not be complete."""
        ...


class RunFolderPlace:
    """Checkpoints in the run folder: rank 0 makes and names their folders. See `CheckpointPlace`.

    Args:
        world: the ranks.
        folder: the run folder.
        retention: returns which of the earlier checkpoints stay there.
    """

    kind, lasting = "checkpoint", True
    remedy = "Free space or name another folder, then resume"

    def __init__(self, world: World, folder: RunFolder, retention: Callable[[], Retention]) -> None:
        self.folder, self._world, self._retention = folder, world, retention

    def make_folder(self, path: Path) -> tuple[str | None, str | None]:
        name, failure = None, None
        if self._world.is_main:
            try:
                name = make_temporary_folder(path)
            except OSError as error:
                failure = describe_failure(error)
        return self._world.broadcast((name, failure))

    def refusal(self, contributions: Sequence[Contribution]) -> str | None:
        return None  # a full disk says so itself

    def after_writing(self, pending: PendingCheckpoint) -> None:
        pass

    def publish(self, pending: PendingCheckpoint) -> tuple[str | None, int]:
        return self._world.broadcast(self.publish_here(pending) if self._world.is_main else (None, 0))

    def publish_here(self, pending: PendingCheckpoint) -> tuple[str | None, int]:
        """On rank 0: name the complete checkpoint; return what went wrong, if anything, and the index's size."""
        try:
            files = {name: take_checksums(pending.temporary / name) for name in pending.files}
            nbytes = write_file(pending.temporary / INDEX, index_text(pending, files)).nbytes
            publish_folder(pending.temporary, pending.path)
        except OSError as error:
            return describe_failure(error), 0
        with suppress(OSError):  # the new checkpoint is valid even if old ones cannot be listed
            prune(self._retention(), self.folder.path, pending.path)
        return None, nbytes

    def discard(self, pending: PendingCheckpoint) -> None:
        with suppress(OSError):  # a disk that failed may fail again; the next checkpoint removes it, too
            if self._world.is_main and pending.temporary.exists():
                remove_folder(pending.temporary)


class CheckpointWriter:
    """Saves the checkpoints of one run. All ranks call its methods in the same order.

    Args:
        training: the state to save.
        folder: the run folder.
        every: steps between two checkpoints; None: only when `save` is called.
        retention: which of the earlier checkpoints stay.
        write_row: called when a checkpoint is complete, or could not be written.
        say: called with a sentence when checkpoints begin to fail, and when they are written again.
        uploads: sends complete checkpoints to an object store, where `retention` then applies; None: there is none.
        place: where checkpoints lie; None: in the run folder.
    """

    def __init__(
        self,
        training: TrainingState,
        folder: RunFolder,
        *,
        every: int | None,
        retention: Retention,
        write_row: RowWriter,
        say: Callable[[str], None],
        uploads: Uploads | None = None,
        place: CheckpointPlace | None = None,
    ) -> None:
        self._training, self._world = training, training.parallel.world
        self._run_folder_place = RunFolderPlace(self._world, folder, self._local_retention)
        self.place: CheckpointPlace = place or self._run_folder_place
        self._folder, self._every, self._write_row, self._say = self.place.folder, every, write_row, say
        self.retention, self.uploads = retention, uploads
        self._missed: str | None = None
        self._pending: PendingCheckpoint | None = None
        self._due: int | None = None
        self._begun: int | None = None
        if every is not None or retention.best is not None:
            _THREAD.start()  # before loaders fork their workers

    @property
    def begun_at(self) -> int | None:
        """The step of the newest checkpoint that was begun; None if there is none."""
        return self._begun

    def evaluated(self, values: Mapping[str, float]) -> None:
        """After an evaluation: a checkpoint is due if the step is the best so far.

        Args:
            values: its results, by "name/metric".
        """
        step = self._training.progress.step
        if self.uploads is not None:
            self.uploads.evaluated(step, values)
        if self.retention.improves(step, values) and self._begun != step and self._due is None:
            self._due = step

    def save(self) -> tuple[Path, int]:
        """Write a checkpoint of the current state. Collective.

        Returns:
            The checkpoint's folder and its size in bytes.

        Raises:
            CheckpointError: on every rank, if any rank fails; earlier checkpoints stay complete.
        """
        self.finish()
        self._due = None
        self._pending = pending = self._begin(background=False)
        assert pending is not None  # a failure is raised
        pending.asked = True
        return pending.path, self.finish()

    @property
    def due(self) -> int | None:
        """The step after which a checkpoint became due that has not begun; None if there is none."""
        return self._due

    def updated(self, *, again: bool = False) -> bool:
        """After every update: note whether a checkpoint is due, and finish one that is written.

        Args:
            again: whether it is not the first update on its batch. A checkpoint that counts the batch as taken and was
                begun after the update before is then followed by another.

        Returns:
            Whether a checkpoint has been due for so long that the script seems to stay on its batch.

        Raises:
            CheckpointError: on every rank in the same step, if the state cannot be saved.
        """
        step = self._training.progress.step
        if self._every and self._due is None and (step % self._every == 0 or (again and self._begun == step - 1)):
            self._due = step
        if self._pending is not None:
            self._finish_if_written(self._pending)
        if self.uploads is not None:
            self.uploads.report()
        return self._every is not None and self._due is not None and step - self._due >= max(self._every, PATIENT)

    def save_when_due(self) -> None:
        """Where a batch is done: begin a checkpoint in the background if one is due.

        A checkpoint counts the batch that the loader yielded last as taken, so it waits until all updates on that batch
        are made.

        Raises:
            CheckpointError: on every rank in the same step, if the state cannot be saved. A disk that fails is only
                said: training goes on.
        """
        if self._due is not None:
            self.finish()
            self._due = None
            self._pending = self._begin(background=True)
        if self._pending is not None:
            self._finish_if_written(self._pending)

    def finish(self) -> int:
        """Wait for the checkpoint that is being written, if any; return its size in bytes. Collective."""
        pending = self._pending
        if pending is None:
            return 0
        before = time.perf_counter()
        if pending.writing is not None:
            pending.writing.join()
        pending.blocked_s += time.perf_counter() - before
        return self._finish_if_written(pending)

    def finish_at_exit(self) -> str | None:
        """Finish the pending checkpoint when the process ends, without communication.

        Every rank finishes its own file. Rank 0 waits for the others' files as long as they grow, then renames the
        folder.

        Returns:
            What went wrong, as a sentence; None if nothing did.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return self._missed if self._world.is_main and self.place.lasting else None
        if pending.writing is not None:
            pending.writing.join()
        if not self.place.lasting:
            self.place.discard(pending)
            return None
        failure = pending.failure
        if self._world.is_main and failure is None:
            missing = _wait_for_files(pending)
            failure = f"{missing} was not written" if missing else self._run_folder_place.publish_here(pending)[0]
        if failure is None:
            if self.uploads is not None:
                self.uploads.begin(pending, self.retention, skip=False)
            return None
        self.place.discard(pending)
        if self.uploads is not None:
            self.uploads.forget_left_out()
        return f"the checkpoint of step {pending.step} was not finished: {failure}; earlier checkpoints are intact"

    def abandon(self) -> None:
        """Leave the pending checkpoint and uploads unfinished, without waiting: another rank's part of them is lost."""
        if self.uploads is not None:
            self.uploads.abandon()
            self.uploads = None
        pending, self._pending, self._due = self._pending, None, None
        if pending is not None and pending.writing is not None:
            _THREAD.submit(partial(self.place.discard, pending))  # after this rank's own part
        elif pending is not None:
            self.place.discard(pending)

    def finish_uploads(self) -> str | None:
        """Wait for uploads when the process ends, without communication of the ranks.

        Returns:
            On rank 0, why the last checkpoint is not in the store, as a sentence; None if it is, or there is no store.
        """
        return None if self.uploads is None else self.uploads.finish(self.retention)

    def _begin(self, *, background: bool) -> PendingCheckpoint | None:
        """Agree on which rank writes what, and start writing the current state. Collective.

        Returns:
            The checkpoint that is being written; None if the disk failed and training goes on.
        """
        started, self._begun = time.perf_counter(), self._training.progress.step
        self._training.noise.flush(self._world)
        path = self._folder.checkpoints / f"step-{self._training.progress.step:08d}"
        name, failure = self.place.make_folder(path)
        if name is None:
            self._miss(path, failure, asked=not background)
            return None
        pending = PendingCheckpoint(
            step=self._training.progress.step,
            path=path,
            temporary=path.with_name(name),
            started_s=started,
            background=background,
        )
        with self._training.consistency.averaged_model(self._training.parallel, saving=True) as replica_state:
            self._contribute(pending, replica_state)
        pending.blocked_s = time.perf_counter() - started
        return pending

    def _contribute(self, pending: PendingCheckpoint, replica_state: ReplicaState) -> None:
        """Collect this rank's state, agree with the others, and start writing. Collective."""
        try:
            collected = Collected(Contribution())
            collect(self._training, collected)
            collect_averages(self._training, collected)
            collect_residuals(self._training, collected)
            collect_replica_state(self._training, replica_state, collected)
        except Exception as error:  # the user's optimizer may raise, and the other ranks must not wait for this one
            collected = Collected(Contribution(failure=describe_failure(error)))
        collected.contribution.sees_folder = pending.temporary.is_dir()
        contributions = self._world.gather(collected.contribution)
        failure = find_conflict(contributions)
        if failure is not None:
            self.place.discard(pending)
            raise self._failed(pending.path, failure)
        pending.failure = self.place.refusal(contributions)
        self._write(pending, contributions, collected.tensors)

    def _write(
        self, pending: PendingCheckpoint, contributions: list[Contribution], tensors: list[TensorToWrite]
    ) -> None:
        """Start writing this rank's files. A failure stays in `pending` until all ranks learn of it."""
        rank, state = self._world.rank, None
        if self._world.is_main:
            try:
                pending.index, state = merge_contributions(self._training, contributions, pending.id)
            except CheckpointError as error:
                pending.failure, pending.unsavable = str(error), True
            writers = [other for other, contribution in enumerate(contributions) if contribution.parts]
            pending.files = [rank_file(other) for other in writers]
        for other, contribution in enumerate(contributions):  # rank 0 writes the files of ranks that see another disk
            if not contribution.sees_folder and contribution.parts:
                if rank == other:
                    _send_tensors(self._world, tensors)
                elif rank == 0:
                    pending.nbytes += _write_received(self._world, pending, other, contribution)
        if not contributions[rank].sees_folder:
            return
        if pending.background and pending.failure is None:
            try:
                tensors, pending.background = _copy_to_host(tensors, self._world)
            except (RuntimeError, MemoryError) as error:
                pending.failure = describe_failure(error)
        arguments = (pending, rank, tensors, state, self.place)
        if not pending.background:
            _write_files(*arguments)
            return
        pending.writing = _THREAD.submit(partial(_write_files, *arguments))

    def _finish_if_written(self, pending: PendingCheckpoint) -> int:
        """Publish the checkpoint if every rank has written; return its size in bytes, else 0. Collective."""
        flags = [not pending.written, pending.written and pending.failure is not None]
        flags.append(self.uploads is not None and self.uploads.busy)
        counts = torch.tensor([*map(float, flags), pending.nbytes], dtype=torch.float64, device=self._world.device)
        writing, failed, uploading, nbytes = self._world.sum(counts).tolist()
        if writing:
            return 0
        self._pending = None
        before, failure, unsavable = time.perf_counter(), None, False
        if failed:
            failures = enumerate(self._world.gather((pending.failure, pending.unsavable)))
            failure, unsavable = next(
                (f"rank {rank}: {message}", unsavable) for rank, (message, unsavable) in failures if message is not None
            )
        else:
            failure, index_nbytes = self.place.publish(pending)
            nbytes += index_nbytes
        if failure is not None:
            self.place.discard(pending)
            self._miss(pending.path, failure, asked=pending.asked or unsavable)
            return 0
        pending.blocked_s += time.perf_counter() - before
        if self._missed is not None:
            kinds = self.place.kind.replace("checkpoint", "checkpoints")
            self._say(f"{kinds} are written again, that of step {pending.step} is complete")
        self._missed = None
        if self.uploads is not None:
            step = self.retention.best_step()
            self.uploads.begin(
                pending, self.retention, skip=bool(uploading) and not pending.asked and step != pending.step
            )
        self._log_row(pending, int(nbytes))
        return int(nbytes)

    def _local_retention(self) -> Retention:
        """Which of the earlier checkpoints stay in the run folder."""
        return self.retention if self.uploads is None else self.uploads.local_retention(self.retention)

    def _miss(self, path: Path, reason: str | None, *, asked: bool) -> None:
        """A checkpoint could not be written: raise that if it was `asked` for; else say it once, and go on training."""
        error = self._failed(path, reason)
        if asked:
            raise error
        if self._missed is None:
            self._say(f"{error}; training goes on, and the next checkpoint is tried when it is due")
        self._missed = str(error)
        self._write_row({"step": int(path.name.removeprefix("step-")), "failure": str(reason)})

    def _log_row(self, pending: PendingCheckpoint, nbytes: int) -> None:
        """Write the row about a finished checkpoint.

        `duration_s` is how long training waited; `written_s`, the time from the beginning until the folder was
        published.
        """
        fields = {
            "step": pending.step,
            "duration_s": pending.blocked_s,
            "written_s": time.perf_counter() - pending.started_s,
            "background": pending.background,
            "path": pending.path.relative_to(self._folder.path),
            "nbytes": nbytes,
        }
        self._write_row(fields)

    def _failed(self, path: Path, reason: str | None) -> CheckpointError:
        last = latest_checkpoint(self._folder.path)
        remedy = f". {self.place.remedy}" if "[Errno" in str(reason) else ""
        what = f"{self.place.kind} of step {int(path.name.removeprefix('step-'))}"
        return CheckpointError(
            f"{what} could not be written to {path}: {reason}; "
            f"earlier checkpoints are intact (newest: {last.name if last else 'none'}){remedy}"
        )


def _wait_for_files(pending: PendingCheckpoint) -> str | None:
    """Wait until all ranks' files are complete; return the name of one that is not, if any."""
    seen, since = -1, time.monotonic()
    while True:
        missing = [name for name in pending.files if not (pending.temporary / name).exists()]
        if not missing:
            return None
        if any((pending.temporary / (name + FAILED)).exists() for name in missing):
            return missing[0]
        size = 0
        for path in pending.temporary.glob("rank-*"):
            with suppress(FileNotFoundError):  # another rank gave it its name meanwhile
                size += path.stat().st_size
        if size != seen:
            seen, since = size, time.monotonic()
        if time.monotonic() - since > _PATIENCE_S:
            return missing[0]
        time.sleep(0.02)


def _write_files(
    pending: PendingCheckpoint, rank: int, tensors: list[TensorToWrite], state: bytes | None, place: CheckpointPlace
) -> None:
    """Write this rank's tensor file, and on rank 0 the run state."""
    try:
        if pending.failure is None and tensors:
            pending.nbytes += _write_tensor_file(pending, rank, tensors)
        if pending.failure is None and state is not None:
            written = pending.written_files[RUN_STATE] = write_file(pending.temporary / RUN_STATE, state)
            pending.nbytes += written.nbytes
            pending.uploads.append(RUN_STATE)
    except Exception as error:  # whatever it is, all ranks must learn of it
        pending.failure = describe_failure(error)
        with suppress(OSError):
            (pending.temporary / (rank_file(rank) + FAILED)).touch()
    try:
        place.after_writing(pending)
    except Exception as error:
        pending.failure = pending.failure or describe_failure(error)


def _write_tensor_file(pending: PendingCheckpoint, rank: int, tensors: list[TensorToWrite]) -> int:
    """Write the file of a rank and its checksums; return its size in bytes."""
    file = pending.temporary / rank_file(rank)
    unfinished = file.with_name(file.name + UNFINISHED)
    written = write_tensors(unfinished, tensors, {"checkpoint": pending.id, "step": str(pending.step)})
    write_checksums(file, written)
    unfinished.rename(file)
    pending.uploads.append(file.name)
    return written.nbytes


def _copy_to_host(tensors: list[TensorToWrite], world: World) -> tuple[list[TensorToWrite], bool]:
    """Copy tensors to host memory.

    Returns:
        The copies and True; or the tensors themselves and False if too little memory is free.
    """
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if nbytes * world.local_world_size > psutil.virtual_memory().available // 2:
        return tensors, False
    pinned = world.device.type != "cpu"
    copies = []
    with long_lived_blocks():
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            copies.append(tensor_to_write(tensor.key, copy.copy_(tensor.make().detach(), non_blocking=True)))
    if pinned:
        torch.accelerator.synchronize(world.device)
    return copies, True


def _send_tensors(world: World, tensors: list[TensorToWrite]) -> None:
    """Send this rank's tensors to rank 0, one by one, in the order of their file."""
    for tensor in in_file_order(tensors):
        if tensor.nbytes:
            data = tensor.make().detach().contiguous().reshape(-1).view(torch.uint8)
            dist.send(data.to(world.device), dst=0)


def _write_received(world: World, pending: PendingCheckpoint, sender: int, contribution: Contribution) -> int:
    """On rank 0: write the file of a rank that sends its tensors; return its size in bytes."""
    expected = [_expected(part) for part in contribution.parts]
    incoming = _receive(world, sender, expected)
    fed = [
        TensorToWrite(key=tensor.key, shape=tensor.shape, dtype=tensor.dtype, make=lambda: next(incoming))
        for tensor in expected
    ]
    try:
        return _write_tensor_file(pending, sender, fed)
    except OSError as error:
        pending.failure = pending.failure or describe_failure(error)
        return 0
    finally:
        for _ in incoming:  # even if the disk is full, the sender's remaining messages must be received
            pass


def _expected(part: WrittenPart) -> TensorToWrite:
    """Describe a tensor that another rank will send."""
    shape = TensorShard(shape=part.shape, cuts=part.cuts).local_shape
    return tensor_on_demand(part.stored_as, shape, parse_dtype(part.dtype), lambda: torch.empty(0))


def _receive(world: World, sender: int, tensors: list[TensorToWrite]) -> Iterator[torch.Tensor]:
    """Yield the tensors that another rank sends, in the order of their file."""
    for tensor in in_file_order(tensors):
        data = torch.empty(tensor.nbytes, dtype=torch.uint8, device=world.device)
        if tensor.nbytes:
            dist.recv(data, src=sender)
        yield data.cpu().view(tensor.dtype).reshape(tensor.shape)


def describe_failure(error: BaseException) -> str:
    """Return an error that kept a checkpoint from being written, as one line."""
    text = str(error).splitlines()[0] if str(error) else ""
    return text if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__} {text}".rstrip()
