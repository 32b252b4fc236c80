"""The lab's links as ranks of `pays` see them: limits that change while they live, and blocks of steps timed together.

Imports nothing of tutti's: peers run it in virtual environments of their own.
"""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WARM_STEPS = 3
MOST_STEPS = 64

MOST_STOLEN, MOST_AGAIN = 0.05, 4
"""Blocks in which a hypervisor gave a larger part of the cores' time to others are timed again, so many times."""

CALM, MOST_MORE = 0.15, 4
"""A method whose blocks are further apart than this part of their median gets so many more at most, while they take
twice its limit: what else slows a machine down for a while (its memory, in a hypervisor's other guests) counts as
nothing stolen."""


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


def warm_steps(period: int, delay: int = 0) -> int:
    """A period and a half where there is one: its exchange then falls in the middle of a block. One that is taken in
    `delay` steps later begins with a block's first step instead: what a block began is over when its clock stops."""
    if period == 1:
        return WARM_STEPS
    return 2 * period - 1 if delay else period + period // 2


def in_turns(
    steps: Mapping[str, Callable[[], object]],
    periods: Mapping[str, int],
    terms: Mapping[str, Any],
    trying: Callable[[str], None],
) -> dict[str, Any]:
    """Blocks of each loop, A B C, C B A, ...; a method leaves the turns once its blocks took `limit_s` together, or,
    where they are far apart, some turns later. What shows first how many steps a block is to have counts where it is as
    long as one.

    Returns {"step_s": {method: seconds of a step, one a block}, "sent_nbytes": the most a host sent a step, median,
    "stolen": the largest part of the cores' time that others had in a block that counts}.
    """
    step_s: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, list[float]] = {name: [] for name in steps}
    stolen: dict[str, list[float]] = {name: [] for name in steps}
    spent = dict.fromkeys(steps, 0.0)
    counts = dict.fromkeys(steps, 0)
    for repeat in range(terms["repeats"] + MOST_MORE):
        more = repeat >= terms["repeats"]
        for name in list(steps)[:: 1 if repeat % 2 == 0 else -1]:
            if repeat >= 2 and spent[name] > terms["limit_s"] * (2 if more else 1):
                continue
            if more and calm(step_s[name]):
                continue
            trying(name)
            count = counts[name] or periods[name]
            seconds, nbytes, share = quiet_block(steps[name], count)
            if not counts[name]:
                counts[name] = steps_of(periods[name], seconds / count, terms["block_s"])
                if counts[name] > count:
                    count = counts[name]
                    seconds, nbytes, share = quiet_block(steps[name], count)
            step_s[name].append(seconds / count)
            sent[name].append(nbytes / count)
            stolen[name].append(share)
            spent[name] += seconds
    return {
        "step_s": step_s,
        "sent_nbytes": {name: statistics.median(values) for name, values in sent.items()},
        "stolen": {name: max(values) for name, values in stolen.items() if values},
    }


def calm(blocks: list[float]) -> bool:
    """Whether blocks are close to each other."""
    return max(blocks) - min(blocks) <= CALM * statistics.median(blocks)


def steps_of(period: int, step_s: float, block_s: float) -> int:
    """Whole periods, one at least, as many as `block_s` holds of steps so long; about `MOST_STEPS` at most."""
    return period * max(1, int(min(MOST_STEPS, block_s / step_s) / period))


def quiet_block(step: Callable[[], object], steps: int) -> tuple[float, float, float]:
    """A block in which the cores were not given to others; else, after some, the least disturbed."""
    found = [block(step, steps)]
    while found[-1][2] > MOST_STOLEN and len(found) <= MOST_AGAIN:
        found.append(block(step, steps))
    return min(found, key=lambda one: (one[2] > MOST_STOLEN, one[2]))


def block(step: Callable[[], object], steps: int) -> tuple[float, float, float]:
    """Of some steps begun together: seconds of the slowest rank, bytes of the host that sent most, and which part of
    the cores' time a hypervisor gave to others."""
    dist.barrier()
    stolen, before, start = stolen_s(), Wire.sent_nbytes(), time.perf_counter()
    for _ in range(steps):
        step()
    taken, nbytes, stolen = last_sent() - start, Wire.sent_nbytes() - before, stolen_s() - stolen
    return slowest(taken), slowest(float(nbytes)), slowest(stolen / taken / (os.cpu_count() or 1))


SILENCE_S, POLL_S, NOISE_NBYTES = 0.02, 0.001, 2000
"""A host sends nothing any more when it has sent no more than so many bytes from one look to the next for so long: a
link of 100 Mbit/s takes six times as many. What answers TCP's segments is less."""


def last_sent() -> float:
    """Wait until this host sends nothing; when it last did, or now. Some methods' exchanges outlast a step."""
    last, sent = time.perf_counter(), Wire.sent_nbytes()
    while time.perf_counter() - last < SILENCE_S:
        time.sleep(POLL_S)
        now, before = Wire.sent_nbytes(), sent
        sent = now
        if now - before > NOISE_NBYTES:
            last = time.perf_counter()
    return last


def stolen_s() -> float:
    """Seconds of all cores' time, since the machine began, that a hypervisor gave to others."""
    with open("/proc/stat", encoding="ascii") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def slowest(value: float) -> float:
    """The largest of all ranks'."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
