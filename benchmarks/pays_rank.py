"""What each host of the lab runs for `pays`: units of work, each a line in the output once it is done.

A unit is a training to the target quality, the step times of all methods at one limit of the links, or one real run at
a limited rate that checks the two against each other.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from pays_methods import METHODS, Loop, Method, loop_of  # noqa: E402
from pays_work import WORKS, Work  # noqa: E402
from tutti.lab.rates import burst_nbytes, parse_rate  # noqa: E402
from tutti.runtime.world import join, leave  # noqa: E402

QUEUE = "50ms"
WARM_STEPS = 3


def main() -> None:
    args = parse_arguments()
    meet()
    wire = Wire(args.switch, args.namespaces)
    output = Output(args.output)
    work = WORKS[args.work]
    for unit in json.loads(args.units.read_text()):
        output.row({**unit, "begun": True})
        if unit["kind"] == "quality":
            found = trained(METHODS[unit["method"]], work, unit["seed"], unit["most"], wire, unit["rate"])
            output.row({**unit, **found})
        else:
            timed(unit, work, wire, output)
    wire.limit("unlimited")
    leave()
    os._exit(0)  # groups of loops that are gone would be waited for


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=list(WORKS), required=True)
    parser.add_argument("--units", type=Path, required=True, help="a JSON list")
    parser.add_argument("--output", type=Path, required=True, help="gets a line for each unit")
    parser.add_argument("--switch", required=True, help="the namespace of the lab's bridge")
    parser.add_argument("--namespaces", nargs="+", required=True, help="of the hosts, in order")
    return parser.parse_args()


def meet() -> None:
    """One rank a host, one thread a rank."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=os.environ["NODE_RANK"],
        WORLD_SIZE=os.environ["NNODES"],
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        GLOO_SOCKET_IFNAME="eth0",
        TUTTI_RENDEZVOUS=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
    )
    join()


class Output:
    """Rank 0's lines; the others' go nowhere."""

    def __init__(self, path: Path) -> None:
        self._path = path if dist.get_rank() == 0 else None

    def row(self, row: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


class Wire:
    """The hosts' links: their limit, as `tutti lab` makes it, changed while ranks live, and what this host sent."""

    def __init__(self, switch: str, namespaces: list[str]) -> None:
        self._devices = [(name, "eth0") for name in namespaces]
        self._devices += [(switch, f"port{host}") for host in range(len(namespaces))]

    def limit(self, rate: str) -> None:
        """Limit every link both ways; all ranks call it."""
        dist.barrier()
        if dist.get_rank() == 0:
            bits = parse_rate(rate)
            for namespace, device in self._devices:
                subprocess.run(tc_words(namespace, device, bits), check=bits is not None, capture_output=True)
        dist.barrier()

    @staticmethod
    def sent_nbytes() -> int:
        """What this host's interface has sent since it was made, headers included."""
        lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
        row = next(line for line in lines if line.strip().startswith("eth0:"))
        return int(row.partition(":")[2].split()[8])


def tc_words(namespace: str, device: str, bits_per_s: int | None) -> list[str]:
    """The command that limits what a device sends, or lifts the limit (which fails where there is none)."""
    words = ["tc", "-n", namespace, "qdisc", "del" if bits_per_s is None else "replace", "dev", device, "root"]
    if bits_per_s is None:
        return words
    burst = str(burst_nbytes(bits_per_s))
    return [*words, "tbf", "rate", f"{bits_per_s}bit", "burst", burst, "latency", QUEUE]


# To a quality


def trained(method: Method, work: Work, seed: int, most: int, wire: Wire, rate: str) -> dict[str, Any]:
    """Train until the held-out loss is at the target: {"steps": how many, None where `most` were not enough,
    "train_s": without the looks, "looks": [[steps, held-out loss, accuracy], ..]}."""
    wire.limit("unlimited")
    loop = loop_of(method, work, seed)
    wire.limit(rate)
    looks: list[list[float]] = []
    taken, steps = 0.0, None
    for step in range(work.every, most + 1, work.every):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(work.every):
            loss = loop.step()
        taken += time.perf_counter() - start
        looks.append([step, *loop.quality()])
        if looks[-1][1] <= work.target:
            steps = step
            break
    loop.close()
    del loop
    gc.collect()
    return {"steps": steps, "train_s": slowest(taken), "last_loss": loss, "looks": looks}


# Step times


def timed(unit: dict[str, Any], work: Work, wire: Wire, output: Output) -> None:
    """Step times of all methods in turns at each of the unit's limits, all of them warm from an unlimited link.

    Writes one row a limit: {"step_s": {method: one a block}, "sent_nbytes": the most any host sent, a step}.
    """
    wire.limit("unlimited")
    loops: dict[str, Loop] = {}
    for name in unit["methods"]:
        output.row({"kind": "time", "trying": name})
        loops[name] = loop_of(METHODS[name], work, 0)
        for _ in range(warm_steps(METHODS[name])):
            loops[name].step()
    for rate in unit["rates"]:
        wire.limit(rate)
        row = {"kind": "time", "rate": rate, **in_turns(loops, unit, output)}
        output.row(row)
    for loop in loops.values():
        loop.close()


def warm_steps(method: Method) -> int:
    """A period and a half of those that have one: their exchange then falls in the middle of a block."""
    return WARM_STEPS if method.period == 1 else method.period + method.period // 2


def in_turns(loops: dict[str, Loop], unit: dict[str, Any], output: Output) -> dict[str, Any]:
    """Blocks of each loop, A B C, C B A, ...; a method leaves the turns once its blocks took `limit_s` together."""
    step_s: dict[str, list[float]] = {name: [] for name in loops}
    sent: dict[str, list[float]] = {name: [] for name in loops}
    spent = dict.fromkeys(loops, 0.0)
    for repeat in range(unit["repeats"]):
        names = list(loops)[:: 1 if repeat % 2 == 0 else -1]
        for name in names:
            if repeat >= 2 and spent[name] > unit["limit_s"]:
                continue
            output.row({"kind": "time", "trying": name})
            steps = steps_of(METHODS[name], step_s[name], unit)
            seconds, nbytes = block(loops[name], steps)
            step_s[name].append(seconds / steps)
            sent[name].append(nbytes / steps)
            spent[name] += seconds
    return {
        "step_s": step_s,
        "sent_nbytes": {name: statistics.median(values) for name, values in sent.items()},
    }


def steps_of(method: Method, before: list[float], unit: dict[str, Any]) -> int:
    """A whole period; else 1 step, and where those were short as many as `block_s` holds, 6 at most."""
    if method.period > 1:
        return method.period
    return max(1, min(6, int(unit["block_s"] / before[0]))) if before else 2 if unit["block_s"] >= 1 else 1


def block(loop: Loop, steps: int) -> tuple[float, float]:
    """Seconds of the slowest rank and bytes of the host that sent most, for some steps begun together."""
    dist.barrier()
    before, start = Wire.sent_nbytes(), time.perf_counter()
    for _ in range(steps):
        loop.step()
    taken, nbytes = time.perf_counter() - start, Wire.sent_nbytes() - before
    return slowest(taken), slowest(float(nbytes))


def slowest(value: float) -> float:
    """The largest of all ranks'."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


if __name__ == "__main__":
    main()
