"""A run folder has one writer: a second one is refused by name, and a dead one blocks nobody."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti.config import run_folder
from tutti.config.run_folder import RunFolder, lock_folder, refuse_used_folder
from tutti.errors import LaunchError

HOLD = """
import os, sys, time
from pathlib import Path
from tutti.config.run_folder import RunFolder, lock_folder
print(repr(lock_folder(RunFolder(Path(sys.argv[1])))), flush=True)
if os.fork() == 0:  # as a worker of a data loader, which may outlive its rank
    time.sleep(20)
    os._exit(0)
print("forked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that has locked the folder, and has a child."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert [process.stdout.readline(), process.stdout.readline()] == ["''\n", "forked\n"]
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_the_second_writer_is_refused_and_a_dead_one_is_not_in_the_way(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    folder = RunFolder(tmp_path)
    for refuse in (lock_folder, refuse_used_folder):
        with pytest.raises(LaunchError, match=f"process {holder.pid} on host .* writes into the run folder"):
            refuse(folder)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    time.sleep(0.1)  # its child lives
    refuse_used_folder(folder)
    assert lock_folder(folder) == ""
    assert lock_folder(folder) == "", "the same process may open its folder again"
    assert (tmp_path / ".lock").read_text().split()[1] == str(os.getpid())
    os.close(run_folder._LOCKS.pop(tmp_path))


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert "cannot be locked (No locks available); let no other run" in lock_folder(RunFolder(tmp_path))
    refuse_used_folder(RunFolder(tmp_path))
    assert tmp_path not in run_folder._LOCKS
