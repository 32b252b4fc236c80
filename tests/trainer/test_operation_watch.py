"""A rank whose exchange has failed does not wait for the notes of a rank whose process has ended."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tutti.errors import RankMismatchError, ScriptError
from tutti.trainer import operation_watch
from tutti.trainer.operation_watch import OperationWatch

WAIT_S = 2.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield started
    started.kill()
    started.communicate()


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]) -> tuple[OperationWatch, OperationWatch]:
    """Those of ranks 0 and 1, of which the second is another process."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(operation_watch, "thread_store", lambda: store)
    monkeypatch.setattr(operation_watch, "ANSWER_S", WAIT_S)
    both = []
    for rank in range(2):
        monkeypatch.setattr(operation_watch, "_numbers", iter([0]))
        world: Any = SimpleNamespace(rank=rank, local_rank=rank, world_size=2, local_world_size=2, is_main=rank == 0)
        monkeypatch.setattr(os, "getpid", lambda rank=rank: process.pid if rank else os.getppid())
        both.append(OperationWatch(world, lambda: (0, 3)))
        both[-1].start()
        both[-1].stop()
        both[-1]._ended.clear()  # no thread answers any more
    return both[0], both[1]


def _seconds(watch: OperationWatch) -> float:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="closed"), watch.during("job.step"):
        raise RuntimeError("Connection closed by peer")
    return time.monotonic() - began


def test_a_rank_that_lives_is_waited_for(watches: tuple[OperationWatch, OperationWatch]) -> None:
    assert _seconds(watches[0]) >= WAIT_S


def test_a_rank_that_has_answered_is_not(watches: tuple[OperationWatch, OperationWatch]) -> None:
    answer = threading.Timer(0.3, watches[1]._publish, [operation_watch.thread_store()])
    answer.start()
    assert _seconds(watches[0]) < WAIT_S / 2
    answer.join()


def test_a_destroyed_process_group_is_named(watches: tuple[OperationWatch, OperationWatch]) -> None:
    said = r"the process group was destroyed before job\.step, which needs it; leave out"
    with pytest.raises(ScriptError, match=said), watches[0].during("job.step"):
        raise ValueError("Default process group has not been initialized")


def test_a_rank_that_has_ended_is_not(
    watches: tuple[OperationWatch, OperationWatch], process: subprocess.Popen[bytes]
) -> None:
    process.kill()  # nobody takes notice of its end before the check
    time.sleep(0.2)
    assert _seconds(watches[0]) < WAIT_S / 2


def test_what_it_had_told_counts(
    watches: tuple[OperationWatch, OperationWatch], process: subprocess.Popen[bytes]
) -> None:
    watches[1].enter("job.evaluate")
    watches[1]._publish(operation_watch.thread_store())
    process.kill()
    time.sleep(0.2)
    said = r"rank 0 is in job\.step .* while rank 1 is in job\.evaluate"
    with pytest.raises(RankMismatchError, match=said), watches[0].during("job.step"):
        raise RuntimeError("Connection closed by peer")
