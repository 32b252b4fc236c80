"""Step time of tutti beside a hand-written DistributedDataParallel loop: same model, data, threads and processes.

Both loops live in the same ranks and take turns, block by block (A B A B ...), so that disturbances of the machine
affect both. A time is that of one whole step, including its batch. There are two lower bounds: the same loop
without communication, and the bare all-reduce of as many bytes. The hand-written loop also runs in ranks of its
own, without the allocator setting that a Job makes (`tutti.host_memory`).
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from harness import run_ranks
from record import spread
from workloads import WORKLOADS, Workload

BUCKET_NBYTES = 25 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is timed: in each of `launches`, `repeats` blocks of `steps` of each loop, after `warmup` steps of
    each.

    Blocks are short, so that the machine treats both loops alike. There are several launches, because the
    addresses of a process's buffers affect its speed and are fixed when it starts.
    """

    ranks: int = 2
    launches: int = 5
    steps: int = 3
    warmup: int = 6
    repeats: int = 6
    workloads: tuple[str, ...] = tuple(WORKLOADS)


QUICK = Sizes(launches=1, warmup=2, repeats=3)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure all workloads, each in its own ranks. Returns {"samples": .., "summary": {workload: ..}}, in seconds."""
    samples = {
        name: _pooled([_launch(name, sizes, number) for number in range(sizes.launches)]) for name in sizes.workloads
    }
    return {"samples": samples, "summary": {name: summary(name, times) for name, times in samples.items()}}


def _launch(name: str, sizes: Sizes, number: int) -> dict[str, Any]:
    """Measure one workload in fresh ranks; launches alternate in which loop allocates its memory first."""
    return {
        **run_ranks(measure_on_rank, sizes.ranks, name, sizes, number % 2 == 0, timeout_s=600)[0],
        "ddp_alone_s": run_ranks(ddp_alone_on_rank, sizes.ranks, name, sizes, timeout_s=600)[0],
    }


def _pooled(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate the samples of all launches."""
    first = launches[0]
    loops = first["step_s"]
    return {
        **first,
        "launches": len(launches),
        "step_s": {loop: [block for launch in launches for block in launch["step_s"][loop]] for loop in loops},
        "all_reduce_s": [time_s for launch in launches for time_s in launch["all_reduce_s"]],
        "ddp_alone_s": [time_s for launch in launches for time_s in launch["ddp_alone_s"]],
    }


