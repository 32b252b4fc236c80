"""The lab's links as ranks of `pays` see them: limits that change while they live, and blocks of steps timed together.

Imports nothing of tutti's: peers run it in virtual environments of their own.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WARM_STEPS = 3
MOST_STEPS = 6


class Wire:
    """The hosts' links. `commands`: by limit, the `tc` commands that set it, run by rank 0."""

    def __init__(self, commands: Mapping[str, list[list[str]]]) -> None:
        self._commands = commands

    def limit(self, rate: str) -> None:
        """Limit every link both ways; all ranks call it. Lifting a limit that is not there does nothing."""
        dist.barrier()
        if dist.get_rank() == 0:
            for words in self._commands[rate]:
                subprocess.run(words, check="replace" in words, capture_output=True)
        dist.barrier()

    @staticmethod
    def sent_nbytes() -> int:
        """What this host's interface has sent since it was made, headers included."""
        lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
        row = next(line for line in lines if line.strip().startswith("eth0:"))
        return int(row.partition(":")[2].split()[8])


class Output:
    """Rank 0's lines; the others' go nowhere."""

    def __init__(self, path: Path) -> None:
        self._path = path if dist.get_rank() == 0 else None

    def row(self, row: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def warm_steps(period: int) -> int:
    """A period and a half where there is one: its exchange then falls in the middle of a block."""
    return WARM_STEPS if period == 1 else period + period // 2


def in_turns(
    steps: Mapping[str, Callable[[], object]],
    periods: Mapping[str, int],
    terms: Mapping[str, Any],
    trying: Callable[[str], None],
) -> dict[str, Any]:
    """Blocks of each loop, A B C, C B A, ...; a method leaves the turns once its blocks took `limit_s` together.

    Returns {"step_s": {method: seconds of a step, one a block}, "sent_nbytes": the most a host sent a step, median}.
    """
    step_s: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, list[float]] = {name: [] for name in steps}
    spent = dict.fromkeys(steps, 0.0)
    for repeat in range(terms["repeats"]):
        for name in list(steps)[:: 1 if repeat % 2 == 0 else -1]:
            if repeat >= 2 and spent[name] > terms["limit_s"]:
                continue
            trying(name)
            count = steps_of(periods[name], step_s[name], terms["block_s"])
            seconds, nbytes = block(steps[name], count)
            step_s[name].append(seconds / count)
            sent[name].append(nbytes / count)
            spent[name] += seconds
    return {"step_s": step_s, "sent_nbytes": {name: statistics.median(values) for name, values in sent.items()}}


def steps_of(period: int, before: list[float], block_s: float) -> int:
    """A whole period; else 1 step, and where those were short as many as `block_s` holds, `MOST_STEPS` at most."""
    if period > 1:
        return period
    return max(1, min(MOST_STEPS, int(block_s / before[0]))) if before else 1


def block(step: Callable[[], object], steps: int) -> tuple[float, float]:
    """Seconds of the slowest rank and bytes of the host that sent most, for some steps begun together."""
    dist.barrier()
    before, start = Wire.sent_nbytes(), time.perf_counter()
    for _ in range(steps):
        step()
    taken, nbytes = time.perf_counter() - start, Wire.sent_nbytes() - before
    return slowest(taken), slowest(float(nbytes))


def slowest(value: float) -> float:
    """The largest of all ranks'."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
