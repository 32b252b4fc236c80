"""What a batch job starts on each of its nodes: `tutti run`, with this node's number and where the nodes meet."""

import os
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from tutti.config.count_range import CountRange, node_counts
from tutti.config.run_folder import RunFolder, last_rows
from tutti.environment import in_slurm_job, read_rank_environment, slurm_restarts
from tutti.errors import RESUMABLE, LaunchError


def node_command(nodes: int | CountRange, folder: str, resume: str, words: Sequence[str]) -> list[str]:
    """Return the arguments of `tutti run` on this node.

    Args:
        nodes: number of nodes that the job has, or may have.
        folder: the run folder.
        resume: what the job's first start continues from; empty if it begins.
        words: the arguments that are the same on all nodes.

    Raises:
        LaunchError: Slurm's variables contradict each other, or do not come through a container.
    """
    place = read_rank_environment()  # srun starts one task on each node
    least, most = (nodes.least, nodes.most) if isinstance(nodes, CountRange) else (nodes, nodes)
    if not in_slurm_job() or not least <= place.world_size <= most:
        raise LaunchError(
            f"the command on {socket.gethostname()} does not get Slurm's variables, which say which of {nodes} nodes "
            "it is; let `container` pass SLURM_* on (apptainer does without --cleanenv, enroot with --env)"
        )
    restarted = slurm_restarts() > 0
    found = ["run", "--on", "local", "--folder", folder]
    if restarted or resume:
        found += ["--resume", folder if restarted else resume]
    if place.world_size > 1:
        address = place.rendezvous.removeprefix("tcp://")
        count = f"{least}:{place.world_size}" if isinstance(nodes, CountRange) else str(place.world_size)
        found += ["--nnodes", count, "--node-rank", str(place.rank), "--rendezvous", address]
        found += ["--one-screen"]
    return [*found, *words]


def enter(directory: str, folder: str) -> None:
    """Go to the directory of the command, where a container may have led elsewhere.

    Raises:
        LaunchError: the node, or the container, does not see it or the run folder.
    """
    for path in (directory, folder):
        if not os.path.isdir(path):
            raise LaunchError(
                f"{socket.gethostname()} does not see {path} of the machine that submitted the run; use a disk that "
                "all nodes share, and let `container` bind it (apptainer: --bind PATH)"
            )
    os.chdir(directory)


def ended(folder: Path, before: int, code: int) -> int:
    """Return the exit code of a run that has gone on without nodes, as its metrics have it.

    Args:
        folder: the run folder.
        before: size of its metrics in bytes before the step.
        code: that of the step, which has failed for a node that was lost.
    """
    rows = last_rows(RunFolder(folder).metrics, before)
    ends = (row for row in reversed(rows) if row.get("kind") in ("start", "end"))
    status = next((row.get("status") for row in ends), None)  # none if it began last
    if status == "completed":
        return 0
    return RESUMABLE if status == "stopped" and RunFolder(folder).checkpoint_times() else code


def main() -> None:
    """Do what `tutti run` does, in this process, which has loaded a part of it already.

    The arguments are directory, number of nodes, run folder, what to resume, and its own. With --ended, a run folder,
    the size of its metrics before, and an exit code: end as the run did.
    """
    if sys.argv[1] == "--ended":
        sys.exit(ended(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
    directory, nodes, folder, resume, *words = sys.argv[1:]
    try:
        enter(directory, folder)
        sys.argv[1:] = node_command(node_counts(nodes) or 1, folder, resume, words)
    except LaunchError as error:
        print(f"tutti: {error}", file=sys.stderr)
        sys.exit(2)
    runpy.run_module("tutti.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
