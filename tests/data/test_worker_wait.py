"""Waiting for a loader's workers has a limit, and a worker that has ended is named with how it ended."""

import faulthandler
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tutti import stack_watch
from tutti.data import share_loader
from tutti.data.share_loader import worker_batches
from tutti.errors import TrainingError
from tutti.trainer.guard import sample_values


class Fails(Dataset[int]):
    """Its fifth sample kills the worker, ends it, hangs, or raises."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            if self.how == "exit":
                os._exit(3)
            if self.how == "hang":
                time.sleep(100)
            if self.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.how == "raise":
                raise RuntimeError("a bad sample")
            if self.how in signal.Signals.__members__:
                os.kill(os.getpid(), signal.Signals[self.how])
        return index


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as one that is no rank, whatever other tests have made of it."""
    monkeypatch.setattr(stack_watch._WATCH, "folder", None)


def read(how: str, timeout_s: float = math.inf, **options: Any) -> list[int]:
    loader = DataLoader(Fails(how), batch_size=None, num_workers=2, **options)
    return [int(value) for value in worker_batches(loader, timeout_s)]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("SIGKILL", r"worker 1 of the data loader \(pid \d+\) was killed by SIGKILL: most often the system"),
        ("SIGBUS", r"worker 1 .* was killed by SIGBUS: shared memory ran out"),
        ("exit", r"worker 1 .* ended with exit code 3 while a batch was expected of it"),
    ],
)
def test_a_worker_that_ended_is_named(how: str, sentence: str) -> None:
    began = time.monotonic()
    with pytest.raises(TrainingError, match=sentence):
        read(how)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"timeout": 1}])
def test_a_worker_that_hangs_is_named(options: dict[str, Any]) -> None:
    limit = math.inf if "timeout" in options else 1.0
    with pytest.raises(TrainingError, match=r"worker 1 .* gave no batch for 1 s; it is alive: see what it waits for"):
        read("hang", limit, **options)


def test_a_worker_that_ends_as_it_hands_over_a_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(batches: Any, timeout_s: float) -> Any:
        os.kill(batches._workers[0].pid, signal.SIGKILL)
        raise ConnectionResetError(104, "Connection reset by peer")

    end_of, raised = share_loader._end_of, list[str]()

    def raises_once(*worker: Any) -> Any:
        if not raised:
            raised.append("as torch does at a worker's end")
            raise RuntimeError(raised[0])
        return end_of(*worker)

    monkeypatch.setattr(share_loader, "_end_of", raises_once)
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", True)  # torch's own stays out of this test

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_get_data", reset)
    with pytest.raises(TrainingError, match=r"worker 0 of the data loader \(pid \d+\) was killed by SIGKILL"):
        read("none")


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[None]:
    """This process as a rank of a launch, which its workers are forked from."""
    stack_watch.watch_stacks(tmp_path)
    yield
    stack_watch._WATCH.folder = None
    assert stack_watch.SIGNAL is not None
    faulthandler.unregister(stack_watch.SIGNAL)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("hang", r"for 1 s; it is at .*test_worker_wait\.py:\d+ in __getitem__ \(`time\.sleep\(100\)`\): correct what"),
        ("stop", r"for 1 s; it is stopped by a signal \(SIGSTOP\): let it go on with `kill -CONT \d+`"),
    ],
)
@pytest.mark.usefixtures("watched")
def test_a_worker_of_a_rank_is_named_with_its_line(how: str, sentence: str) -> None:
    with pytest.raises(TrainingError, match=r"worker 1 of the data loader \(pid \d+\) gave no batch " + sentence):
        read(how, 1.0)


def test_the_check_of_samples_does_not_let_torch_raise_for_workers_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        source = SimpleNamespace(dataset=[torch.ones(2)] * 4, collate=list, options={"num_workers": 1})
        loader = SimpleNamespace(source=source, timeout_s=60.0)
        run: Any = SimpleNamespace(state=SimpleNamespace(loader=loader), settings=SimpleNamespace(seed=0))
        assert None not in sample_values._read(run, [0, 2])
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_what_the_data_set_raises_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="a bad sample"):
        read("raise")


@pytest.mark.long
def test_all_batches_come_in_every_epoch() -> None:
    data: Any = list(range(8))
    loader: DataLoader[int] = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert [int(value) for value in worker_batches(loader, 60.0)] == list(range(8))
