"""Uploading: each rank sends the files that it wrote to the object store, and rank 0 the index once all are there.

The checkpoint in the run folder is complete before its upload begins. Links to its files keep them while newer
checkpoints replace it. A failed upload ends no training: the next checkpoint is uploaded when it is due.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tutti.background_thread import BackgroundTask, BackgroundThread
from tutti.checkpoint.checksums import printable
from tutti.checkpoint.index import INDEX, rank_file
from tutti.checkpoint.retention import Retention, values_by_step
from tutti.checkpoint.store import CheckpointStore, StoredCheckpoint
from tutti.checkpoint.tensor_files import PendingCheckpoint
from tutti.comm.world import World, thread_store
from tutti.config import serialization
from tutti.config.run_folder import RunFolder, RunHeader, is_store_address
from tutti.config.safe_text import plain_text
from tutti.errors import CheckpointError, StoreError, TuttiError

_LINKS = ".uploading"
"""Folder beside the checkpoints with links to the files that are being uploaded."""

_POLL_S = 0.1

_OTHERS_S = 600.0
"""Seconds that rank 0 waits for other ranks' files once its own are uploaded."""

_THREAD = BackgroundThread("tutti-upload")
"""Uploads the checkpoints of the process."""

SendRow = Callable[[dict[str, Any]], None]
"""Is called with the fields of the row about an upload."""


@dataclass(slots=True, kw_only=True)
class _Upload:
    """A checkpoint on its way to the store.

    Attributes:
        name: its folder there.
        files: links to the files that this rank uploads, by name.
        awaited: on rank 0, the ranks that upload files of their own.
        submitted_s, seconds: when it was submitted, and how long it took until the index was uploaded.
        failure: what went wrong.
        untold: whether rank 0 could not be told of it.
    """

    step: int
    name: str
    files: dict[str, Path]
    awaited: list[int]
    submitted_s: float
    seconds: float = 0.0
    nbytes: int = 0
    failure: str | None = None
    untold: bool = False
    task: BackgroundTask | None = field(default=None)


