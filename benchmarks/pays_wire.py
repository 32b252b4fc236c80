"""The lab's links as ranks of `pays` use them: limits that change during a run, and blocks of steps timed in turns.

Imports nothing of tutti: peers run this file in their own virtual environments.
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
"""Blocks in which a hypervisor gave more than MOST_STOLEN of the cores' time to others are timed again, at most
MOST_AGAIN times."""

CALM, MOST_MORE = 0.15, 4
"""If a method's blocks differ by more than the part CALM of their median, it gets up to MOST_MORE more blocks, as long
as they take at most twice its limit. Other guests of a hypervisor may slow the machine's memory down for a while, which
does not count as stolen time."""


class Wire:
    """The links of the hosts.

    Args:
        commands: by limit, the `tc` commands that set it; rank 0 runs them.
    """

    def __init__(self, commands: Mapping[str, list[list[str]]]) -> None:
        self._commands = commands

    def limit(self, rate: str) -> None:
        """Limit every link in both directions; all ranks call it. Lifting a limit that is not set does nothing."""
        dist.barrier()
        if dist.get_rank() == 0:
            for words in self._commands[rate]:
                subprocess.run(words, check="replace" in words, capture_output=True)
        dist.barrier()

    @staticmethod
    def sent_nbytes() -> int:
        """Return the bytes that this host's interface has sent since it was made, headers included."""
        lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
        row = next(line for line in lines if line.strip().startswith("eth0:"))
        return int(row.partition(":")[2].split()[8])


class Output:
    """A file to which rank 0 writes lines; other ranks write nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path if dist.get_rank() == 0 else None

    def row(self, row: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def warm_steps(period: int, delay: int = 0) -> int:
    """Return the number of steps before timing begins.

    With a period, these are one and a half periods, so that the exchange falls into the middle of a block. A
    delayed exchange begins with the first step of a block instead, so that it is over when the block ends.
    """
    if period == 1:
        return WARM_STEPS
    return 2 * period - 1 if delay else period + period // 2


def in_turns(
    steps: Mapping[str, Callable[[], object]],
    periods: Mapping[str, int],
    terms: Mapping[str, Any],
    trying: Callable[[str], None],
) -> dict[str, Any]:
    """Time blocks of each loop in turns: A B C, C B A, ...

    A loop drops out once its blocks took `limit_s` seconds together; if they differ much, it stays some turns
    longer. The first run of a loop determines how many steps its blocks have; it counts itself if it was as long
    as a block.

    Args:
        steps: by method, a function that makes one step.
        periods: by method, the steps between two of its exchanges.
        terms: "repeats", "block_s" and "limit_s".
        trying: called with a method's name before each of its blocks.

    Returns:
        {"step_s": {method: seconds of a step, one entry a block}, "sent_nbytes": {method: bytes a step of the
        host that sent most, median of blocks}, "stolen": {method: largest part of the cores' time that others had
        in a block}}.
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
    """Return whether blocks are close to each other."""
    return max(blocks) - min(blocks) <= CALM * statistics.median(blocks)


def steps_of(period: int, step_s: float, block_s: float) -> int:
    """Return the steps of a block: whole periods, at least one, for about `block_s` seconds, and about `MOST_STEPS`
    at most.
    """
    return period * max(1, int(min(MOST_STEPS, block_s / step_s) / period))


def quiet_block(step: Callable[[], object], steps: int) -> tuple[float, float, float]:
    """Time a block during which the cores were not given to others; after some attempts, return the least disturbed."""
    blocks = [block(step, steps)]
    while blocks[-1][2] > MOST_STOLEN and len(blocks) <= MOST_AGAIN:
        blocks.append(block(step, steps))
    return min(blocks, key=lambda one: (one[2] > MOST_STOLEN, one[2]))


def block(step: Callable[[], object], steps: int) -> tuple[float, float, float]:
    """Time some steps that all ranks begin together.

    Returns:
        Seconds of the slowest rank, bytes of the host that sent most, and the part of the cores' time that a
        hypervisor gave to others.
    """
    dist.barrier()
    stolen, before, start = stolen_s(), Wire.sent_nbytes(), time.perf_counter()
    for _ in range(steps):
        step()
    taken, nbytes, stolen = last_sent() - start, Wire.sent_nbytes() - before, stolen_s() - stolen
    return slowest(taken), slowest(float(nbytes)), slowest(stolen / taken / (os.cpu_count() or 1))


SILENCE_S, POLL_S, NOISE_NBYTES = 0.02, 0.001, 2000
"""A host has stopped sending when, for SILENCE_S seconds, it sends at most NOISE_NBYTES every POLL_S seconds. A link of
100 Mbit/s carries six times as many bytes in POLL_S; TCP's acknowledgements are fewer."""


def last_sent() -> float:
    """Wait until this host has stopped sending, and return when it last sent. Exchanges of some methods outlast a
    step.
    """
    last, sent = time.perf_counter(), Wire.sent_nbytes()
    while time.perf_counter() - last < SILENCE_S:
        time.sleep(POLL_S)
        now, before = Wire.sent_nbytes(), sent
        sent = now
        if now - before > NOISE_NBYTES:
            last = time.perf_counter()
    return last


def stolen_s() -> float:
    """Return the seconds of all cores' time that a hypervisor gave to others since the machine started."""
    with open("/proc/stat", encoding="ascii") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def slowest(value: float) -> float:
    """Return the largest value of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
