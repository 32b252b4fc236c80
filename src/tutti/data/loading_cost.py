"""The cost of loading a sample of the user's data, measured on a few samples loaded as a run would load them."""

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
"""Bounds on the number of timed samples: at least a few that take long enough, unless they take too long."""


class ResourceUsage(NamedTuple):
    """Counters of this process.

    Attributes:
        wall_s: seconds, without those spent waiting for a core.
        core_s: CPU seconds of the process.
        nbytes: bytes that it asked the system to read.
        stolen_s: seconds of any cores that the hypervisor gave to other machines.
    """

    wall_s: float
    core_s: float
    nbytes: float
    stolen_s: float = 0.0

    def since(self, before: "ResourceUsage") -> "ResourceUsage":
        return ResourceUsage(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def undisturbed_s(self) -> float:
        """Seconds on an undisturbed machine. Time stolen while the process waits delays nothing."""
        return self.wall_s - min(self.stolen_s, self.core_s)


def read_usage() -> ResourceUsage:
    """The counters now; 0 for those that the system lacks. Reads of memory-mapped files are not counted."""
    try:
        counters = psutil.Process().io_counters()
    except (AttributeError, psutil.Error, OSError):  # other systems, or containers that hide it
        counters = None
    try:  # nanoseconds in which other work had the core
        queued_s = 1e-9 * int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        queued_s = 0.0
    nbytes = getattr(counters, "read_chars", 0)
    return ResourceUsage(time.perf_counter() - queued_s, time.process_time(), nbytes, stolen_s())


def measure_loading(source: DataSource, seed: int, read: Callable[[], ResourceUsage] = read_usage) -> Loading | None:
    """Cost of a sample on one core, without storage; None if the data set raises or is empty.

    Samples are read twice more after the first time and the quicker time counts, so that they come from the page cache;
    the bytes read are reported instead. A data set that caches samples is measured with its cache.
    """
    load = _from_stream(source) if source.is_stream else _from_map(source, seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as loaders' workers have it
    try:
        measured = _measure(load, read)
    except Exception:  # the data set is the user's code; a run will say what is wrong with it
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
    """(number of samples, their total cost), of as many samples as it takes to time them."""
    began = read()
    asked = read().since(began).nbytes  # reading the counters is reading, too
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
            return count, cost._replace(nbytes=cost.nbytes - asked)
        wanted *= 4


def _once(load: Callable[[int], int], wanted: int, read: Callable[[], ResourceUsage]) -> tuple[int, ResourceUsage]:
    before = read()
    count = load(wanted)
    return count, read().since(before)


def _from_map(source: DataSource, seed: int) -> Callable[[int], int]:
    """Loads n samples as one batch and returns how many there were: evenly spread ones if a run shuffles."""
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
