"""What each rank of the plan benchmark runs: the plans of a list, one after another, each in a process of its own.

A plan's process is forked from one that has imported all and touched no device and no network, so that every plan
begins alike, has its own peak of memory, and can fail without ending the others. Without --plans it is a plain script,
which the planner describes.
"""

import argparse
import gc
import json
import math
import os
import select
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import tutti  # noqa: E402
import tutti.trainer.job  # noqa: E402  # loaded before the fork, or every plan's process would load it
from tutti.comm.world import join_world, leave_world  # noqa: E402
from tutti.config import serialization  # noqa: E402
from tutti.config.plan import Plan  # noqa: E402
from tutti.config.run_folder import RunFolder  # noqa: E402
from tutti.errors import TuttiError  # noqa: E402
from tutti.launch.rank_main import is_peer_error  # noqa: E402
from tutti.machine import StolenTime  # noqa: E402
from tutti.profile.probe.probe_timing import MOST_STOLEN  # noqa: E402
from workloads import WORKLOADS  # noqa: E402


def main() -> None:
    args = parse_arguments()
    if args.plans is None:
        for _ in islice(steps(args.workload, args.batch), 1 + args.steps):
            pass  # the planner needs no step, `tutti verify` some
        return
    rank = int(os.environ["RANK"])
    in_child(meet, args.limit)  # where `tutti run` looks for it: only then other hosts start their ranks
    host, _, port = os.environ["TUTTI_RENDEZVOUS"].removeprefix("tcp://").rpartition(":")
    own = Path(os.environ["TUTTI_RUN_FOLDER"])
    gc.collect()
    gc.freeze()
    for number, (name, data) in enumerate(json.loads(args.plans.read_text())):
        # A world for each plan, which meets elsewhere: what one leaves behind cannot touch the next.
        os.environ["TUTTI_RENDEZVOUS"] = f"tcp://{host}:{int(port) + 1 + number}"
        os.environ["TUTTI_RUN_FOLDER"] = str(own / f"plan-{number}")
        plan = serialization.from_data(Plan, data)
        os.environ["TUTTI_PLAN"] = str(serialization.save(plan, own / f"plan-{number}-of-{rank}.json"))
        lost = in_child(lambda: write(args.output, {"name": name, "rank": rank, **timed(args)}), args.limit)  # noqa: B023
        if lost:
            write(args.output, {"name": name, "rank": rank, **lost})
        wait_for_all(own / f"plan-{number}-ended", rank, args.limit)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--batch", type=int, required=True, help="the global batch")
    parser.add_argument("--plans", type=Path, help="a JSON list of (name, plan)")
    parser.add_argument("--output", type=Path, help="gets a line for each plan and rank")
    parser.add_argument("--steps", type=int, default=3, help="timed at most")
    parser.add_argument("--seconds", type=float, default=2, help="of timed steps, unless one takes longer")
    parser.add_argument("--patience", type=float, default=6, help="seconds of a first step that is repeated")
    parser.add_argument("--again", type=float, default=8, help="seconds for steps in place of disturbed ones")
    parser.add_argument("--pace", type=float, default=0, help="FLOP/s of a product when predictions were made; 0: any")
    parser.add_argument("--limit", type=float, default=90, help="seconds after which a plan is given up")
    return parser.parse_args()


# Processes


