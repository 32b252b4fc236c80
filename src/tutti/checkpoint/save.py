"""Saving: every distinct part is written once, by the rank that counts it, while training goes on where that pays.

A checkpoint is begun by all ranks together: rank 0 makes a hidden folder, ranks tell each other what they will write,
and each writes its own file. It is finished together when every file is on disk: rank 0 gives the folder its name. A
kill, a full disk or a failure anywhere before that leaves the earlier checkpoints as they are.
"""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from tutti.checkpoint.collect import Contribution, collect
from tutti.checkpoint.folder import make_temporary, publish, remove, write_file
from tutti.checkpoint.index import INDEX, SMALL, latest_checkpoint, rank_file
from tutti.checkpoint.kept import collect_kept
from tutti.checkpoint.merge import merge, refusal
from tutti.checkpoint.replica import collect_replica
from tutti.checkpoint.send import receive_file, send_items
from tutti.checkpoint.tensors import Item, item, write_tensors
from tutti.errors import CheckpointError
from tutti.local_sgd.mode import Kept
from tutti.trainer.host_memory import long_lived_blocks
from tutti.trainer.run_state import Run

UNFINISHED, FAILED = ".part", ".failed"
"""Ends of the names of a file that is being written, and of the mark of one that could not be."""


@dataclass(slots=True, kw_only=True)
class Pending:
    """A checkpoint on its way to disk. `files`: that this rank waits for when it must finish alone (rank 0: all)."""

    step: int
    path: Path
    temporary: Path
    started_s: float
    background: bool
    files: list[str] = field(default_factory=list)
    nbytes: int = 0
    blocked_s: float = 0.0
    failure: str | None = None
    thread: threading.Thread | None = None

    @property
    def written(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


def save_checkpoint(run: Run) -> tuple[Path, int]:
    """Write a checkpoint of the run as it stands; returns its folder and size in bytes. Every rank must call it.

    Raises CheckpointError on every rank if any rank fails; earlier checkpoints stay whole.
    """
    finish_saving(run)
    run.pending = _begin(run, background=False)
    pending = run.pending
    nbytes = finish_saving(run)
    return pending.path, nbytes


def save_when_due(run: Run) -> None:
    """After every step: begin a checkpoint in the background if one is due, or finish the one that is written.

    Raises CheckpointError, on every rank in the same step, if any rank failed to write.
    """
    every = run.settings.checkpoint_every
    if every and run.progress.step % every == 0:
        finish_saving(run)
        run.pending = _begin(run, background=True)
    if run.pending is not None:
        _finish_if_written(run, run.pending)


def finish_saving(run: Run) -> int:
    """Wait for the checkpoint that is being written, if any; returns its size in bytes. Every rank must call it."""
    pending = run.pending
    if pending is None:
        return 0
    before = time.perf_counter()
    if pending.thread is not None:
        pending.thread.join()
    pending.blocked_s += time.perf_counter() - before
    return _finish_if_written(run, pending)


def _begin(run: Run, *, background: bool) -> Pending:
    """Agree on what is written by whom, and start writing. What is written is the state as it is now."""
    started = time.perf_counter()
    run.noise.flush(run.world)
    path = run.folder.checkpoints / f"step-{run.progress.step:08d}"
    name, failure = None, None
    if run.world.is_main:
        try:
            name = make_temporary(path)
        except OSError as error:
            failure = _said(error)
    name, failure = run.world.broadcast((name, failure))
    if name is None:
        raise _failed(run, path, failure)
    pending = Pending(
        step=run.progress.step,
        path=path,
        temporary=path.with_name(name),
        started_s=started,
        background=background,
    )
    with run.consistency.shown(run, saving=True) as own:
        _contribute(run, pending, own)
    pending.blocked_s = time.perf_counter() - started
    return pending


def _contribute(run: Run, pending: Pending, own: Kept) -> None:
    """Collect what this rank has, `own` of it its replica's alone, agree with the others, and start writing."""
    try:
        mine, items = collect(run)
        collect_kept(run, mine, items)
        collect_replica(run, own, mine, items)
    except Exception as error:  # an optimizer's own state_dict may raise; the other ranks must not wait for this one
        mine, items = Contribution(failure=_said(error)), []
    mine.sees = pending.temporary.is_dir()
    everyone = run.world.gather(mine)
    failure = refusal(everyone)
    if failure is not None:
        _give_up(run, pending)
        raise _failed(run, pending.path, failure)
    _write(run, pending, everyone, items)


def _write(run: Run, pending: Pending, everyone: list[Contribution], items: list[Item]) -> None:
    """Start writing this rank's files. Failures are kept until all ranks talk about them."""
    rank, texts = run.world.rank, None
    if run.world.is_main:
        try:
            texts = merge(run, everyone)
        except CheckpointError as error:
            pending.failure = str(error)
        writers = [other for other, theirs in enumerate(everyone) if theirs.pieces]
        pending.files = [rank_file(other) for other in writers]
    for other, theirs in enumerate(everyone):  # those who see another disk than rank 0 have it write their file
        if not theirs.sees and theirs.pieces:
            if rank == other:
                send_items(run.world, items)
            elif rank == 0:
                pending.nbytes += _received(run, pending, other, theirs)
    if not everyone[rank].sees:
        return
    if pending.background:
        try:
            items, pending.background = _copied(items, run)
        except (RuntimeError, MemoryError) as error:
            pending.failure = pending.failure or _said(error)
    if not pending.background:
        _write_mine(pending, rank, items, texts)
        return
    arguments = (pending, rank, items, texts)
    pending.thread = threading.Thread(target=_write_mine, args=arguments, name="tutti-checkpoint", daemon=True)
    pending.thread.start()


def _write_mine(pending: Pending, rank: int, items: list[Item], texts: tuple[str, bytes] | None) -> None:
    """Write this rank's file, and rank 0's small ones; the file takes its name when it is whole."""
    try:
        if pending.failure is None and items:
            pending.nbytes += _write_file(pending.temporary, rank, items)
        if pending.failure is None and texts is not None:
            pending.nbytes += write_file(pending.temporary / SMALL, texts[1])
            pending.nbytes += write_file(pending.temporary / INDEX, texts[0].encode())
    except Exception as error:  # whatever it is, all ranks must hear of it
        pending.failure = _said(error)
        with suppress(OSError):
            (pending.temporary / (rank_file(rank) + FAILED)).touch()


def _write_file(folder: Path, rank: int, items: list[Item]) -> int:
    unfinished = folder / (rank_file(rank) + UNFINISHED)
    nbytes = write_tensors(unfinished, items)
    unfinished.rename(folder / rank_file(rank))
    return nbytes


def _received(run: Run, pending: Pending, other: int, theirs: Contribution) -> int:
    """Write the file of a rank that sends it."""
    unfinished = pending.temporary / (rank_file(other) + UNFINISHED)
    try:
        nbytes = receive_file(run.world, other, theirs.pieces, unfinished)
        unfinished.rename(pending.temporary / rank_file(other))
        return nbytes
    except OSError as error:
        pending.failure = pending.failure or _said(error)
        return 0


def _copied(items: list[Item], run: Run) -> tuple[list[Item], bool]:
    """Copies of the tensors in the host's memory, and True; the tensors themselves, and False, where it is too full."""
    nbytes = sum(one.nbytes for one in items)
    if nbytes * run.world.local_world_size > psutil.virtual_memory().available // 2:
        return items, False
    pinned = run.world.device.type == "cuda"
    copies = []
    with long_lived_blocks():
        for one in items:
            copy = torch.empty(one.shape, dtype=one.dtype, pin_memory=pinned)
            copies.append(item(one.key, copy.copy_(one.make().detach(), non_blocking=True)))
    if pinned:
        torch.cuda.synchronize(run.world.device)
    return copies, True


def _finish_if_written(run: Run, pending: Pending) -> int:
    """If every rank has written its files, the checkpoint takes its name; returns its size, or 0 if it is not done."""
    counts = [float(not pending.written), float(pending.written and pending.failure is not None)]
    told = run.world.sum(torch.tensor([*counts, pending.nbytes], dtype=torch.float64, device=run.world.device)).tolist()
    if told[0]:
        return 0
    run.pending = None
    failure = None
    if told[1]:
        said = enumerate(run.world.gather(pending.failure))
        failure = next(f"rank {rank}: {words}" for rank, words in said if words is not None)
    elif run.world.is_main:
        failure = publish_pending(run, pending)
    failure = run.world.broadcast(failure)
    if failure is not None:
        _give_up(run, pending)
        raise _failed(run, pending.path, failure)
    _row(run, pending, int(told[2]))
    return int(told[2])


def publish_pending(run: Run, pending: Pending) -> str | None:
    """On rank 0: the written checkpoint takes its name. Returns what went wrong."""
    try:
        publish(pending.temporary, pending.path, run.settings.keep_checkpoints)
    except OSError as error:
        return _said(error)
    return None


def _row(run: Run, pending: Pending, nbytes: int) -> None:
    """`duration_s`: that training waited; `written_s`: from its beginning until it had its name."""
    run.log.row(
        "checkpoint",
        run.clock.elapsed_s(),
        step=pending.step,
        duration_s=pending.blocked_s,
        written_s=time.perf_counter() - pending.started_s,
        background=pending.background,
        path=pending.path.relative_to(run.folder.path),
        nbytes=nbytes,
    )


def _give_up(run: Run, pending: Pending) -> None:
    if run.world.is_main and pending.temporary.exists():
        remove(pending.temporary)


def _failed(run: Run, path: Path, reason: str | None) -> CheckpointError:
    last = latest_checkpoint(run.folder.path)
    remedy = ". Free space or name another folder, then resume" if "[Errno" in str(reason) else ""
    return CheckpointError(
        f"checkpoint of step {int(path.name.removeprefix('step-'))} could not be written to {path}: {reason}; earlier "
        f"checkpoints are whole ({last.name if last else 'there is none'}){remedy}"
    )


def _said(error: BaseException) -> str:
    words = str(error).splitlines()[0] if str(error) else ""
    return words if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__} {words}".rstrip()