class Uploads:
    """Uploads the checkpoints of one run. All ranks begin the same ones, in the same order.

    Args:
        store: where to.
        world: the ranks.
        checkpoints: the folder of the run's checkpoints.
        keep_local: how many of the newest checkpoints stay in the run folder.
        write_row: called on every rank when an upload has ended.
        say: called with a sentence when uploads begin to fail, and when they succeed again.
        evaluations: results of evaluations by step, that the store has.
    """

    def __init__(
        self,
        store: CheckpointStore,
        world: World,
        checkpoints: Path,
        *,
        keep_local: int,
        write_row: SendRow,
        say: Callable[[str], None],
        evaluations: Mapping[int, Mapping[str, float]],
    ) -> None:
        self.store, self._world, self._links = store, world, checkpoints / _LINKS
        self._keep_local, self._write_row, self._say = keep_local, write_row, say
        self._evaluations = {step: dict(values) for step, values in evaluations.items()}
        self._all: list[_Upload] = []
        self._newest: str | None = None
        self._failed: str | None = None
        self._left_out: PendingCheckpoint | None = None
        self._forgotten: int | None = None
        self._slow = self._abandoned = False
        self._messages: Any = None
        self.passed_over: set[str] = set()
        if world.is_main:
            shutil.rmtree(self._links, ignore_errors=True)
        _THREAD.start()  # before loaders fork their workers

    @property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """Results of evaluations by step, of which rank 0 knows those of earlier parts of the run."""
        return self._evaluations

    @property
    def busy(self) -> bool:
        """Whether an upload of this rank has not ended."""
        return any(upload.task is not None and not upload.task.done for upload in self._all)

    def local_retention(self, retention: Retention) -> Retention:
        """Return which checkpoints stay in the run folder."""
        return replace(retention, keep=self._keep_local, best=None, values={})

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Note the results of an evaluation, which are stored with the next checkpoint."""
        self._evaluations.setdefault(step, {}).update(values)

    def begin(self, pending: PendingCheckpoint, retention: Retention, *, skip: bool) -> None:
        """Upload a checkpoint that is complete in the run folder, or is about to be. All ranks call it.

        Args:
            pending: the checkpoint.
            retention: which checkpoints stay in the store.
            skip: whether the upload before has not ended on some rank, so that this one is left out.
        """
        name = f"step-{pending.step:08d}.{pending.id}"
        if skip:
            if not self._slow:
                self._slow = True
                self._say(
                    f"the checkpoint of step {pending.step} stays in the run folder only: the one before is still "
                    f"being uploaded to {self.store.address}; so will others, and the last is always uploaded (raise "
                    "checkpoint_every to have all there)"
                )
            self._left_out = pending
            return
        self._left_out = None
        own = set(pending.uploads)
        awaited = [rank for rank in range(self._world.world_size) if rank_file(rank) in set(pending.files) - own]
        upload = _Upload(step=pending.step, name=name, files={}, awaited=awaited, submitted_s=time.perf_counter())
        if self._world.is_main:
            own.add(INDEX)
        try:
            for file in sorted(own):
                upload.files[file] = self._linked(pending, name, file)
        except OSError as error:
            upload.failure = f"{error.filename}: {error.strerror or error}"
        self._all.append(upload)
        kept = replace(retention, values=dict(retention.values))
        upload.task = _THREAD.submit(partial(self._upload, upload, kept))

    def report(self, *, at_end: bool = False) -> None:
        """Say and write down what has ended since the last call; `at_end`, `finish` says what failed."""
        while self._all and (task := self._all[0].task) is not None and task.done:
            upload = self._all.pop(0)
            if task.error is not None and upload.failure is None:
                upload.failure = printable(task.error, 600)
            if self._world.is_main:
                self._report(upload, at_end=at_end)
            elif upload.untold and self._failed is None:
                self._failed = upload.failure
                sentence = (
                    f"tutti: rank {self._world.rank} could not tell rank 0 of its files of the checkpoint of step "
                    f"{upload.step}, so that it is not complete in {self.store.address}: {upload.failure}"
                )
                print(plain_text(sentence), file=sys.stderr)

    def finish(self, retention: Retention) -> str | None:
        """Wait for all uploads when the process ends; return what is wrong with the last one, on rank 0.

        Args:
            retention: which checkpoints stay in the store.
        """
        if self._left_out is not None:
            self.begin(self._left_out, retention, skip=False)
        started, said = time.perf_counter(), False
        for upload in self._all:
            while upload.task is not None and not upload.task.done:
                if not said and time.perf_counter() - started > 2:
                    said = True
                    self._say(f"waiting until the checkpoint of step {upload.step} is in {self.store.address}")
                time.sleep(_POLL_S / 2)
        self.report(at_end=True)
        if self._forgotten is not None:
            self._failed = self._sentence(self._forgotten, "the one after it was not finished when the run ended")
        return self._failed if self._world.is_main else None

    def forget_left_out(self) -> None:
        """The process ends and the last checkpoint was not finished: do not wait for ranks that upload only that one.

        They have not heard of the failure, as ranks that end do not communicate.
        """
        left_out = self._left_out
        if left_out is not None and self._world.world_size > 1:
            self._left_out, self._forgotten = None, left_out.step

    def abandon(self) -> None:
        """Wait no more for other ranks, of which some are lost. Files that are being uploaded may still arrive."""
        self._abandoned = True

    def _links_of(self, name: str) -> Path:
        """Return the folder of this rank's links; no other rank removes it."""
        return self._links / f"{name}.rank-{self._world.rank:05d}"

    def _linked(self, pending: PendingCheckpoint, name: str, file: str) -> Path:
        """Link a file of the checkpoint, which may get its name just now; copy it where links do not exist."""
        link = self._links_of(name) / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        for folder in (pending.temporary, pending.path, pending.path):
            try:
                os.link(folder / file, link)
                return link
            except FileNotFoundError:
                continue
            except OSError:
                shutil.copyfile(folder / file, link)
                return link
        raise FileNotFoundError(2, "is missing", str(pending.path / file))

    def _report(self, upload: _Upload, *, at_end: bool) -> None:
        fields: dict[str, Any] = {"step": upload.step, "to": f"{self.store.address}/{upload.name}"}
        if upload.failure is None:
            if self._failed is not None:
                self._say(f"uploads work again: the checkpoint of step {upload.step} is in {self.store.address}")
            self._failed, self._newest = None, upload.name
            self._write_row({**fields, "uploaded_s": upload.seconds, "nbytes": upload.nbytes})
            return
        sentence = self._sentence(upload.step, upload.failure)
        if self._failed is None and not at_end:
            self._say(f"{sentence}; training goes on, and the next checkpoint is uploaded when it is due")
        self._failed = sentence
        self._write_row({**fields, "failure": upload.failure})

    def _sentence(self, step: int, failure: str) -> str:
        newest = f"that of step {int(self._newest[5:].partition('.')[0])}" if self._newest else "none of this run"
        local = self._links.parent / f"step-{step:08d}"
        whole = f"it is complete in {local}, " if local.is_dir() else ""
        failed = f"the checkpoint of step {step} could not be uploaded: {failure}"
        return f"{failed}; {whole}the newest in the store is {newest}"

    def _upload(self, upload: _Upload, retention: Retention) -> None:
        """Upload this rank's files; on rank 0 also the index once all ranks' files are there, then prune the store."""
        try:
            for file, link in upload.files.items():
                if file != INDEX and upload.failure is None:
                    upload.nbytes += link.stat().st_size
                    self.store.put(f"{upload.name}/{file}", link)
        except (CheckpointError, OSError) as error:
            upload.failure = printable(error, 600)
        try:
            if not self._world.is_main:
                self._store().set(_message_key(upload.name, self._world.rank), upload.failure or "")
            elif upload.failure is None:
                self._publish(upload, retention)
        except Exception as error:  # also of the ranks' own store, whose rank 0 may have gone
            upload.failure = upload.failure or printable(error, 600)
            upload.untold = not self._world.is_main
        for link in upload.files.values():
            with suppress(OSError):
                link.unlink()
        with suppress(OSError):  # it does not exist if nothing was linked
            self._links_of(upload.name).rmdir()
        upload.seconds = time.perf_counter() - upload.submitted_s

    def _publish(self, upload: _Upload, retention: Retention) -> None:
        self._await(upload)
        self.store.put(f"{upload.name}/{INDEX}", upload.files[INDEX])
        with suppress(StoreError):  # the new checkpoint is complete even if old ones cannot be removed
            self.store.put_evaluations(self._evaluations)
            prune_store(self.store, retention, newest=upload.name, passed_over=self.passed_over)

    def _await(self, upload: _Upload) -> None:
        """Wait until the other ranks have uploaded their files.

        Raises:
            StoreError: one of them could not, or is silent.
        """
        deadline = time.monotonic() + _OTHERS_S
        for rank in upload.awaited:
            key = _message_key(upload.name, rank)
            while not self._store().check([key]):
                if self._abandoned:
                    raise StoreError(f"rank {rank} may be lost, and its file with it")
                if time.monotonic() > deadline:
                    raise StoreError(f"rank {rank} has not uploaded its file after {_OTHERS_S:g} s")
                time.sleep(_POLL_S)
            failure = self._store().get(key).decode()
            if failure:
                raise StoreError(f"rank {rank}: {failure}")

    def _store(self) -> Any:
        if self._messages is None:
            self._messages = thread_store()
        return self._messages


