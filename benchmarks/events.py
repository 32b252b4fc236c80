"""The flight record: what it adds to a step, from the cost of an event and the events of a step.

Two ranks train as usual, and blocks of steps with the record and without it take turns. Their difference is within the
spread of a busy machine, so the share is that of the events' own processor time, measured alone, in the median step.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from harness import run_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """`blocks` blocks of `steps` steps each, with and without the record in turn; `events` of each kind are timed."""

    ranks: int = 2
    steps: int = 50
    blocks: int = 20
    events: int = 20_000


QUICK = Sizes(steps=10, blocks=4, events=2_000)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Return {"samples": seconds of each step with and without the record, "summary": medians and shares}."""
    measured = run_ranks(timed, sizes.ranks, sizes, timeout_s=3600)[0]
    steps = {key: statistics.median(measured[key]) for key in ("with_s", "without_s")}
    added_s = measured["events_per_step"] * measured["event_s"]
    summary = {**steps, **{key: measured[key] for key in ("events_per_step", "event_s")}}
    summary |= {"added_s": added_s, "share": added_s / steps["with_s"], "share_of_2_ms": added_s / 2e-3}
    return {"samples": {key: measured[key] for key in steps}, "summary": summary}


def timed(sizes: Sizes) -> dict[str, Any]:
    """Train on this rank; return the seconds of each step, events per step, and the seconds of an event."""
    import tutti
    from tutti.event_record import ACTIVE

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 10))
    data = TensorDataset(torch.randn(1024, 64), torch.randint(10, (1024,)))
    found: dict[str, list[float]] = {"with_s": [], "without_s": []}
    with tempfile.TemporaryDirectory() as folder:
        job = tutti.Job(global_batch_size=32, folder=Path(folder) / "run", keep_checkpoints=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, _, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
        recorder, batches = ACTIVE.recorder, iter(())
        assert recorder is not None
        recorded = 0
        for block in range(2 * sizes.blocks):
            ACTIVE.recorder = recorder if block % 2 == 0 else None
            newest = recorder.newest
            for _ in range(sizes.steps):
                begin = time.perf_counter()
                share = next(batches, None)
                if share is None:
                    batches = iter(loader)
                    share = next(batches)
                job.step(share)
                found["without_s" if block % 2 else "with_s"].append(time.perf_counter() - begin)
            recorded += recorder.newest - newest
        ACTIVE.recorder = None
        event_s = _event_s(recorder, sizes.events)
    return {**found, "events_per_step": recorded / (sizes.blocks * sizes.steps), "event_s": event_s}


def _event_s(recorder: Any, events: int) -> float:
    """Return the seconds of an event: the mean of a step, a batch, a collective and an asynchronous one."""
    tensor, rounds = torch.ones(33), []
    for _ in range(5):
        begin = time.thread_time()
        for number in range(events // 4):
            recorder.end(recorder.begin("operation", "timed", (0, number)))
            recorder.end(recorder.begin("loader", "timed batch"))
            recorder.end(recorder.begin_collective("timed", (-1, "timed"), tensor, blocking=True))
            work = _Work()
            event = recorder.begin_collective("timed", (-1, "timed"), tensor, blocking=False)
            recorder.end_with(event, work)
            recorder.about(work, "timed over replicate")
            outer = recorder.wait_begins("timed over replicate")
            del work
            recorder.wait_ends(outer)
        rounds.append((time.thread_time() - begin) / events)
    return min(rounds)


class _Work:
    """In the place of a work handle of torch."""


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table: header and rows."""
    entry = result["summary"]
    header = ["step with ms", "without ms", "events per step", "us per event", "us per step", "share", "share of 2 ms"]
    cells = (1e3 * entry["with_s"], 1e3 * entry["without_s"], entry["events_per_step"], 1e6 * entry["event_s"])
    shares = (f"{1e6 * entry['added_s']:.1f}", f"{entry['share']:.4f}", f"{entry['share_of_2_ms']:.4f}")
    return header, [[*(f"{cell:.2f}" for cell in cells), *shares]]
