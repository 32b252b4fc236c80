"""Ranks join each other."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from harness import run_ranks
from tutti.comm import world


def join_beside_a_slow_one(slow: int) -> int:
    """Join and leave at once, while rank `slow`, waiting for the other's address, stands still for a second."""
    file = Path("slow")
    if int(os.environ["RANK"]) == slow:
        file.with_suffix(".part").write_text(str(os.getpid()))
        file.with_suffix(".part").rename(file)
    else:
        while not file.exists():
            time.sleep(0.01)
        time.sleep(1.0)  # it has said where it is, and waits
        process = int(file.read_text())
        os.kill(process, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (process, signal.SIGCONT)).start()
    size = world.join_world().world_size
    world.leave_world()
    return size


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_leaves_at_once_has_been_joined_by_all_others(slow: int) -> None:
    """As one does that refuses its plan: others must come to refuse it too, not lose their connection."""
    assert run_ranks(join_beside_a_slow_one, 2, slow, timeout_s=20) == [2, 2]
