"""What each host of the lab runs for `pays`: units of work. Each becomes a line of the output once it is done.

A unit is a training to the target quality, the step times of all methods at some limits of the links, or a training
in full at a limited rate, which checks the other two.
"""

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from pays_loops import Loop, TuttiLoop, loop_of  # noqa: E402
from pays_methods import METHODS, Method, method_of  # noqa: E402
from pays_wire import Output, Wire, in_turns, slowest, warm_steps  # noqa: E402
from pays_work import WORKS, Work  # noqa: E402
from tutti.comm.world import join_world, leave_world  # noqa: E402


def main() -> None:
    args = parse_arguments()
    if args.units is None:
        TuttiLoop(METHODS["tutti plain"], WORKS[args.work], 0)
        return
    meet()
    wire = Wire(json.loads(args.limits))
    output = Output(args.output)
    work = WORKS[args.work]
    for unit in json.loads(args.units.read_text()):
        output.row({**unit, "begun": True})
        if unit["kind"] == "quality":
            result = trained(
                method_of(unit["method"], unit["plans"]), work, unit["seed"], unit["most"], wire, unit["rate"]
            )
            output.row({**unit, **result})
        else:
            timed(unit, work, wire, output)
    wire.limit("unlimited")
    leave_world()
    os._exit(0)  # a normal exit would wait for the process groups of closed loops


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=list(WORKS), required=True)
    parser.add_argument(
        "--units",
        type=Path,
        help="a JSON list of units; without it, this is a plain script for the planner to describe",
    )
    parser.add_argument("--output", type=Path, help="file that gets a line for each unit")
    parser.add_argument("--limits", default="{}", help="JSON: for each limit, the commands that set it")
    return parser.parse_args()


def meet() -> None:
    """Join the world: one rank a host, one thread a rank."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=os.environ["NODE_RANK"],
        WORLD_SIZE=os.environ["NNODES"],
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        GLOO_SOCKET_IFNAME="eth0",
        TUTTI_RENDEZVOUS=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
    )
    join_world()


# Training to a quality


def trained(method: Method, work: Work, seed: int, most: int, wire: Wire, rate: str) -> dict[str, Any]:
    """Train until the held-out loss reaches the target.

    Returns:
        {"steps": their number, None if `most` were not enough, "train_s": seconds without evaluations,
        "last_loss": .., "looks": [[steps, held-out loss, accuracy], ..]}.
    """
    wire.limit("unlimited")
    loop = loop_of(method, work, seed)
    wire.limit(rate)
    looks: list[list[float]] = []
    taken, steps = 0.0, None
    for step in range(min(work.first or work.every, most), most + 1, work.every):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(work.every if looks else step):
            loss = loop.step()
        taken += time.perf_counter() - start
        looks.append([step, *loop.quality()])
        if looks[-1][1] <= work.target:
            steps = step
            break
    if steps == work.first:
        raise SystemExit(
            f"pays: {method.name} meets its target at the first evaluation (step {steps}); lower Work.first"
        )
    loop.close()
    del loop
    gc.collect()
    return {"steps": steps, "train_s": slowest(taken), "last_loss": loss, "looks": looks}


# Step times


def timed(unit: dict[str, Any], work: Work, wire: Wire, output: Output) -> None:
    """Time the steps of all methods in turns at each of the unit's limits. All methods warm up at an unlimited link.

    Writes a row for each limit, as `in_turns` returns it.
    """
    wire.limit("unlimited")
    loops: dict[str, Loop] = {}
    methods: dict[str, Method] = {}
    for name in unit["methods"]:
        output.row({"kind": "time", "trying": name})
        methods[name] = method_of(name, unit["plans"])
        loops[name] = loop_of(methods[name], work, 0)
        for _ in range(methods[name].begins + warm_steps(methods[name].period, methods[name].delay)):
            loops[name].step()
    for rate in unit["rates"]:
        wire.limit(rate)
        here = {name: loop for name, loop in loops.items() if rate in unit["plans"].get(name, unit)["rates"]}
        steps = {name: loop.step for name, loop in here.items()}
        periods = {name: methods[name].period for name in here}
        result = in_turns(steps, periods, unit, lambda name: output.row({"kind": "time", "trying": name}))
        output.row({"kind": "time", "rate": rate, **result})
    for loop in loops.values():
        loop.close()


if __name__ == "__main__":
    main()
