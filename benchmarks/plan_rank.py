"""What each rank of the plan benchmark runs: the plans of a list, one after another, each in its own process.

These processes are forked from one that has imported everything and has used no device and no network. So every
plan starts from the same state, has its own peak of memory, and can fail without ending the others. Without --plans
this is a plain script for the planner to describe.
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
from tutti.trainer.metrics import read_rows  # noqa: E402
from workloads import WORKLOADS  # noqa: E402


def main() -> None:
    args = parse_arguments()
    if args.plans is None:
        for _ in islice(steps(args.workload, args.batch), 1 + args.steps):
            pass  # the planner needs no step, but `tutti verify` does
        return
    rank = int(os.environ["RANK"])
    in_child(meet, args.limit)  # at the launcher's address: only then do other hosts start their ranks
    host, _, port = os.environ["TUTTI_RENDEZVOUS"].removeprefix("tcp://").rpartition(":")
    run_folder = Path(os.environ["TUTTI_RUN_FOLDER"])
    gc.collect()
    gc.freeze()
    for number, (name, data) in enumerate(json.loads(args.plans.read_text())):
        # Each plan has its own process group at its own address, so that no plan affects the next one.
        os.environ["TUTTI_RENDEZVOUS"] = f"tcp://{host}:{int(port) + 1 + number}"
        os.environ["TUTTI_RUN_FOLDER"] = str(run_folder / f"plan-{number}")
        plan = serialization.from_data(Plan, data)
        os.environ["TUTTI_PLAN"] = str(serialization.save(plan, run_folder / f"plan-{number}-of-{rank}.json"))
        lost = in_child(lambda: write(args.output, {"name": name, "rank": rank, **timed(args)}), args.limit)  # noqa: B023
        if lost:
            write(args.output, {"name": name, "rank": rank, **lost})
        wait_for_all(run_folder / f"plan-{number}-ended", rank, args.limit)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--batch", type=int, required=True, help="the global batch")
    parser.add_argument("--plans", type=Path, help="JSON file with a list of (name, plan)")
    parser.add_argument("--output", type=Path, help="file that gets a line for each plan and rank")
    parser.add_argument("--steps", type=int, default=3, help="steps to be timed, at most")
    parser.add_argument("--seconds", type=float, default=2, help="time for the timed steps, unless one takes longer")
    parser.add_argument(
        "--patience", type=float, default=6, help="a first step that takes more seconds is not repeated"
    )
    parser.add_argument("--again", type=float, default=8, help="seconds for repeating disturbed steps")
    parser.add_argument(
        "--pace", type=float, default=0, help="FLOP/s of a product in the probe; 0: any speed is accepted"
    )
    parser.add_argument("--limit", type=float, default=90, help="seconds after which a plan is given up")
    return parser.parse_args()


# Processes


def in_child(work: Callable[[], None], limit_s: float) -> dict[str, Any]:
    """Run `work` in a forked process.

    Returns:
        {} if it ended normally, else {"failed": why, "peer": whether only another rank's failure is known}.
    """
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
            failure = {"failed": f"{type(error).__name__}: {error}"[-1000:], "peer": is_peer_error(error)}
            os.write(writing, json.dumps(failure).encode())
        sys.stderr.flush()
        os._exit(0)  # skip exit functions, which belong to the parent
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        ended = os.pidfd_open(pid)
        if not select.select([ended], [], [], limit_s)[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(ended)
        _, status = os.waitpid(pid, 0)
        failure = pipe.read()
    if failure:
        return dict(json.loads(failure))
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        return {"failed": f"took longer than {limit_s:g} s, or was killed", "peer": True}
    return {"failed": f"its process ended with {code}", "peer": False} if code else {}


def wait_for_all(folder: Path, rank: int, limit_s: float) -> None:
    """Wait until every rank has finished a plan, so that no rank of the next plan waits for one that is still in
    this plan.
    """
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
    """Run tutti's three lines; yields after each step."""
    workload = WORKLOADS[name]
    job = tutti.Job(global_batch_size=batch, seed=0, keep_checkpoints=0)
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, _, loader = job.prepare(model, optimizer, workload.data(16 * batch), workload.loss)
    yield job
    for _ in job.epochs(1_000_000):
        for samples in loader:
            job.step(samples)
            yield job


def timed(args: argparse.Namespace) -> dict[str, Any]:
    """Time some steps of the plan in the environment, or return why tutti refuses it. Leaves the plan's world.

    If the first step takes longer than `patience`, it is the only measurement: one-time work is small beside it.
    Steps are disturbed if the machine's cores were given to others, or were not as fast as when they were probed.
    They are repeated as long as there is time; after that, the least disturbed steps count. `cpu_s` is the CPU
    time of a step over all threads of this rank, on which other work on the machine has the least effect.
    """
    loop = steps(args.workload, args.batch)
    start = time.perf_counter()
    try:
        job = next(loop)
    except TuttiError as error:
        leave_world()
        return {"refused": str(error)}
    result: dict[str, Any] = {"prepare_s": time.perf_counter() - start}
    taken = take(loop, args)
    loop.close()
    ending = job._finalizer
    assert ending is not None
    ending.close()
    counted = [step for step in taken if step.counts]
    return result | {
        "warmup_s": [step.wall_s for step in taken if step.warm],
        "step_s": [step.wall_s for step in counted],
        "cpu_s": statistics.mean(step.cpu_s for step in counted),
        "stolen": max(step.stolen for step in counted),
        "pace": [step.pace for step in counted],
        "set_aside": sum(not step.warm and not step.counts for step in taken),
        **recorded([number for number, step in enumerate(taken) if step.counts]),
    }


WARM_STEPS, MOST_WARM, SETTLED = 4, 8, 0.1
"""Before steps count, at least WARM_STEPS and at most MOST_WARM are made, until two in a row differ by less than
SETTLED. The first three to six took up to twice as long as later ones, because memory is touched for the first time and
connections fill their buffers."""


@dataclass(slots=True, eq=False)
class Step:
    """One step.

    Attributes:
        wall_s: seconds by the clock on the slowest rank.
        cpu_s: seconds of this rank's processors.
        stolen: part of the machine's core time that was stolen meanwhile, on the rank where it was largest.
        pace: FLOP/s of a product before and after the step, the lowest of all ranks.
        warm: it is one of the steps for warming up.
        counts: it is one of the measurements.
    """

    wall_s: float
    cpu_s: float
    stolen: float
    pace: float
    warm: bool = False
    counts: bool = True


def take(loop: Iterator[tutti.Job], args: argparse.Namespace) -> list[Step]:
    """Make all steps: those that warm up, those that count, and disturbed ones. All ranks decide alike."""
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
    """Return whether steps take as long as those before."""
    if len(taken) < WARM_STEPS:
        return False
    before, last = (step.wall_s for step in taken[-2:])
    return len(taken) >= MOST_WARM or abs(last / before - 1) < SETTLED


PACE_N, AS_PROBED = 512, 0.12
"""Size of the product that measures the machine's speed, and how far its rate may be from the probe's. Virtual machines
change their speed for seconds without a sign: one product ran at 126 and at 80 GFLOP/s."""


def disturbance(step: Step, probed: float) -> float:
    """Return how far cores were given to others, or ran at another speed than `probed`; a step is accepted up to 1."""
    pace_off = abs(step.pace / probed - 1) / AS_PROBED if probed > 0 else 0.0
    return max(step.stolen / MOST_STOLEN, pace_off)


def one_step(loop: Iterator[tutti.Job]) -> Step:
    before = pace()
    dist.barrier()  # else a rank with a faster product would start its step earlier and wait in it
    stolen, busy, start = StolenTime(), time.process_time(), time.perf_counter()
    next(loop)
    wall, busy, share = time.perf_counter() - start, time.process_time() - busy, stolen.share()
    dist.barrier()  # another rank on this core may still be computing its step
    agreed = torch.tensor([wall, share, -min(before, pace())], dtype=torch.float64)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return Step(wall_s=agreed[0].item(), cpu_s=busy, stolen=agreed[1].item(), pace=-agreed[2].item())


def pace() -> float:
    """Return FLOP/s of the faster of two products of square float32 matrices of size `PACE_N`.

    Only one rank of each core computes. The others wait, and return infinity.
    """
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
    """Return what the run recorded for this rank's steps in `counted`: median seconds of phases, median bytes sent,
    and peak memory.
    """
    file = RunFolder(Path(os.environ["TUTTI_RUN_FOLDER"])).rank(int(os.environ["RANK"])) / "metrics.jsonl"
    rows = read_rows(file)
    timings = [row for row in rows if row["kind"] == "step"]
    timings = [timings[number] for number in counted]
    phases = {name: statistics.median(row["phases"][name] for row in timings) for name in timings[0]["phases"]}
    return {
        "phases": phases,
        "sent_nbytes": statistics.median(row["sent_nbytes"] for row in timings),
        "peak_nbytes": next(row["peak_nbytes"] for row in rows if row["kind"] == "memory"),
    }


def write(path: Path, row: dict[str, Any]) -> None:
    """Append one complete line; several ranks write to the file."""
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(row) + "\n").encode())


if __name__ == "__main__":
    main()
