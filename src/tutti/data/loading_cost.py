"""The cost of loading a sample of the user's data, measured on a few samples that are loaded as in a run."""

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from tutti.config.model import Loading
from tutti.data.samples import Collate, DataSource, SeededSamples
from tutti.machine import stolen_s

_ENOUGH_S = 0.05
_LONGEST_S = 0.5
_FEWEST, _MOST = 4, 1024
"""Bounds on the number of timed samples. Between them, samples are added until their time can be measured."""


class ResourceUsage(NamedTuple):
    """Counters of this process.

    Attributes:
        wall_s: elapsed seconds, without those spent waiting for a core.
        core_s: CPU seconds of the process.
        nbytes: bytes that it read through system calls.
        stolen_s: core seconds that the hypervisor gave to other machines, over all cores.
    """

    wall_s: float
    core_s: float
    nbytes: float
    stolen_s: float = 0.0

    def since(self, before: "ResourceUsage") -> "ResourceUsage":
        return ResourceUsage(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def undisturbed_s(self) -> float:
        """Seconds that an undisturbed machine would have taken. Time stolen while the process waits delays nothing."""
        return self.wall_s - min(self.stolen_s, self.core_s)


def read_usage() -> ResourceUsage:
    """Read the counters; those that the system lacks are 0. Reads of memory-mapped files are not counted."""
    try:
        counters = psutil.Process().io_counters()
    except (AttributeError, psutil.Error, OSError):  # other systems, or containers that hide it
        counters = None
    try:  # the second field: nanoseconds spent waiting for a core
        queued_s = 1e-9 * int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        queued_s = 0.0
    nbytes = getattr(counters, "read_chars", 0)
    return ResourceUsage(time.perf_counter() - queued_s, time.process_time(), nbytes, stolen_s())


def measure_loading(source: DataSource, seed: int, read: Callable[[], ResourceUsage] = read_usage) -> Loading | None:
    """Measure the cost of loading a sample on one core, without storage.

    After the first time, samples are read twice more, and the quicker time counts: they then come from the page cache.
    The bytes read are reported separately. A data set that caches samples is measured with its cache.

    Args:
        source: the data.
        seed: seed of the samples.
        read: reads the counters of this process.

    Returns:
        The cost; None if the data set raises an error or is empty.
    """
    load = _from_stream(source) if source.is_stream else _from_map(source, seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers of a loader
    try:
        measured = _measure(load, read)
    except Exception:  # the data set is the user's code; a run will report what is wrong with it
        return None
    finally:
        torch.set_num_threads(threads)
    if measured is None:
        return None
    count, cost = measured
    return Loading(
        core_s=cost.core_s / count,
        wait_s=max(0.0, cost.undisturbed_s - cost.core_s) / count,
        stored_nbytes=max(0.0, cost.nbytes) / count,
        workers=int(source.options.get("num_workers") or 0),
        stream=source.is_stream,
        parts=hasattr(source.dataset, "part_of_space"),
        evidence="measured",
    )


def _measure(load: Callable[[int], int], read: Callable[[], ResourceUsage]) -> tuple[int, ResourceUsage] | None:
    """Load enough samples to time them; return their number and total cost, or None for an empty data set."""
    began = read()
    overhead_nbytes = read().since(began).nbytes  # reading the counters is itself counted
    wanted = 1
    while True:
        count, first = _once(load, wanted, read)
        if count == 0:
            return None
        cost = first
        if first.wall_s < _LONGEST_S:
            cost = min((_once(load, wanted, read)[1] for _ in range(2)), key=lambda usage: usage.undisturbed_s)
        spent_s = read().since(began).wall_s
        timed = wanted >= _FEWEST and cost.undisturbed_s >= _ENOUGH_S
        if timed or count < wanted or wanted >= _MOST or spent_s >= _LONGEST_S:
            return count, cost._replace(nbytes=cost.nbytes - overhead_nbytes)
        wanted *= 4


def _once(load: Callable[[int], int], wanted: int, read: Callable[[], ResourceUsage]) -> tuple[int, ResourceUsage]:
    before = read()
    count = load(wanted)
    return count, read().since(before)


def _from_map(source: DataSource, seed: int) -> Callable[[int], int]:
    """Return a function that loads n samples as one batch, evenly spread if the run shuffles, and counts them."""
    gather = source.collate is Collate().function
    samples, collate = SeededSamples(source.dataset, seed, "sample", gather=gather), Collate(source.collate)
    whole = len(source.dataset)

    def load(wanted: int) -> int:
        count = min(wanted, whole)
        indices = [place * whole // count if source.shuffle else place for place in range(count)]
        collate(samples.__getitems__([(0, index) for index in indices]))
        return count

    return load


def _from_stream(source: DataSource) -> Callable[[int], int]:
    def load(wanted: int) -> int:
        samples = list(islice(iter(source.dataset), wanted))
        if samples:
            source.collate(samples)
        return len(samples)

    return load
