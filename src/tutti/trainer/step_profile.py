"""A profile of some steps by torch's profiler: a trace, tables of operators, and on a GPU a snapshot of its memory."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WARM_UP_STEPS = 2
"""Steps of a run before the profiler starts; its own first step is not kept either."""

ROWS = 40
"""Operators in a table."""


class StepProfile:
    """Profiles steps of this rank, and writes what it saw into a folder.

    Args:
        steps: steps to keep.
        folder: takes the files, whose names begin with "rank-" and the rank's number.
        rank: this rank.
        device: the device on which it computes.

    Attributes:
        active: whether the step that runs now is slowed by the profiler.
        outcome: a sentence about what was written, once that is done.
    """

    def __init__(self, steps: int, folder: Path, rank: int, device: torch.device) -> None:
        self.steps, self.folder, self._rank, self._device = steps, folder, rank, device
        self.active, self.outcome = False, ""
        self._seen = self._taken = 0
        self._profiler: Any = None

    def stepped(self, *, may_start: bool = True) -> bool:
        """After every step: start the profiler, let it take the next step, or write what it saw.

        Args:
            may_start: whether nothing else measures steps now.

        Returns:
            Whether that took time, which belongs to no step.
        """
        if self.outcome:
            return False
        self._seen += 1
        if self._profiler is None:
            if self._seen < WARM_UP_STEPS or not may_start:
                return False
            self._start()
            return True
        self._taken += 1
        self._profiler.step()  # writes after the last one
        if self._taken == self.steps + 1:
            self._stop()
            return True
        return False

    def close(self) -> None:
        """At the end of the run: write the steps that were profiled so far."""
        if self.outcome:
            return
        if self._profiler is not None and self._taken > 1:
            self._stop()
        else:
            if self._profiler is not None:
                self._profiler.stop()
            self.active, self._profiler = False, None
            self.outcome = (
                f"nothing was profiled, because the run made {self._seen} steps, of which the first "
                f"{WARM_UP_STEPS + 1} are for warming up; train longer"
            )

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        of_device = getattr(ProfilerActivity, self._device.type.upper(), None)
        if of_device is not None and self._device.type != "cpu":
            activities.append(of_device)
        if self._device.type == "cuda":  # torch records the history of CUDA's and ROCm's allocator alone
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self.steps, repeat=1),
            record_shapes=True,
            profile_memory=True,
            acc_events=True,
        )
        self._profiler.start()
        self.active = True

    def _stop(self) -> None:
        self._profiler.stop()
        self.active = False
        kept = self._taken - 1
        count = f"{kept} steps" if kept == self.steps else f"{kept} of {self.steps} steps, before the run ended,"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(self.folder / f"rank-{self._rank}")
            self.outcome = count
        except (OSError, RuntimeError) as error:  # a full disk ends no training
            self.outcome = f"the profile could not be written to {self.folder} ({error})"
        self._profiler = None

    def _write(self, stem: Path) -> None:
        on_device = self._device.type != "cpu" and hasattr(ProfilerActivity, self._device.type.upper())
        device = "device" if on_device else "cpu"  # torch's name for the columns of any accelerator
        self._profiler.export_chrome_trace(f"{stem}.trace.json.gz")
        operators = self._profiler.key_averages()
        for name, order in (("time", f"self_{device}_time_total"), ("memory", f"self_{device}_memory_usage")):
            Path(f"{stem}.{name}.txt").write_text(operators.table(sort_by=order, row_limit=ROWS), encoding="utf-8")
        if self._device.type == "cuda":
            torch.cuda.memory._dump_snapshot(f"{stem}.memory.pickle")  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
