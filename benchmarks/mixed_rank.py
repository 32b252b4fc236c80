"""What each rank of `mixed` runs: `probe`, or `steps` of plan_rank.py.

Ranks named by --slow have a slower processor; the rank named by --cap has less memory. Hosts of a lab may be two
threads of one core. Each is then faster while the other waits, which is true of no two machines, and plans that
keep one waiting would look better than they are. So a filler process, which the kernel runs only while nothing else
needs the host's core, keeps it busy.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SLOWER = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""MKL and oneDNN read these when a process computes its first product and convolution."""

FILLER = """
import os, torch
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
torch.set_num_threads(1)
one = torch.randn(1536, 1536)
while os.getppid() == {parent}:
    one @ one
"""
"""Multiplies matrices larger than the caches near a core, as training does, until the rank has ended."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", default="", help="ranks with the slower processor")
    parser.add_argument("--cap", default="", help="RANK:NBYTES, a rank and the memory that its processes may hold")
    parser.add_argument("what", choices=("probe", "steps"))
    args, words = parser.parse_known_args()
    if os.environ["RANK"] in args.slow.split(","):
        os.environ.update(SLOWER)
    rank, _, nbytes = args.cap.partition(":")
    if rank == os.environ["RANK"]:
        enter(int(nbytes))
    with filled(bool(args.slow)):
        work(args.what, words)


def work(what: str, words: list[str]) -> None:
    """Do what the rank is to do."""
    if what == "probe":
        from tutti.cli.main import main as command

        sys.argv = ["tutti", "probe", *words]
        command()
    else:
        sys.path.insert(0, str(Path(__file__).parent))
        import plan_rank

        sys.argv = ["plan_rank.py", *words]
        plan_rank.main()


@contextlib.contextmanager
def filled(wanted: bool) -> Iterator[None]:
    """Keep the host's core busy inside the block, also while the rank waits."""
    if not wanted:
        yield
        return
    filler = subprocess.Popen([sys.executable, "-c", FILLER.format(parent=os.getpid())])
    try:
        yield
    finally:
        filler.kill()
        filler.wait()


def enter(nbytes: int) -> None:
    """Put this process and its children into a control group with this much memory; the kernel ends processes that
    need more.

    A host of a lab does not see control groups in its own /sys, so they are mounted for this process only.
    """
    first = ":memory:" in Path("/proc/self/cgroup").read_text()  # version 1 has a hierarchy for each resource
    mounted = tempfile.mkdtemp()
    kind = ["-t", "cgroup", "-o", "memory"] if first else ["-t", "cgroup2"]
    subprocess.run(["mount", *kind, "tutti", mounted], check=True)
    group = Path(mounted) / f"tutti-mixed-{os.getpid()}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(nbytes))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def leave_groups() -> None:
    """Remove the groups of ranks that have ended."""
    for group in [*Path("/sys/fs/cgroup/memory").glob("tutti-mixed-*"), *Path("/sys/fs/cgroup").glob("tutti-mixed-*")]:
        group.rmdir()


if __name__ == "__main__":
    main()
