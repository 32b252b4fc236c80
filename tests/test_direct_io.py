"""Files without a name: what is written is read back, directly or through the page cache, and nothing is left."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tutti import direct_io
from tutti.direct_io import ALIGNMENT, DirectFile, aligned_part
from tutti.errors import SpecError, TrainingError
from tutti.profile.probe import memory_rates
from tutti.profile.probe.memory_rates import measure_disk

NBYTES = 5 * ALIGNMENT


def numbers(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    memory = torch.zeros(NBYTES + ALIGNMENT, dtype=torch.uint8)
    part = aligned_part(memory, NBYTES)
    return part.copy_(torch.randint(256, (NBYTES,), dtype=torch.uint8, generator=generator))


def empty() -> torch.Tensor:
    return aligned_part(torch.zeros(NBYTES + ALIGNMENT, dtype=torch.uint8), NBYTES)


def test_what_is_written_is_read_back_and_seen_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "PIECE_NBYTES", 2 * ALIGNMENT)
    file, values, back = DirectFile(tmp_path, "numbers"), numbers(), empty()
    assert not list(tmp_path.iterdir())
    file.reserve(3 * NBYTES)
    file.write(values, NBYTES)
    file.read(back, NBYTES)
    assert torch.equal(back, values)
    seen = file.mapped(NBYTES, NBYTES)
    assert torch.equal(seen, values)
    file.write(numbers(1), NBYTES)
    assert torch.equal(seen, numbers(1)), "the map follows direct writes"
    seen.copy_(values)
    file.read(back, NBYTES)
    assert torch.equal(back, values), "direct reads follow the map"
    later = file.mapped(4 * NBYTES, NBYTES)  # a file that has grown
    assert torch.equal(seen, values)
    assert not later.any()


def test_a_file_system_that_refuses_direct_io_is_used_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def refusing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if direct_io._get_flags(descriptor) is not None:
            raise OSError(errno.EINVAL, "refused")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refusing)
    file, back = DirectFile(tmp_path, "numbers"), empty()
    assert not file.direct
    file.write(numbers(), 0)
    file.read(back, 0)
    assert torch.equal(back, numbers())


def test_a_file_that_ends_too_soon_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = DirectFile(tmp_path, "the state")
    file.write(numbers(), 0)
    os.ftruncate(file._descriptor, 2 * ALIGNMENT)
    with pytest.raises(TrainingError, match=rf"the state in {tmp_path} could not be read: .*ends after 8192 of"):
        file.read(empty(), 0)


def test_space_that_is_not_there_is_refused_when_it_is_set_aside(tmp_path: Path) -> None:
    file = DirectFile(tmp_path, "the state")
    with pytest.raises(OSError, match="No space left"):
        file.reserve(2**62)


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal\n"
        "from tutti.direct_io import DirectFile\n"
        f"file = DirectFile(pathlib.Path({str(tmp_path)!r}), 'the state')\n"
        "file.reserve(2**20)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode < 0
    assert not list(tmp_path.iterdir())


def test_a_disk_is_measured_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_rates, "is_in_memory", lambda folder: False)
    disk = measure_disk(tmp_path, 2**20)
    assert disk.path == str(tmp_path)
    assert min(disk.nbytes, disk.read_bytes_per_s, disk.write_bytes_per_s) > 2**20
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_hold_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="missing cannot hold 1 MiB"):
        measure_disk(tmp_path / "missing", 2**20)
    monkeypatch.setattr(memory_rates, "is_in_memory", lambda folder: True)
    with pytest.raises(SpecError, match="a file system in memory"):
        measure_disk(tmp_path, 2**20)
