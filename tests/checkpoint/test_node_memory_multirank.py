"""Checkpoints in the memory of several nodes: copies, losses, damage and kills; nodes are folders here."""

import errno
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from harness import RankFailed, run_ranks
from trainer.training import vectors
from tutti.checkpoint import node_memory
from tutti.checkpoint.contribution import Contribution, WrittenPart
from tutti.checkpoint.index import rank_file
from tutti.checkpoint.integrity import check_together
from tutti.checkpoint.node_memory import NodeMemory
from tutti.checkpoint.sources import open_checkpoint
from tutti.comm.world import join_world
from tutti.errors import DamagedCheckpointError
from tutti.parallel.part_guards import reading_parts

NODES = (0, 0, 1)
"""The node of each rank."""


def memory_of(folder: Path, node: int) -> Path:
    return folder / f"node-{node}"


def checkpoint_of(folder: Path, node: int, step: int) -> Path:
    return memory_of(folder, node) / f"checkpoints/step-{step:08d}"


@reading_parts()
def trained(folder: Path, steps: int, fails: str = "", save_at: int = 0) -> Any:
    """Train to a step, with checkpoints in memory at even steps; return where it began, values, and what was said."""
    torch.set_default_dtype(torch.float64)
    node_memory._CHUNK_NBYTES = 100  # so that files are sent in many messages
    rank = int(os.environ["RANK"])
    memory = memory_of(folder, NODES[rank])
    memory.mkdir(parents=True, exist_ok=True)
    os.environ |= {"TUTTI_MESH": "shard=3", "TUTTI_SHARD": "level=3", "TUTTI_RUN_FOLDER": str(folder / "run")}
    os.environ |= {"TUTTI_MEMORY_CHECKPOINT_EVERY": "2", "TUTTI_MEMORY_CHECKPOINTS": str(memory)}
    if (folder / "run/checkpoints").exists():
        os.environ |= {"TUTTI_RESUME": str(folder / "run"), "TUTTI_RESTARTED": "1"}
    job = tutti.Job(global_batch_size=8, keep_checkpoints=0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, _, loader = job.prepare(model, optimizer, vectors(), nn.functional.cross_entropy)
    run = job._run()
    begun = run.state.progress.step
    while run.state.progress.step < steps:
        for batch in loader:
            if run.state.progress.step == 3 and rank == 2:
                _fail(fails)
            job.step(batch)
            run.output.memory.finish()
            if run.state.progress.step == save_at:
                job.save()
            if run.state.progress.step == steps:
                break
    parameters = [tensor.detach().clone() for tensor in model.parameters()]
    return begun, parameters, "\n".join(run.output.screen._said)


def _fail(point: str) -> None:
    """Let the next checkpoint fail on this rank."""

    def kill(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if point == "full":
        os.posix_fallocate = full
    elif point == "copying":
        node_memory._mapped = kill  # type: ignore[assignment]
    elif point == "naming":
        node_memory.publish_folder = kill  # type: ignore[assignment]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return [values for _, values, _ in run_ranks(trained, 3, tmp_path_factory.mktemp("undisturbed"), 7)]


def assert_goes_on(folder: Path, at: int, undisturbed: list[Any]) -> str:
    """The run goes on at a step and ends bit for bit as the undisturbed one; return what rank 0 said."""
    ended = run_ranks(trained, 3, folder, 7)
    assert [begun for begun, _, _ in ended] == [at] * 3
    for (_, values, _), expected in zip(ended, undisturbed, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))
    return str(ended[0][2])


def test_a_lost_node_is_made_good_from_the_copies_of_the_next(tmp_path: Path, undisturbed: list[Any]) -> None:
    run_ranks(trained, 3, tmp_path, 5)
    everything = ["index.json", *(rank_file(rank) for rank in range(3)), "run.pt"]
    for node in (0, 1):
        found = {
            path.name: sorted(file.name for file in path.iterdir()) for path in memory_of(tmp_path, node).glob("*/*")
        }
        assert found == {"step-00000002": everything, "step-00000004": everything}
    shutil.rmtree(memory_of(tmp_path, 0))
    spoil(checkpoint_of(tmp_path, 1, 2) / rank_file(2))  # that of another step does not matter
    assert "resumed from memory (step 4)" in assert_goes_on(tmp_path, 4, undisturbed)


def spoil(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_file_that_no_node_has_is_named_and_the_one_before_is_used(tmp_path: Path, undisturbed: list[Any]) -> None:
    run_ranks(trained, 3, tmp_path, 5)
    (checkpoint_of(tmp_path, 0, 4) / "index.json").unlink()  # without it, a node has nothing of step 4
    (checkpoint_of(tmp_path, 1, 4) / rank_file(0)).unlink()
    said = assert_goes_on(tmp_path, 2, undisturbed)
    assert "passed over memory (step 4): rank-00000.safetensors was lost" in said


def test_a_sound_copy_is_used_where_a_file_is_damaged_and_both_are_named(
    tmp_path: Path, undisturbed: list[Any]
) -> None:
    run_ranks(trained, 3, tmp_path, 5)
    spoil(checkpoint_of(tmp_path, 0, 4) / rank_file(1))
    spoil(checkpoint_of(tmp_path, 1, 4) / rank_file(2))
    spoil(checkpoint_of(tmp_path, 1, 4) / "run.pt")
    said = assert_goes_on(tmp_path, 4, undisturbed)
    for damaged in ("rank-00001.safetensors: the values of", "rank-00002.safetensors: the values of", "run.pt is not"):
        assert any(damaged in line and "another node's copy is used" in line for line in said.splitlines()), said


def test_more_losses_than_copies_fall_back_to_the_checkpoint_on_disk(tmp_path: Path, undisturbed: list[Any]) -> None:
    run_ranks(trained, 3, tmp_path, 5, "", 3)
    shutil.rmtree(memory_of(tmp_path, 1))
    (checkpoint_of(tmp_path, 0, 4) / rank_file(2)).unlink()
    said = assert_goes_on(tmp_path, 3, undisturbed)
    assert "step-00000003 at step 3; passed over memory (step 4): rank-00002.safetensors was lost" in said


def test_a_node_without_room_for_copies_leaves_the_checkpoint_before(tmp_path: Path, undisturbed: list[Any]) -> None:
    _, _, said = run_ranks(trained, 3, tmp_path, 5, "full")[0]
    assert re.search(
        r"in memory of step 4 could not be written to .*: rank 2: \[Errno 28\].*; training goes on", said
    ), said
    assert_goes_on(tmp_path, 2, undisturbed)


@pytest.mark.parametrize(("point", "at"), [("copying", 2), ("naming", 4)])
def test_a_kill_at_any_moment_mixes_no_steps(point: str, at: int, tmp_path: Path, undisturbed: list[Any]) -> None:
    with pytest.raises(RankFailed):
        run_ranks(trained, 3, tmp_path, 5, point)
    assert_goes_on(tmp_path, at, undisturbed)
    names = {path.name for node in (0, 1) for path in (memory_of(tmp_path, node) / "checkpoints").iterdir()}
    assert names <= {f"step-0000000{step}" for step in (2, 4, 6)}, "nothing unfinished stays"


def test_a_memory_without_room_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = NodeMemory(join_world(), tmp_path)
    part = Contribution(parts=[WrittenPart(key=(-1, "w", ""), shape=(1000, 1000), dtype="float64")])
    memory.make_folder(tmp_path / "checkpoints/step-00000001")
    assert memory.refusal([part]) is None
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=3, f_frsize=4_000_000))
    memory.make_folder(tmp_path / "checkpoints/step-00000002")
    words = memory.refusal([part])
    assert words is not None
    assert "needs room for 2 checkpoints of 0.008 GB, and 0.012 GB are free in" in words
    assert "--shm-size" in words


def test_a_file_that_one_rank_alone_misses_is_known_to_all(tmp_path: Path) -> None:
    run_ranks(trained, 3, tmp_path, 3)
    path = checkpoint_of(tmp_path, 0, 2)
    (path / rank_file(1)).unlink()
    told: list[Any] = []

    def gather(value: Any) -> list[Any]:
        told.append(value)
        return [value, True if len(told) == 1 else None]

    world: Any = SimpleNamespace(rank=0, gather=gather)
    with pytest.raises(DamagedCheckpointError, match=r"rank-00001\.safetensors is missing"):
        check_together(world, open_checkpoint(path))
    assert len(told) == 2, "the other ranks wait for what this one has found"
