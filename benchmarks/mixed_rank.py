"""What each rank of the benchmark of unequal hosts runs: `probe`, or `steps` of plan_rank.py; on a slower processor
where its rank is among those of --slow, in less memory where it is that of --cap."""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SLOWER = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Read by MKL and oneDNN when a process computes its first product and convolution."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", default="", help="ranks with the slower processor")
    parser.add_argument("--cap", default="", help="RANK:NBYTES, memory that its processes may hold")
    parser.add_argument("what", choices=("probe", "steps"))
    args, words = parser.parse_known_args()
    if os.environ["RANK"] in args.slow.split(","):
        os.environ.update(SLOWER)
    rank, _, nbytes = args.cap.partition(":")
    if rank == os.environ["RANK"]:
        enter(int(nbytes))
    if args.what == "probe":
        from tutti.cli.main import main as command

        sys.argv = ["tutti", "probe", *words]
        command()
    else:
        sys.path.insert(0, str(Path(__file__).parent))
        import plan_rank

        sys.argv = ["plan_rank.py", *words]
        plan_rank.main()


def enter(nbytes: int) -> None:
    """Put this process and what it starts into a control group that holds so much memory; the kernel ends what would
    hold more. A host of a lab does not see them in its own /sys: they are mounted, for this process alone."""
    first = ":memory:" in Path("/proc/self/cgroup").read_text()  # version 1 of control groups has one a resource
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
