"""What each rank of the plan benchmark runs: the plans of a list, one after another, and times their steps.

Without --plans it is a plain script, which the planner describes.
"""

import argparse
import atexit
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import tutti  # noqa: E402
from tutti.errors import TuttiError  # noqa: E402
from tutti.runtime.world import join, leave  # noqa: E402
from tutti.spec import codec  # noqa: E402
from tutti.spec.plan import Plan  # noqa: E402
from workloads import WORKLOADS  # noqa: E402


def main() -> None:
    args = parse_arguments()
    if args.plans is None:
        next(steps(args.workload, args.batch))
        return
    join()  # where `tutti run` looks for it: only then other hosts start their ranks
    dist.barrier()
    leave()
    host, _, port = os.environ["TUTTI_RENDEZVOUS"].removeprefix("tcp://").rpartition(":")
    own = Path(os.environ["TUTTI_RUN_FOLDER"])
    for number, data in json.loads(args.plans.read_text()):
        # A world for each plan, which meets elsewhere: what one leaves behind cannot touch the next.
        os.environ["TUTTI_RENDEZVOUS"] = f"tcp://{host}:{int(port) + 1 + number}"
        os.environ["TUTTI_RUN_FOLDER"] = str(own / f"plan-{number}")
        plan = codec.from_data(Plan, data)
        os.environ["TUTTI_PLAN"] = str(codec.save(plan, own / f"plan-{number}-of-{os.environ['RANK']}.json"))
        if os.environ["RANK"] == "0":
            write(args.output, {"plan": number, "begun": True})
        found = timed(args)
        if os.environ["RANK"] == "0":
            write(args.output, {"plan": number, **found})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--batch", type=int, required=True, help="the global batch")
    parser.add_argument("--plans", type=Path, help="a JSON list of (number, plan)")
    parser.add_argument("--output", type=Path, help="gets a line for each plan")
    parser.add_argument("--steps", type=int, default=3, help="timed at most")
    parser.add_argument("--seconds", type=float, default=2, help="of timed steps, unless one takes longer")
    return parser.parse_args()


def steps(name: str, batch: int) -> Iterator[tutti.Job]:
    """The three lines; yields after each step."""
    workload = WORKLOADS[name]
    job = tutti.Job(global_batch_size=batch, seed=0, keep_checkpoints=0)
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, _, loader = job.prepare(model, optimizer, workload.data(16 * batch), workload.loss)
    yield job
    for _ in job.epochs(1_000_000):
        for one in loader:
            job.step(one)
            yield job


def timed(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of some steps by the plan in the environment, or why tutti refuses it. Leaves its world."""
    loop = steps(args.workload, args.batch)
    start = time.perf_counter()
    try:
        job = next(loop)
    except TuttiError as error:
        leave()
        return {"refused": str(error)}
    found: dict[str, Any] = {"prepare_s": time.perf_counter() - start}
    warm = [agreed_s(loop)]
    if warm[0] < args.seconds / 4:
        warm.append(agreed_s(loop))
    count = max(2 if warm[-1] < args.seconds else 1, min(args.steps, int(args.seconds / warm[-1])))
    times = []
    for _ in range(count):
        start = time.perf_counter()
        next(loop)
        times.append(time.perf_counter() - start)
    found |= {"warmup_s": warm, "step_s": times}
    loop.close()
    end(job)
    return found


def agreed_s(loop: Iterator[tutti.Job]) -> float:
    """Seconds of a step on the slowest rank: all take the same decisions by it."""
    start = time.perf_counter()
    next(loop)
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def end(job: tutti.Job) -> None:
    """Leave the world now and keep nothing of the run: many follow in this process."""
    ending = job._ending
    assert ending is not None
    ending.close()
    atexit.unregister(ending.close)
    ending.run = job._prepared = None
    gc.collect()


def write(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
