"""What a batch job starts on each of its nodes: `tutti run`, with this node's number and where the nodes meet."""

import runpy
import sys
from collections.abc import Sequence

from tutti.environment import read_rank_environment, slurm_restarts


def node_command(folder: str, resume: str, words: Sequence[str]) -> list[str]:
    """Return the arguments of `tutti run` on this node.

    Args:
        folder: the run folder.
        resume: what the job's first start continues from; empty if it begins.
        words: the arguments that are the same on all nodes.

    Raises:
        LaunchError: Slurm's variables contradict each other.
    """
    place = read_rank_environment()  # srun starts one task on each node
    restarted = slurm_restarts() > 0
    found = ["run", "--on", "local", "--folder", folder]
    if restarted or resume:
        found += ["--resume", folder if restarted else resume]
    if place.world_size > 1:
        address = place.rendezvous.removeprefix("tcp://")
        found += ["--nnodes", str(place.world_size), "--node-rank", str(place.rank), "--rendezvous", address]
        found += ["--one-screen"]
    return [*found, *words]


def main() -> None:
    """Do what `tutti run` does, in this process, which has loaded a part of it already.

    The arguments are the run folder, what to resume, and those of `tutti run`.
    """
    sys.argv[1:] = node_command(sys.argv[1], sys.argv[2], sys.argv[3:])
    runpy.run_module("tutti.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
