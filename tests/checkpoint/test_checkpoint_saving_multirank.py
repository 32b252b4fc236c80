"""Saving: while training goes on, on disks that are full or not shared, and killed at any moment."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import tutti
from checkpoint.checkpoint_variants import CNN, FAMILIES, Way, zero
from harness import RankFailed, run_ranks
from trainer.training import vectors
from tutti.checkpoint import latest_checkpoint, load, retention, save, to_state_dict
from tutti.config import serialization
from tutti.parallel.part_guards import reading_parts
from tutti.trainer.metrics import read_rows

SHARDED = Way(family=CNN, mesh={"shard": 2}, fields=zero(3))


def job_of(folder: Path, **options: Any) -> Any:
    """(job, model, loader) of a small model that every rank has whole."""
    torch.set_default_dtype(torch.float64)
    os.environ["TUTTI_RUN_FOLDER"] = str(folder)
    job = tutti.Job(**{"global_batch_size": 8, "keep_checkpoints": 0, **options})
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return job, *job.prepare(model, optimizer, vectors(), nn.functional.cross_entropy)[::2]


def sharded_job(folder: Path, **options: Any) -> Any:
    """The same of a model of which every rank holds a part."""
    torch.set_default_dtype(torch.float64)
    os.environ["TUTTI_RUN_FOLDER"] = str(folder)
    os.environ["TUTTI_PLAN"] = str(serialization.save(SHARDED.plan, Path.cwd() / f"plan-{os.environ['RANK']}.json"))
    subject = FAMILIES[CNN].subject()
    job = tutti.Job(**{"global_batch_size": 8, "keep_checkpoints": 0, **options})
    model = subject.model()
    optimizer = subject.optimizer(model.parameters(), lr=subject.rate)
    return job, *job.prepare(model, optimizer, subject.data, subject.loss_fn)[::2]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


# In the background -------------------------------------------------------------------------------


@reading_parts()
def slow_background(folder: Path) -> Any:
    """Four steps with a checkpoint at 2 that rank 1 writes only after step 3; names of checkpoints after every step."""
    allowed, seen, moments = threading.Event(), [], {}
    write = save.write_tensors

    def late(path: Path, *items: Any) -> Any:
        assert os.environ["RANK"] == "0" or allowed.wait(30)
        return write(path, *items)

    save.write_tensors = late  # type: ignore[assignment]
    job, _, loader = sharded_job(folder, checkpoint_every=2, keep_checkpoints=5)
    run = job._run()
    while run.state.progress.step < 4:
        for batch in loader:
            job.step(batch)
            seen.append([name for name in names(folder) if not name.startswith(".")])
            if run.state.progress.step == 2:
                optimizer = run.parallel.optimizers[0]
                held = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
                moments = {at: state["exp_avg"].clone() for at, state in enumerate(held) if "exp_avg" in state}
            if run.state.progress.step == 3:
                allowed.set()
            if run.state.progress.step == 4:
                break
    return seen, moments


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    ranks = run_ranks(slow_background, 2, tmp_path)
    for seen, _ in ranks:
        assert seen == [[], [], [], ["step-00000002"]]
    files = tmp_path / "checkpoints" / "step-00000002"
    saved = to_state_dict(files)["optimizers"][0]["state"]
    for place, one in saved.items():  # as after step 2, not as when it was written
        parts = [moments[place] for _, moments in ranks if place in moments]
        assert sum(part.numel() for part in parts) == one["exp_avg"].numel()
        total = sum(float(part.sum()) for part in parts)
        assert total == pytest.approx(float(one["exp_avg"].sum()), rel=1e-12, abs=1e-15)
    row = next(row for row in read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "checkpoint")
    assert row["step"] == 2
    assert row["background"]
    assert row["nbytes"] == sum(path.stat().st_size for path in files.iterdir())


def fail_later(folder: Path, last: int) -> Any:
    """The checkpoints of steps 4 to `last` fail on rank 1 only; steps made, and what the end of the process says."""
    job, _, loader = sharded_job(folder, checkpoint_every=2)
    write = save.write_tensors

    def failing(path: Path, *items: Any) -> Any:
        step = int(path.parent.name.split(".")[1].removeprefix("step-"))
        if os.environ["RANK"] == "1" and 4 <= step <= last:
            raise OSError(28, "No space left on device")
        return write(path, *items)

    save.write_tensors = failing  # type: ignore[assignment]
    run = job._run()
    while run.state.progress.step < 8:
        for batch in loader:
            job.step(batch)
            if run.state.progress.step == 8:
                break
    run.output.checkpoints.save_when_due()
    run.output.checkpoints.finish()
    return run.state.progress.step, run.output.checkpoints.finish_at_exit()


@pytest.mark.parametrize("last", [6, 8])
def test_training_goes_on_when_a_checkpoint_cannot_be_written(tmp_path: Path, last: int) -> None:
    ranks = run_ranks(fail_later, 2, tmp_path, last)
    assert [step for step, _ in ranks] == [8, 8]
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "checkpoint"]
    failed = {row["step"]: row["failure"] for row in rows if "failure" in row}
    assert failed == dict.fromkeys(range(4, last + 1, 2), "rank 1: [Errno 28] No space left on device")
    if last == 8:
        assert "checkpoint of step 8 could not be written" in ranks[0][1]
        assert "newest: step-00000002" in ranks[0][1]
        assert ranks[1][1] is None
    else:
        assert [said for _, said in ranks] == [None, None]
    assert names(tmp_path) == ["step-00000002" if last == 8 else "step-00000008"]


def ends_at_once(folder: Path, how: str) -> None:
    """The process ends while a checkpoint is being written: at the script's end, or by an error of rank 1."""
    write = save.write_tensors

    def slow(path: Path, *items: Any) -> Any:
        threading.Event().wait(0.5)
        return write(path, *items)

    save.write_tensors = slow  # type: ignore[assignment]
    job, _, loader = sharded_job(folder, checkpoint_every=2)
    for batch in loader:
        job.step(batch)
        if job._run().state.progress.step == 2:
            break
    if how == "error" and job.rank == 1:
        job._finalizer.failed = True
    job._finalizer.close()


