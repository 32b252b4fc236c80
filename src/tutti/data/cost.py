"""What a sample of the user's data costs to load: measured over a few of them, as a run would load them."""

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from tutti.config.model import Loading
from tutti.data.samples import Collate, SeededSamples
from tutti.data.source import Source
from tutti.machine import stolen_s

_ENOUGH_S = 0.05
_LONGEST_S = 0.5
_FEWEST, _MOST = 4, 1024
"""Samples are taken until they are a few and take long enough to be timed, or have taken too long already."""


class Reading(NamedTuple):
    """What has passed until now: seconds, but for those in which it waited for a core; seconds of this process' cores;
    bytes that it asked the system to read; seconds of any cores that a hypervisor gave to other machines."""

    wall_s: float
    core_s: float
    nbytes: float
    stolen_s: float = 0.0

    def since(self, before: "Reading") -> "Reading":
        return Reading(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def undisturbed_s(self) -> float:
        """How long it would have taken on a machine of its own. What is stolen while it waits lengthens nothing, so at
        most as much was taken from it as it had of cores."""
        return self.wall_s - min(self.stolen_s, self.core_s)


def reading() -> Reading:
    """What the system does not count is 0; bytes of files that are mapped into memory are not counted."""
    try:
        counters = psutil.Process().io_counters()
    except (AttributeError, psutil.Error, OSError):  # other systems, or containers that hide it
        counters = None
    try:  # nanoseconds in which other work had the core
        queued_s = 1e-9 * int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        queued_s = 0.0
    nbytes = getattr(counters, "read_chars", 0)
    return Reading(time.perf_counter() - queued_s, time.process_time(), nbytes, stolen_s())


def measure_loading(source: Source, seed: int, read: Callable[[], Reading] = reading) -> Loading | None:
    """What a sample costs on one core once storage has given it; None where the data set cannot say.

    A sample is read twice more after its first time, so what is timed is not storage, of which its bytes are told; the
    quicker time counts. A data set that keeps samples in its own memory is measured so.
    """
    load = _from_stream(source) if source.is_stream else _from_map(source, seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as loaders' workers have it
    try:
        found = _measured(load, read)
    except Exception:  # the data set is the user's code; a run will say what is wrong with it
        return None
    finally:
        torch.set_num_threads(threads)
    if found is None:
        return None
    count, cost = found
    return Loading(
        core_s=cost.core_s / count,
        wait_s=max(0.0, cost.undisturbed_s - cost.core_s) / count,
        stored_nbytes=max(0.0, cost.nbytes) / count,
        workers=int(source.options.get("num_workers") or 0),
        stream=source.is_stream,
        parts=hasattr(source.dataset, "part_of_space"),
        evidence="measured",
    )


def _measured(load: Callable[[int], int], read: Callable[[], Reading]) -> tuple[int, Reading] | None:
    """(samples, what they cost together), of as many as it takes to time them."""
    began = read()
    asked = read().since(began).nbytes  # reading the counters is reading, too
    wanted = 1
    while True:
        count, first = _once(load, wanted, read)
        if count == 0:
            return None
        cost = first
        if first.wall_s < _LONGEST_S:
            cost = min((_once(load, wanted, read)[1] for _ in range(2)), key=lambda one: one.undisturbed_s)
        spent_s = read().since(began).wall_s
        timed = wanted >= _FEWEST and cost.undisturbed_s >= _ENOUGH_S
        if timed or count < wanted or wanted >= _MOST or spent_s >= _LONGEST_S:
            return count, cost._replace(nbytes=cost.nbytes - asked)
        wanted *= 4


def _once(load: Callable[[int], int], wanted: int, read: Callable[[], Reading]) -> tuple[int, Reading]:
    before = read()
    count = load(wanted)
    return count, read().since(before)


def _from_map(source: Source, seed: int) -> Callable[[int], int]:
    """Loads so many samples as one batch and says how many there were: the first, or where a run shuffles some spread
    over the data."""
    gather = source.collate is Collate().function
    samples, collate = SeededSamples(source.dataset, seed, "sample", gather=gather), Collate(source.collate)
    whole = len(source.dataset)

    def load(wanted: int) -> int:
        count = min(wanted, whole)
        indices = [place * whole // count if source.shuffle else place for place in range(count)]
        collate(samples.__getitems__([(0, index) for index in indices]))
        return count

    return load


def _from_stream(source: Source) -> Callable[[int], int]:
    def load(wanted: int) -> int:
        some = list(islice(iter(source.dataset), wanted))
        if some:
            source.collate(some)
        return len(some)

    return load