def open_uploads(
    world: World,
    folder: RunFolder,
    asked: str | None,
    resumed: Path | str | None,
    *,
    patient: bool,
    keep_local: int,
    write_row: SendRow,
    say: Callable[[str], None],
) -> Uploads | None:
    """Open the store of a run, and try whether it can be used. Collective.

    Args:
        world: the ranks.
        folder: the run folder.
        asked: the store's address; "none": no store; None: that of the run that is resumed.
        resumed: what the run is resumed from.
        patient: whether a store that cannot be reached is only said, because the run has trained before.
        keep_local: how many of the newest checkpoints stay in the run folder.
        write_row: is called with the fields of the row about an upload.
        say: is called with sentences for the user.

    Raises:
        StoreError: on every rank, if a host cannot use the store, or it holds another run's checkpoints.
    """
    address = world.broadcast(asked or (store_of_run(resumed) if _goes_on_there(resumed, folder) else None))
    if address is None or address == "none":
        return None
    store, evaluations, failure = None, dict[int, dict[str, float]](), None
    try:
        store = CheckpointStore(str(address))
        if world.is_main:
            known = {store_of_run(folder.path), store_of_run(resumed)}
            evaluations = _first_look(store, folder.path, goes_on=store.address in known)
        elif world.local_rank == 0:
            store.checkpoints()
    except StoreError as error:
        failure = error
    failure = next((other for other in world.gather(failure) if other is not None), None)
    if failure is not None and (store is None or not patient):
        others = "; --checkpoint-store none goes on without a store" if isinstance(resumed, Path) else ""
        raise StoreError(f"{failure}{others}")
    if failure is not None:
        say(f"{failure}; training goes on, and the next checkpoint is uploaded when it is due")
    assert store is not None
    uploads = Uploads(
        store, world, folder.checkpoints, keep_local=keep_local, write_row=write_row, say=say, evaluations=evaluations
    )
    return uploads


