"""All-reduces between two hosts of one core: Gloo's network threads at the priority that tutti sets, and unchanged.

Both sides take turns in the same ranks of a lab (root). Ranks wait for sums of few and of many bytes, either at
once or after a matrix product. Only the scheduling policy of the threads changes between blocks.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from record import spread  # noqa: E402
from tutti.comm.world import deprioritise_gloo_threads, gloo_thread_ids, join_world, leave_world  # noqa: E402
from tutti.lab import Lab  # noqa: E402

HOSTS = 2
SIDES = ("as they come", "deferred")
PRODUCT_N = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sums of `nbytes`; each side has `blocks` blocks of `sums` sums, in turns."""

    rates: tuple[str, ...] = ("unlimited", "1gbit")
    nbytes: tuple[str, ...] = ("4096", "524288", "4194304")
    blocks: int = 7
    sums: int = 40


QUICK = Sizes(rates=("unlimited",), nbytes=("4096",), blocks=2, sums=10)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure everything. Returns {"samples": mean seconds of a sum, block by block, "summary": medians and ratios},
    by limit and kind.
    """
    samples: dict[str, Any] = {}
    for rate in sizes.rates:
        with Lab(HOSTS, rates=rate) as lab, tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "blocks.json"
            given = (f"--nbytes={','.join(sizes.nbytes)}", f"--blocks={sizes.blocks}", f"--sums={sizes.sums}")
            words = ("--folder", str(Path(folder) / "run"), __file__, *given, f"--output={output}")
            done = lab.train(*words, cwd=Path(folder), timeout_s=300)
            if not output.exists():
                raise SystemExit("the ranks failed\n" + "\n".join(host.err for host in done))
            samples |= {f"{rate}, {what}": blocks for what, blocks in json.loads(output.read_text()).items()}
    return {"samples": samples, "summary": {what: summary(blocks) for what, blocks in samples.items()}}


def summary(blocks: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [ours / theirs for theirs, ours in zip(*(blocks[side] for side in SIDES), strict=True)]
    return {
        "median_s": {side: statistics.median(values) for side, values in blocks.items()},
        "spread": {side: spread(values) for side, values in blocks.items()},
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table: a line for each limit, size, and with or without a product before."""
    table = []
    for what, entry in result["summary"].items():
        low, high = entry["ratio_range"]
        times = [f"{1e3 * entry['median_s'][side]:.2f}" for side in SIDES]
        table.append([what, *times, f"{entry['ratio']:.2f} ({low:.2f}-{high:.2f})"])
    return ["sums", *(f"{side}, ms" for side in SIDES), "ratio"], table


# What runs on every rank


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nbytes", required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--sums", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    world = join_world()
    blocks_by_case: dict[str, dict[str, list[float]]] = {}
    for nbytes in map(int, args.nbytes.split(",")):
        for product in (False, True):
            blocks: dict[str, list[float]] = {side: [] for side in SIDES}
            block(nbytes, product, args.sums)
            for _ in range(args.blocks):
                for side in SIDES:
                    set_threads(side)
                    blocks[side].append(block(nbytes, product, args.sums))
            blocks_by_case[f"{nbytes} B" + (" after a product" if product else "")] = blocks
    if world.is_main:
        args.output.write_text(json.dumps(blocks_by_case))
    leave_world()


def set_threads(side: str) -> None:
    if side == "deferred":
        deprioritise_gloo_threads()
        return
    for thread in gloo_thread_ids():
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def block(nbytes: int, product: bool, sums: int) -> float:
    """Return the mean seconds that this rank waits for a sum."""
    values, a, waited = torch.ones(nbytes // 4), torch.ones(PRODUCT_N, PRODUCT_N), 0.0
    dist.barrier()
    for _ in range(sums):
        if product:
            torch.mm(a, a)
        began = time.perf_counter()
        dist.all_reduce(values, dist.ReduceOp.MAX)
        waited += time.perf_counter() - began
    return waited / sums


if __name__ == "__main__":
    main()