def in_child(work: Callable[[], None], limit_s: float) -> dict[str, Any]:
    """Do `work` in a forked process; {} where it came to its end, else {"failed": why, "peer": whether another rank's
    failure is all that is known}."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            work()
        except BaseException as error:
            traceback.print_exc()
            said = {"failed": f"{type(error).__name__}: {error}"[-1000:], "peer": is_peer_error(error)}
            os.write(writing, json.dumps(said).encode())
        sys.stderr.flush()
        os._exit(0)  # exit functions are the parent's
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        ended = os.pidfd_open(pid)
        if not select.select([ended], [], [], limit_s)[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(ended)
        _, status = os.waitpid(pid, 0)
        said = pipe.read()
    if said:
        return dict(json.loads(said))
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        return {"failed": f"took longer than {limit_s:g} s, or was killed", "peer": True}
    return {"failed": f"its process ended with {code}", "peer": False} if code else {}


def wait_for_all(folder: Path, rank: int, limit_s: float) -> None:
    """Wait until every rank is done with a plan: nobody may wait in the next one for a rank that is still in this."""
    folder.mkdir(exist_ok=True)
    (folder / str(rank)).touch()
    deadline = time.monotonic() + 2 * limit_s
    while len(list(folder.iterdir())) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
        time.sleep(0.01)


def meet() -> None:
    join_world()
    dist.barrier()
    leave_world()


# A plan


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
    """Seconds of some steps by the plan in the environment, or why tutti refuses it. Leaves its world. `cpu_s`: of a
    step, all threads of this rank: what other work on the machine lengthens least. A first step that takes longer than
    `patience` is the measurement: what it does once is little beside it. Steps in which the machine's cores were given
    to others, or were not as fast as when they were probed, do not count, as long as there is time for others in their
    place; then those count in which that was least so.
    """
    loop = steps(args.workload, args.batch)
    start = time.perf_counter()
    try:
        job = next(loop)
    except TuttiError as error:
        leave_world()
        return {"refused": str(error)}
    found: dict[str, Any] = {"prepare_s": time.perf_counter() - start}
    taken = take(loop, args)
    loop.close()
    ending = job._finalizer
    assert ending is not None
    ending.close()
    counted = [step for step in taken if step.counts]
    return found | {
        "warmup_s": [step.wall_s for step in taken if step.warm],
        "step_s": [step.wall_s for step in counted],
        "cpu_s": statistics.mean(step.cpu_s for step in counted),
        "stolen": max(step.stolen for step in counted),
        "pace": [step.pace for step in counted],
        "set_aside": sum(not step.warm and not step.counts for step in taken),
        **recorded([number for number, step in enumerate(taken) if step.counts]),
    }


WARM_STEPS, MOST_WARM, SETTLED = 4, 8, 0.1
"""Before steps count: so many, and more until two in a row differ by less than `SETTLED`. The first three to six took
up to twice as long as those after (memory is touched for the first time, connections fill their buffers)."""


@dataclass(slots=True, eq=False)
class Step:
    """Seconds of one step: by the clock on the slowest rank, and of this rank's processors; which part of the machine's
    core time was stolen meanwhile, on the rank that saw most; FLOP/s of a product before and after it, the least of any
    core."""

    wall_s: float
    cpu_s: float
    stolen: float
    pace: float
    warm: bool = False
    counts: bool = True


def take(loop: Iterator[tutti.Job], args: argparse.Namespace) -> list[Step]:
    """All steps: those that warm up, those that count and those that were disturbed. Ranks decide alike."""
    taken = [one_step(loop)]
    if taken[0].wall_s > args.patience and disturbance(taken[0], args.pace) <= 1:
        return taken
    while not settled(taken) and sum(step.wall_s for step in taken) < args.patience:
        taken.append(one_step(loop))
    for step in taken:
        step.warm, step.counts = True, False
    last = taken[-1].wall_s
    count = max(2 if last < args.seconds else 1, min(args.steps, int(args.seconds / last)))
    timed_: list[Step] = []
    while sum(disturbance(step, args.pace) <= 1 for step in timed_) < count:
        timed_.append(one_step(loop))
        if len(timed_) >= count and sum(step.wall_s for step in timed_) > args.again:
            break
    least = sorted(timed_, key=lambda step: max(1.0, disturbance(step, args.pace)))[:count]
    for step in timed_:
        step.counts = step in least
    return taken + timed_


def settled(taken: Sequence[Step]) -> bool:
    """Whether steps last as long as those before."""
    if len(taken) < WARM_STEPS:
        return False
    before, last = (step.wall_s for step in taken[-2:])
    return len(taken) >= MOST_WARM or abs(last / before - 1) < SETTLED


PACE_N, AS_PROBED = 512, 0.12
"""The product by which the machine's pace is told, and how far it may be from the probe's. Virtual machines change
their pace in spells of seconds with no word of it: one product ran at 126 GFLOP/s and at 80."""


def disturbance(step: Step, probed: float) -> float:
    """Of cores that were given to others, or ran at another pace than `probed`; up to 1 it is let pass."""
    pace_off = abs(step.pace / probed - 1) / AS_PROBED if probed > 0 else 0.0
    return max(step.stolen / MOST_STOLEN, pace_off)


def one_step(loop: Iterator[tutti.Job]) -> Step:
    before = pace()
    dist.barrier()  # or a rank whose product took less would begin earlier, and its step would have the difference
    stolen, busy, start = StolenTime(), time.process_time(), time.perf_counter()
    next(loop)
    wall, busy, share = time.perf_counter() - start, time.process_time() - busy, stolen.share()
    dist.barrier()  # a rank whose part ends later may be on this core
    agreed = torch.tensor([wall, share, -min(before, pace())], dtype=torch.float64)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return Step(wall_s=agreed[0].item(), cpu_s=busy, stolen=agreed[1].item(), pace=-agreed[2].item())


def pace() -> float:
    """FLOP/s of the better of two products of `PACE_N` square float32 matrices, while further ranks of this core
    wait; of those, infinite."""
    if int(os.environ["LOCAL_RANK"]) >= len(os.sched_getaffinity(0)):
        return math.inf
    a = torch.ones(PACE_N, PACE_N)
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        torch.mm(a, a)
        taken.append(time.perf_counter() - start)
    return 2 * PACE_N**3 / min(taken)


def recorded(counted: list[int]) -> dict[str, Any]:
    """What the run kept of this rank's steps that are `counted`: medians of the phases' seconds and of bytes sent,
    and the most memory that it held."""
    file = RunFolder(Path(os.environ["TUTTI_RUN_FOLDER"])).rank(int(os.environ["RANK"])) / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    timings = [row for row in rows if row["kind"] == "step"]
    timings = [timings[number] for number in counted]
    phases = {name: statistics.median(row["phases"][name] for row in timings) for name in timings[0]["phases"]}
    return {
        "phases": phases,
        "sent_nbytes": statistics.median(row["sent_nbytes"] for row in timings),
        "peak_nbytes": next(row["peak_nbytes"] for row in rows if row["kind"] == "memory"),
    }


def write(path: Path, row: dict[str, Any]) -> None:
    """Append one line, whole: several ranks write to the file."""
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(row) + "\n").encode())


if __name__ == "__main__":
    main()