def _goes_on_there(resumed: Path | str | None, folder: RunFolder) -> bool:
    """Whether a run stores where the one that it resumes did: from a store, or in the same run folder."""
    return is_store_address(resumed) or (
        isinstance(resumed, Path) and folder.path.resolve() in (resumed.resolve(), *resumed.resolve().parents)
    )


def store_of_run(run: Path | str | None) -> str | None:
    """Return the address of the store that the checkpoints of a run are in.

    Args:
        run: the run folder, a checkpoint in it, or an address.
    """
    if run is None or isinstance(run, str):
        return None if run is None else CheckpointStore(run).address
    for folder in (run, run.parent.parent):
        with suppress(TuttiError, OSError):
            return serialization.load(RunHeader, RunFolder(folder).header).checkpoint_store
    return None


def store_of(world: World, resumed: Path | str) -> CheckpointStore | None:
    """Return the store of the run that is resumed; None if it has none. Collective.

    Args:
        world: the ranks.
        resumed: the run folder, a checkpoint in it, or an address.
    """
    if is_store_address(resumed):
        return CheckpointStore(str(resumed))
    address = world.broadcast(store_of_run(resumed))
    return None if address is None else CheckpointStore(address)


def _first_look(store: CheckpointStore, run: Path, *, goes_on: bool) -> dict[int, dict[str, float]]:
    """Return the results of evaluations at the steps of the store's checkpoints; remove uploads that did not end.

    Raises:
        StoreError: the store cannot be used, or holds a run that does not go on here.
    """
    there = store.checkpoints()
    complete = [checkpoint for checkpoint in there if checkpoint.complete]
    if complete and not goes_on:
        raise StoreError(
            f"{store.address} already holds checkpoints of a run, the newest of step {complete[-1].step}; name another "
            f"prefix, or go on from there with --resume {store.address}"
        )
    for checkpoint in there:
        if not checkpoint.complete:
            store.remove(checkpoint)
    steps = {checkpoint.step for checkpoint in complete}
    known = {**store.evaluations(), **values_by_step(run)}
    evaluations = {step: values for step, values in known.items() if step in steps}
    store.put_evaluations(evaluations)  # shows that it can be written
    return evaluations


def _message_key(name: str, rank: int) -> str:
    return f"tutti/upload/{name}/{rank}"


def prune_store(
    store: CheckpointStore,
    retention: Retention,
    *,
    newest: str | None = None,
    passed_over: set[str] = frozenset(),  # type: ignore[assignment]
) -> tuple[list[StoredCheckpoint], list[StoredCheckpoint]]:
    """Remove the superfluous checkpoints of a store, and uploads of earlier steps that did not end.

    Args:
        store: the store.
        retention: decides which; its paths do not matter.
        newest: a checkpoint that was completed now, and stays. None: nobody uploads, so all torn uploads are removed.
        passed_over: checkpoints that a resume passed over; they do not count, and stay.

    Returns:
        The checkpoints that were removed, and those that stay.

    Raises:
        StoreError: the store cannot be read or written.
    """
    there = store.checkpoints()
    last = next((checkpoint.step for checkpoint in there if checkpoint.name == newest), None)
    removed = [
        each for each in there if not each.complete and (newest is None or (last is not None and each.step < last))
    ]
    by_path: dict[Path, StoredCheckpoint] = {}
    for checkpoint in there:
        if checkpoint.complete and checkpoint.name not in passed_over:
            path = Path(f"step-{checkpoint.step:08d}")
            earlier = by_path.get(path)
            if earlier is not None and earlier.name == newest:
                checkpoint, earlier = earlier, checkpoint
            removed += [earlier] if earlier is not None else []
            by_path[path] = checkpoint
    stays = next((path for path, checkpoint in by_path.items() if checkpoint.name == newest), None)
    superfluous = replace(retention, passed_over=set()).superfluous(list(by_path), stays)
    removed += [by_path[path] for path in superfluous]
    for checkpoint in removed:
        store.remove(checkpoint)
    return removed, [checkpoint for checkpoint in there if checkpoint.complete and checkpoint not in removed]
