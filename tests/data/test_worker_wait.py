"""Waiting for a loader's workers has a limit, and a worker that has ended is named with how it ended."""

import math
import os
import signal
import time
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from tutti.data.share_loader import worker_batches
from tutti.errors import TrainingError


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
            if self.how == "raise":
                raise RuntimeError("a bad sample")
            os.kill(os.getpid(), signal.Signals[self.how])
        return index


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


def test_what_the_data_set_raises_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="a bad sample"):
        read("raise")


def test_all_batches_come_in_every_epoch() -> None:
    data: Any = list(range(8))
    loader: DataLoader[int] = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert [int(value) for value in worker_batches(loader, 60.0)] == list(range(8))
