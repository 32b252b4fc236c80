"""A rank that is slower than the others before they meet is named, with the cause."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import tutti
from harness import run_ranks
from tutti.machine import ProcessLoad
from tutti.trainer.own_times import OwnTimesWindow
from tutti.trainer.slow_ranks import find_cause

SLOW, STEPS, EXTRA_S = 1, 40, 0.08
"""The slow rank; steps; and what it takes longer in each of them."""

NEIGHBOURS = 8
"""Processes on the slow rank's core."""


@dataclass(frozen=True)
class Samples(Dataset[Any]):
    """Samples that are slow to read, if so."""

    slow: bool

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow:
            time.sleep(EXTRA_S)
        return torch.full((4,), float(index % 7))


def busy(seconds: float) -> None:
    """Use a core for so long."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def stop_and_continue(seconds: float) -> None:
    """Stop this process by a signal; another process lets it go on."""
    go_on = f"import os, signal, time; time.sleep({seconds}); os.kill({os.getpid()}, signal.SIGCONT)"
    child = subprocess.Popen([sys.executable, "-c", go_on])
    os.kill(os.getpid(), signal.SIGSTOP)
    child.wait()


def trained(cause: str) -> list[str]:
    """Train with one slow rank; return the warnings."""
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{cause}")
    job = tutti.Job(global_batch_size=2)
    slow, neighbours = job.rank == SLOW, []
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 1)
    model, _, loader = job.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), Samples(slow and cause == "data"), lambda o, _: o.mean()
    )
    if cause == "neighbours" and slow:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NEIGHBOURS)]
    for step, batch in enumerate(loader):
        if slow and cause == "neighbours":  # the other rank's core may be in use, too
            busy(0.01)
        elif slow and cause == "compute":
            busy(EXTRA_S)
        elif slow and cause == "sleep":
            time.sleep(EXTRA_S)
        elif slow and cause == "pause" and step == 20:
            stop_and_continue(4.0)
        job.step(batch)
    for neighbour in neighbours:
        neighbour.kill()
        neighbour.wait()
    run = job._run()
    run.output.log.write()
    rows = [json.loads(line) for line in run.output.folder.metrics.read_text().splitlines()] if job.is_main else []
    return [row["sentence"] for row in rows if row["kind"] == "guard" and " is slow " in row["sentence"]]


KINDS = {
    "data": "data: it waited",
    "pause": "a pause: it stood still once, for 4",
    "compute": "compute: it used",
    "sleep": "waiting: it neither computed nor waited",
    "neighbours": "other processes on its cores: it waited",
}


def all_trained(causes: list[str]) -> list[list[str]]:
    return [trained(cause) for cause in causes]


def check(causes: list[str]) -> None:
    for cause, said in zip(causes, run_ranks(all_trained, 2, causes)[0], strict=True):
        assert len(said) == 1, (cause, said)
        assert said[0].startswith(f"rank {SLOW} on host "), said
        assert KINDS[cause] in said[0], (cause, said)


def test_a_rank_that_waits_for_data_is_named() -> None:
    check(["data"])


@pytest.mark.long
def test_slow_ranks_are_named_with_their_cause() -> None:
    check(["pause", "compute", "sleep"])


@pytest.mark.long
def test_a_rank_whose_core_others_use_is_named() -> None:
    check(["neighbours"])


def window(own_s: float = 1.0, data_s: float = 0.0, longest_s: float = 0.1, **load: float) -> OwnTimesWindow:
    names = ("processor_s", "waited_s", "throttled_s", "stolen_s", "memory_s", "faults", "clock_hz")
    counted: Mapping[str, float] = dict.fromkeys(names, 0.0) | load
    return OwnTimesWindow(
        first=6,
        last=37,
        steps=32,
        data_s=(0.0, data_s, 0.0),
        own_s=(1.0, own_s, 1.0),
        longest_s=longest_s,
        load=counted,
    )


@pytest.mark.parametrize(
    ("slow", "kind", "words"),
    [
        (window(own_s=3, throttled_s=1.8, waited_s=1.8), "throttling", "CPU limit of its cgroup"),
        (window(own_s=3, memory_s=1.5, faults=5e4), "memory pressure", "50000 major page faults"),
        (window(own_s=3, stolen_s=1.5), "throttling", "hypervisor"),
        (window(own_s=3, waited_s=1.9, processor_s=1), "other processes on its cores", "1.9 s for a core"),
        (window(own_s=1, data_s=3), "data", "93.8 ms a step longer"),
        (window(own_s=3, processor_s=3, clock_hz=1.2e9), "throttling", "1.2 GHz, not 2.4"),
        (window(own_s=3, processor_s=3, clock_hz=2.4e9), "compute", "2 s of processor time more"),
        (window(own_s=3, processor_s=1), "waiting", "sleeps"),
        (window(own_s=4, longest_s=3), "a pause", "stood still once, for 3 s"),
    ],
)
def test_the_cause_is_what_explains_the_excess(slow: OwnTimesWindow, kind: str, words: str) -> None:
    others = [window(processor_s=1, clock_hz=2.4e9)] * 2
    found, said = find_cause(slow, others, 1, [0, 2])
    assert found == kind
    assert words in said


def test_a_process_counts_its_processor_time() -> None:
    load = ProcessLoad()
    busy(0.05)
    passed = load.passed()
    assert passed["processor_s"] >= 0.05
    assert all(value >= 0 for value in passed.values())
