"""A disk that is full or read-only ends no training, is said once, and loses no row that fits into memory."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tutti.reporting.run_records import read_records
from tutti.trainer import metrics
from tutti.trainer.metrics import RowFile, read_rows


@pytest.fixture(autouse=True)
def _said_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_said", set())
    monkeypatch.setattr(metrics, "_TRY_AGAIN_S", 0.0)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no room on a disk; return the file that takes it."""
    path = folder / "ballast"
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            with suppress(OSError):
                while file.write(b"x" * size):
                    pass
    assert os.statvfs(folder).f_bavail == 0
    return path


class Disk:
    """Stands for os.write of files in a folder: takes up to `room` bytes, and then fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, number: int = errno.ENOSPC) -> None:
        self.room, self.number, self._write, self._folder = 1 << 20, number, os.write, str(folder)
        monkeypatch.setattr(os, "write", self.write)

    def write(self, file: int, data: bytes) -> int:
        if not os.readlink(f"/proc/self/fd/{file}").startswith(self._folder):  # of another test's late rows
            return self._write(file, data)
        if not self.room:
            raise OSError(self.number, os.strerror(self.number))
        taken = self._write(file, data[: self.room])
        self.room -= taken
        return taken


def values(path: Path) -> list[Any]:
    return [row["x"] for row in read_rows(path) if row["kind"] == "log"]


def test_rows_wait_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    disk, file = Disk(monkeypatch, tmp_path), RowFile(tmp_path / "rows")
    file.append({"kind": "log", "x": 1}, now=True)
    disk.room = 7  # half a row
    for x in (2, 3):
        file.append({"kind": "log", "x": x}, now=True)
    assert values(tmp_path / "rows") == [1]
    assert (tmp_path / "rows").read_text().count("\n") == 1
    disk.room = 1 << 20
    file.append({"kind": "log", "x": 4}, now=True)
    file.close()
    assert values(tmp_path / "rows") == [1, 2, 3, 4]
    (note,) = (row for row in read_rows(tmp_path / "rows") if row["kind"] == "unwritten")
    assert (note["cause"], note["late"], note["lost"]) == ("No space left on device", 3, 0)
    said = [line for line in capfd.readouterr().err.splitlines() if str(tmp_path) in line]
    assert len(said) == 2
    assert f"metrics cannot be written to the folder {tmp_path} (No space left on device); training goes on" in said[0]
    assert "written to the folder" in said[1]
    assert "no row was lost" in said[1]


def test_what_does_not_fit_into_memory_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "WAITING_NBYTES", 60)
    disk, file = Disk(monkeypatch, tmp_path, errno.EROFS), RowFile(tmp_path / "rows")
    disk.room = 0
    for x in range(10):
        file.append({"kind": "log", "x": x}, now=True)
    disk.room = 1 << 20
    file.append({"kind": "log", "x": 10}, now=True)
    kept = values(tmp_path / "rows")
    (note,) = (row for row in read_rows(tmp_path / "rows") if row["kind"] == "unwritten")
    assert kept == list(range(len(kept)))
    assert note["lost"] == 11 - len(kept) > 0
    assert "Read-only file system" in capfd.readouterr().err


def test_rows_that_were_never_written_are_named_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    disk, file = Disk(monkeypatch, tmp_path), RowFile(tmp_path / "rows")
    disk.room = 0
    file.append({"kind": "log", "x": 1}, now=True)
    file.close()
    assert f"1 rows of {tmp_path / 'rows'} are lost (No space left on device)" in capfd.readouterr().err


def test_a_value_that_fails_in_the_thread_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = RowFile(tmp_path / "rows")
    for x in (1, object(), 3):
        file.append({"kind": "step", "step": 1, "x": x}, now=False)
    file.close()
    assert [row["x"] for row in read_rows(tmp_path / "rows")] == [1, 3]
    assert "a row 'step' was not written" in capfd.readouterr().err


def train(folder: Path, at_step: Callable[[int], None]) -> tutti.Job:
    job = tutti.Job(global_batch_size=4, folder=folder, keep_checkpoints=0)
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy)
    for step, batch in enumerate(batch for _ in job.epochs(2) for batch in loader):
        job.step(batch)
        job.log(x=step)
        at_step(step)
    return job


def test_training_goes_on_while_its_disk_is_full(tiny_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ballast: list[Path] = []

    def at_step(step: int) -> None:
        if step == 3:
            ballast.append(fill(tiny_disk))
        if step == 15:
            ballast[0].unlink()

    job = train(tiny_disk / "run", at_step)
    rows = read_rows(tiny_disk / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(1, 21))
    assert job.is_main
    assert any(row["kind"] == "unwritten" and row["lost"] == 0 for row in rows)
    said = capfd.readouterr().err
    assert said.count(f"metrics cannot be written to the folder {tiny_disk / 'run'} (") == 1
    (note,) = (note for note in read_records(tiny_disk / "run").notes if "could not be written" in note)
    assert "No space left on device" in note
    assert "0 rows are lost" in note


def test_standard_error_on_the_full_disk_has_room_for_the_message(tiny_disk: Path) -> None:
    script = f"""
import pathlib, sys
sys.path[:0] = {sys.path!r}
from trainer.test_metrics_disk import fill
from tutti.config.run_folder import RunFolder
from tutti.trainer.metrics import MetricsLog
log = MetricsLog(RunFolder(pathlib.Path({str(tiny_disk)!r})), 0)
fill(pathlib.Path({str(tiny_disk)!r}))
for x in range(100):
    log.row("log", 0.0, x=x)
"""
    with (tiny_disk / "stderr.log").open("wb") as file:
        subprocess.run([sys.executable, "-c", script], stderr=file, check=True, timeout=100)
    said = (tiny_disk / "stderr.log").read_text()
    assert said.count("metrics cannot be written to the folder") == 1


def test_rows_wait_for_a_disk_that_became_read_only(tiny_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size=64k,{mode}", str(tiny_disk)], check=True)

    file = RowFile(tiny_disk / "rows")
    file.append({"kind": "log", "x": 1}, now=True)
    file._close_file()  # a file that is open for writing keeps a disk from being made read-only
    remount("ro")
    file.append({"kind": "log", "x": 2}, now=True)
    remount("rw")
    file.append({"kind": "log", "x": 3}, now=True)
    assert values(tiny_disk / "rows") == [1, 2, 3]
    assert "Read-only file system" in capfd.readouterr().err