@pytest.mark.parametrize("how", ["end", "error"])
def test_a_checkpoint_on_its_way_arrives_when_the_process_ends(tmp_path: Path, how: str) -> None:
    run_ranks(ends_at_once, 2, tmp_path, how)
    assert names(tmp_path) == ["step-00000002"]
    assert to_state_dict(tmp_path)["model"]


def without_memory(folder: Path) -> Any:
    full = psutil.virtual_memory()._replace(available=10)
    psutil.virtual_memory = lambda: full
    job, _, loader = job_of(folder, checkpoint_every=2)
    for batch in loader:
        job.step(batch)
        if job._run().state.progress.step == 2:
            return job._run().output.checkpoints._pending


def test_without_memory_for_a_copy_training_waits(tmp_path: Path) -> None:
    assert run_ranks(without_memory, 1, tmp_path) == [None]
    assert names(tmp_path) == ["step-00000002"]


# Killed ------------------------------------------------------------------------------------------


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(folder: Path, point: str) -> None:
    """Save at steps 1 and 2; at a point of the second one, rank 0 is gone."""
    job, _, loader = job_of(folder, keep_checkpoints=1)
    steps = iter(loader)
    job.step(next(steps))
    job.save()
    if point == "same step":  # the checkpoint of step 1 is written again
        _killed_in(save, "publish_folder", lambda *a: _half_published(*a))
    else:
        job.step(next(steps))
        if point == "begun":
            _killed_in(save, "collect", lambda training, collected: kill())
        elif point == "half written":
            _killed_in(save, "write_tensors", lambda path, *items: (path.write_bytes(b"half"), kill()))
        elif point == "written":
            _killed_in(save, "publish_folder", lambda *a: kill())
        elif point == "named":
            retention.remove_folder = lambda path: kill()  # type: ignore[assignment]
    job.save()


def _killed_in(module: Any, name: str, replacement: Callable[..., Any]) -> None:
    setattr(module, name, replacement)


def _half_published(temporary: Path, path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.replaced"))
    kill()


def resume_from(folder: Path, where: Path) -> Any:
    job, _, loader = job_of(where, resume=folder)
    before = job._run().state.progress.step
    for batch in loader:
        job.step(batch)
        break
    job.save()
    return before


@pytest.mark.parametrize("point", ["begun", "half written", "written", "same step", "named"])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, point: str) -> None:
    with pytest.raises(RankFailed, match="died without a word"):
        run_ranks(killed_at, 1, tmp_path, point)
    step = 2 if point == "named" else 1
    assert run_ranks(resume_from, 1, tmp_path, tmp_path) == [step]  # and goes on in the same folder
    assert names(tmp_path)[-1] == f"step-{step + 1:08d}"
    assert not [name for name in names(tmp_path) if name.startswith(".step-")]


def kill_rank_1(folder: Path) -> None:
    job, _, loader = sharded_job(folder, checkpoint_every=1)
    steps = iter(loader)
    job.step(next(steps))
    job._run().output.checkpoints._pending.writing.join()
    if job.rank == 1:
        save.write_tensors = lambda path, *items: kill()  # type: ignore[assignment]
    job.step(next(steps))
    job.step(next(steps))


def test_another_rank_killed_while_it_writes_leaves_the_one_before(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        run_ranks(kill_rank_1, 2, tmp_path)
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.name == "step-00000001"
    assert to_state_dict(tmp_path)["model"]


# Disks that are not shared -----------------------------------------------------------------------


@reading_parts()
def own_disk(folder: Path, resume: Path | None) -> Any:
    """Every rank sees a folder of its own; what was saved by rank 0 is read by rank 0 alone."""
    rank = int(os.environ["RANK"])
    if resume is not None and rank == 1:
        opened = load.open_checkpoint

        def nothing(path: Path) -> Any:
            return opened(folder / "not here")

        load.open_checkpoint = nothing
    job, _, loader = sharded_job(folder / str(rank), resume=resume)
    run = job._run()
    while run.state.progress.step < 4:
        for batch in loader:
            job.step(batch)
            if run.state.progress.step == 2 and resume is None:
                job.save()
            if run.state.progress.step == 4:
                break
    return [tensor.detach().clone() for tensor in run.parallel.model.parameters()]


def test_hosts_that_share_no_disk_save_at_rank_0_and_resume_from_there(tmp_path: Path) -> None:
    whole = run_ranks(own_disk, 2, tmp_path, None)
    assert latest_checkpoint(tmp_path / "1") is None
    checkpoint = latest_checkpoint(tmp_path / "0")
    assert checkpoint is not None
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "index.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        "run.pt",
    ]
    for before, after in zip(whole, run_ranks(own_disk, 2, tmp_path / "again", checkpoint), strict=True):
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other)