def summary(name: str, samples: dict[str, Any]) -> dict[str, Any]:
    """Return medians over blocks of the blocks' median step times, and the ratio block by block."""
    blocks = {loop: [statistics.median(block) for block in times] for loop, times in samples["step_s"].items()}
    ratios = [ours / theirs for ours, theirs in zip(blocks["tutti"], blocks["ddp"], strict=True)]
    floor = statistics.median(blocks["compute only"])
    bare = statistics.median(samples["all_reduce_s"])
    return {
        "ddp_s": statistics.median(blocks["ddp"]),
        "ddp_alone_s": statistics.median(samples["ddp_alone_s"]),
        "tutti_s": statistics.median(blocks["tutti"]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ratio_by_launch": [statistics.median(part) for part in _chunks(ratios, samples["launches"])],
        "spread": {loop: spread(times) for loop, times in blocks.items()},
        "compute_floor_s": floor,
        "bare_all_reduce_s": bare,
        "limit_s": max(floor, bare),
        "gradient_nbytes": samples["gradient_nbytes"],
        "sent_bytes_per_s": samples["sent_nbytes"] / bare,
        "note": WORKLOADS[name].note,
    }


def _chunks(values: list[float], count: int) -> list[list[float]]:
    size = len(values) // count
    return [values[start : start + size] for start in range(0, len(values), size)]


# What runs on every rank


def measure_on_rank(name: str, sizes: Sizes, tutti_first: bool) -> dict[str, Any]:
    """Time all loops of one workload. The times are the same on every rank, because each step ends in the same
    exchange.
    """
    from tutti.comm.world import join_world

    join_world()
    workload = WORKLOADS[name]
    loops = {"tutti": tutti_loop(workload, sizes), "ddp": ddp_loop(workload, sizes, nn_replica=_ddp)}
    for name_of_loop in sorted(loops, reverse=tutti_first):
        next(loops[name_of_loop])
    loops["compute only"] = ddp_loop(workload, sizes, nn_replica=_alone)
    for loop in loops.values():
        _block(loop, sizes.warmup)
    step_s: dict[str, list[list[float]]] = {loop: [] for loop in loops}
    for repeat in range(sizes.repeats):
        for loop in sorted(("ddp", "tutti"), reverse=bool(repeat % 2)):  # neither loop is always first
            step_s[loop].append(_block(loops[loop], sizes.steps))
    step_s["compute only"].append(_block(loops["compute only"], sizes.steps))
    nbytes = sum(p.numel() * p.element_size() for p in workload.model().parameters())
    return {
        "step_s": step_s,
        "all_reduce_s": [_all_reduce(nbytes) for _ in range(3 * sizes.repeats)],
        "gradient_nbytes": nbytes,
        "sent_nbytes": 2 * (sizes.ranks - 1) * nbytes // sizes.ranks,
        "threads": torch.get_num_threads(),
    }


def ddp_alone_on_rank(name: str, sizes: Sizes) -> list[float]:
    """Time the hand-written loop in ranks without a Job, to show that running beside tutti does not slow it down."""
    from tutti.comm.world import join_world

    join_world()
    loop = ddp_loop(WORKLOADS[name], sizes, nn_replica=_ddp)
    _block(loop, sizes.warmup)
    return [statistics.median(_block(loop, sizes.steps)) for _ in range(sizes.repeats)]


def tutti_loop(workload: Workload, sizes: Sizes) -> Iterator[None]:
    """Run tutti's three lines; yields after each step."""
    import tutti

    torch.manual_seed(0)
    model = workload.model()
    job = tutti.Job(global_batch_size=workload.batch * sizes.ranks, seed=0)
    model, _, loader = job.prepare(model, _optimizer(model), workload.data(_samples(workload)), workload.loss)
    for _ in job.epochs(1_000_000):
        for batch in loader:
            job.step(batch)
            yield


def ddp_loop(workload: Workload, sizes: Sizes, nn_replica: Callable[[nn.Module], nn.Module]) -> Iterator[None]:
    """Run the same loop by hand, as PyTorch's documentation advises; yields after each step."""
    torch.manual_seed(0)
    model = workload.model()
    data = workload.data(_samples(workload))
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=workload.batch, sampler=sampler, drop_last=True)
    replica = nn_replica(model)
    optimizer = _optimizer(model)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = workload.loss(replica(inputs), target)
            loss.backward()
            optimizer.step()
            loss.item()
            yield


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _alone(model: nn.Module) -> nn.Module:
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _samples(workload: Workload) -> int:
    """Return a number of samples that makes epochs long, and gives whole batches on any small number of ranks."""
    return workload.batch * 12 * 20


def _block(loop: Iterator[None], steps: int) -> list[float]:
    """Return the seconds of each of `steps` steps, which all ranks begin together."""
    dist.barrier()
    times = [time.perf_counter()]
    for _ in range(steps):
        next(loop)
        times.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(times)]


def _all_reduce(nbytes: int) -> float:
    """Return the seconds of an all-reduce of `nbytes` in buckets, with nothing else to do."""
    sizes = [BUCKET_NBYTES] * (nbytes // BUCKET_NBYTES) + [nbytes % BUCKET_NBYTES]
    buckets = [torch.ones(size // 4) for size in sizes if size]
    dist.barrier()
    begin = time.perf_counter()
    for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
        work.wait()
    return time.perf_counter() - begin


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table: header and rows, times in milliseconds."""
    header = [
        "model",
        "DDP alone ms",
        "DDP ms",
        "tutti ms",
        "ratio",
        "(by launch)",
        "compute only ms",
        "bare all-reduce ms",
    ]
    table = [
        [
            name,
            f"{1e3 * entry['ddp_alone_s']:.1f}",
            f"{1e3 * entry['ddp_s']:.1f}",
            f"{1e3 * entry['tutti_s']:.1f}",
            f"{entry['ratio']:.3f}",
            f"{min(entry['ratio_by_launch']):.3f}-{max(entry['ratio_by_launch']):.3f}",
            f"{1e3 * entry['compute_floor_s']:.1f}",
            f"{1e3 * entry['bare_all_reduce_s']:.1f}",
        ]
        for name, entry in result["summary"].items()
    ]
    return header, table
