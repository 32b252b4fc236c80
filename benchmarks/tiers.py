"""Hierarchical all-reduces on two hosts of two ranks each (inside a host, then once between hosts) beside flat ones.

Both sides take turns in the same ranks of a lab (root). Compared are bare sums of as many bytes as a model's
gradients, by tutti and by Gloo between all four ranks, and whole steps of the 10 M MLP, by a Job and by DDP. Four
ranks share the machine's cores.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from pays import limits, lines  # noqa: E402
from pays_loops import Loop, loop_of  # noqa: E402
from pays_methods import METHODS  # noqa: E402
from pays_wire import Output, Wire, in_turns  # noqa: E402
from pays_work import WORKS  # noqa: E402
from record import spread  # noqa: E402
from tutti.lab import Lab  # noqa: E402
from tutti.lab.lab_run import rendezvous_port  # noqa: E402

HOSTS, RANKS_PER_HOST = 2, 2
BUCKET_NBYTES = 25 * 2**20
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={HOSTS}", f"--nproc-per-node={RANKS_PER_HOST}"),
)
STEPS = ("floor", "tutti plain", "ddp")
SUMS = ("tiers", "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        rates: limits of the links.
        megabytes: size of a sum; it is divided into buckets of 25 MiB.
        repeats: blocks of sums and of steps of each side at each limit; 2 where they take more than `limit_s`
            together.
        limit_s: seconds of a side's blocks at one limit.
        warmup: calls of each side before timing begins.
    """

    rates: tuple[str, ...] = ("unlimited", "1gbit", "100mbit")
    megabytes: int = 40
    repeats: int = 7
    limit_s: int = 10
    warmup: int = 3


QUICK = Sizes(rates=("unlimited", "1gbit"), megabytes=8, repeats=2, limit_s=1, warmup=1)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure at all limits. Returns {"samples": rows of `in_turns` by limit, "summary": medians and ratios by
    limit}.
    """
    with Lab(HOSTS, ranks_per_host=RANKS_PER_HOST) as lab, tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.jsonl"
        given = {
            "limits": limits(lab.record, {"unlimited", *sizes.rates}),
            "rates": sizes.rates,
            "nbytes": sizes.megabytes * 10**6,
            "repeats": sizes.repeats,
            "limit_s": sizes.limit_s,
            "warmup": sizes.warmup,
            "block_s": 0.3,
        }
        meet = (f"--master-addr={lab.address(0)}", f"--master-port={rendezvous_port()}")
        words = (*meet, __file__, f"--given={json.dumps(given)}", f"--output={output}")
        done = lab.run(
            lambda host: [*TORCHRUN, f"--node-rank={host}", *words],
            environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
            cwd=Path(folder),
            timeout_s=900,
        )
        rows_of = lines(output)
    if any(entry.code for entry in done):
        raise SystemExit("\n".join(entry.err for entry in done))
    rows_by_rate = {rate: {row["what"]: row for row in rows_of if row["rate"] == rate} for rate in sizes.rates}
    return {"samples": rows_by_rate, "summary": {rate: summary(entry) for rate, entry in rows_by_rate.items()}}


def summary(one: dict[str, Any]) -> dict[str, Any]:
    """Return medians of both kinds of blocks, bytes that left a host, and tutti's ratio, block by block."""
    result: dict[str, Any] = {}
    for what, (ours, theirs) in {"sums": SUMS, "steps": ("tutti plain", "ddp")}.items():
        times, sent = one[what]["step_s"], one[what]["sent_nbytes"]
        ratios = [a / b for a, b in zip(times[ours], times[theirs], strict=False)]
        result[what] = {
            "median_s": {name: statistics.median(values) for name, values in times.items()},
            "spread": {name: spread(values) for name, values in times.items()},
            "sent_nbytes": sent,
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
        }
    return result


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table: a line for the sums and one for the steps at each limit."""
    table = []
    for rate, entry in result["summary"].items():
        for what, names in (("sums", SUMS), ("steps", STEPS[1:])):
            row, low_high = entry[what], entry[what]["ratio_range"]
            cells = [f"{1e3 * row['median_s'][name]:.1f} ({row['sent_nbytes'][name] / 1e6:.1f} MB)" for name in names]
            ratio = f"{row['ratio']:.3f} ({low_high[0]:.2f}-{low_high[1]:.2f})"
            floor = f"{1e3 * row['median_s']['floor']:.1f}" if what == "steps" else ""
            table.append([rate, what, *cells, ratio, floor])
    return [
        "limit",
        "what",
        "tutti ms (sent by a host)",
        "flat Gloo or DDP ms (sent)",
        "ratio",
        "nothing sent ms",
    ], table


# What runs on every rank


def main() -> None:
    from tutti.comm.world import join_world, leave_world

    parser = argparse.ArgumentParser()
    parser.add_argument("--given", required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    given = json.loads(args.given)
    torch.set_num_threads(1)
    join_world()
    wire, output = Wire(given["limits"]), Output(args.output)
    wire.limit("unlimited")
    sums = {"tiers": tiered(given["nbytes"]), "gloo": flat(given["nbytes"])}
    loops: dict[str, Loop] = {name: loop_of(METHODS[name], WORKS["mlp"], 0) for name in STEPS}
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "sums": {**sums},
        "steps": {name: loop.step for name, loop in loops.items()},
    }
    for kind in calls.values():
        for call in kind.values():
            for _ in range(given["warmup"]):
                call()
    for rate in given["rates"]:
        wire.limit(rate)
        for what, kind in calls.items():
            result = in_turns(kind, dict.fromkeys(kind, 1), given, lambda name: None)
            output.row({"rate": rate, "what": what, **result})
    wire.limit("unlimited")
    for loop in loops.values():
        loop.close()
    leave_world()
    os._exit(0)


def buckets(nbytes: int) -> list[int]:
    """Return the number of values in each bucket."""
    sizes = [BUCKET_NBYTES] * (nbytes // BUCKET_NBYTES) + [nbytes % BUCKET_NBYTES]
    return [size // 4 for size in sizes if size]


def tiered(nbytes: int) -> Callable[[], None]:
    """Return a call that sums as a Job does on these hosts: it starts all buckets, then waits for all. Its first
    result is checked.
    """
    from tutti.comm.hierarchical import CommThread, HierarchicalAllReduce
    from tutti.comm.rendezvous import HostHierarchy, make_local_group_or_hierarchy

    hierarchy = make_local_group_or_hierarchy(dist.group.WORLD)
    if not isinstance(hierarchy, HostHierarchy):
        raise SystemExit(
            "ranks of one host cannot share memory here, so there is no hierarchical all-reduce to measure"
        )
    comm_thread = CommThread()
    segments = []
    for numel in buckets(nbytes):
        number, segment = hierarchy.local_group.new_segment(4 * numel)
        segments.append((number, segment, segment.tensor(torch.float32, numel).fill_(1)))

    def call() -> None:
        for work in [HierarchicalAllReduce(hierarchy, comm_thread, number, values) for number, _, values in segments]:
            work.wait()

    call()
    if any((values != dist.get_world_size()).any() for _, _, values in segments):
        raise SystemExit("the hierarchical all-reduce gave a wrong sum")
    for _, _, values in segments:
        values.zero_()
    dist.barrier()
    return call


def flat(nbytes: int) -> Callable[[], None]:
    """Return a call that does the same with Gloo between all ranks."""
    values = [torch.zeros(numel) for numel in buckets(nbytes)]

    def call() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in values]:
            work.wait()

    return call


if __name__ == "__main__":
    main()
