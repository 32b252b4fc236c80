"""Exchanges in which two hosts send to each other at the same time: Gloo's own beside tutti's (comm.point_to_point).

Both sides take turns in the same ranks of a lab (root). A train of exchanges waits for each before the next begins,
as in a step. Before a train, one rank is late by a part of the time that the link needs for one exchange. Times are
relative to that time (bytes over rate): 1.0 is the full rate of the link in both directions at once.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from record import spread  # noqa: E402
from tutti.comm import point_to_point  # noqa: E402
from tutti.comm.world import join_world, leave_world  # noqa: E402
from tutti.lab import Lab  # noqa: E402
from tutti.lab.lab_network import parse_rate  # noqa: E402

HOSTS = 2
SIDES = ("Gloo", "tutti")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        rates: limits of the links.
        nbytes: bytes that each rank sends to the other in an exchange.
        late: lateness of one rank, in hundredths of an exchange's time.
        blocks: trains of each side, in turns.
        exchanges: exchanges of a train.
    """

    rates: tuple[str, ...] = ("1gbit", "100mbit")
    nbytes: tuple[str, ...] = ("262144", "2097152")
    late: tuple[str, ...] = ("10", "50")
    blocks: int = 5
    exchanges: int = 8


QUICK = Sizes(rates=("1gbit",), nbytes=("2097152",), late=("50",), blocks=2)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure everything. Returns {"samples": times relative to the link's, block by block, "summary": medians}, by
    limit, exchange, bytes and lateness.
    """
    samples: dict[str, Any] = {}
    for rate in sizes.rates:
        with Lab(HOSTS, rates=rate) as lab, tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "blocks.json"
            given = [f"--{name}={','.join(getattr(sizes, name))}" for name in ("nbytes", "late")]
            given += [f"--blocks={sizes.blocks}", f"--exchanges={sizes.exchanges}", f"--rate={rate}"]
            words = ("--folder", str(Path(folder) / "run"), __file__, *given, f"--output={output}")
            done = lab.train(*words, cwd=Path(folder), timeout_s=500)
            if not output.exists():
                raise SystemExit("the ranks failed\n" + "\n".join(host.err for host in done))
            samples |= {f"{rate}, {what}": blocks for what, blocks in json.loads(output.read_text()).items()}
    return {"samples": samples, "summary": {what: summary(blocks) for what, blocks in samples.items()}}


def summary(blocks: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "of_line": {side: statistics.median(values) for side, values in blocks.items()},
        "spread": {side: spread(values) for side, values in blocks.items()},
        "ratio": statistics.median(ours / theirs for theirs, ours in zip(*(blocks[s] for s in SIDES), strict=True)),
    }


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table: a line for each limit, exchange, size and lateness."""
    table = []
    for what, entry in result["summary"].items():
        times = [f"{entry['of_line'][side]:.2f} ({entry['spread'][side]:.0%})" for side in SIDES]
        table.append([what, *times, f"{entry['ratio']:.2f}"])
    return ["exchange", *(f"{side}, of the link's time (spread)" for side in SIDES), "ratio"], table


# What runs on every rank


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("nbytes", "late", "rate"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--exchanges", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    world = join_world()
    bits_per_s = parse_rate(args.rate)
    if bits_per_s is None:
        raise SystemExit("crossing: times are relative to the rate of a limited link; give --rate a limit")
    blocks_by_case: dict[str, dict[str, list[float]]] = {}
    for name, sides in WAYS.items():
        for nbytes in map(int, args.nbytes.split(",")):
            for late in map(int, args.late.split(",")):
                line_s, blocks = 8 * nbytes / bits_per_s, {side: [] for side in SIDES}
                for _ in range(args.blocks):
                    for side, begin in zip(SIDES, sides, strict=True):
                        took_s = train(begin, nbytes // 4, args.exchanges, late / 100 * line_s)
                        blocks[side].append(took_s / line_s)
                blocks_by_case[f"{name}, {nbytes} B, late by {late} %"] = blocks
    if world.is_main:
        args.output.write_text(json.dumps(blocks_by_case))
    leave_world()


Begin = Callable[[torch.Tensor, torch.Tensor], Any]


def train(begin: Begin, numel: int, exchanges: int, late_s: float) -> float:
    """Return the mean seconds of an exchange; each is waited for before the next."""
    rows, both = torch.ones(numel), torch.ones(2 * numel)
    begin(rows.clone(), both.clone()).wait()
    dist.barrier()
    began = time.perf_counter()
    if dist.get_rank():
        time.sleep(late_s)
    for _ in range(exchanges):
        begin(rows, both).wait()
    dist.barrier()
    return (time.perf_counter() - began - late_s) / exchanges


def _gloo_all_to_all(rows: torch.Tensor, both: torch.Tensor) -> Any:
    return dist.all_to_all_single(torch.empty_like(both), both, async_op=True)


def _gloo_gather(rows: torch.Tensor, both: torch.Tensor) -> Any:
    return point_to_point._all_gather(both, rows, async_op=True)


def _gloo_sum(rows: torch.Tensor, both: torch.Tensor) -> Any:
    return point_to_point._reduce_scatter(rows, both, async_op=True)


WAYS: dict[str, tuple[Begin, Begin]] = {
    "all-to-all": (_gloo_all_to_all, lambda rows, both: point_to_point.all_to_all(torch.empty_like(both), both, None)),
    "gather": (_gloo_gather, lambda rows, both: point_to_point.all_gather(both, rows, None)),
    "sum by parts": (_gloo_sum, lambda rows, both: point_to_point.reduce_scatter(rows, both, None)),
}


if __name__ == "__main__":
    main()
