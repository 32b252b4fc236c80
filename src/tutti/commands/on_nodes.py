"""Commands that run on the nodes of a cluster while one waits for them: `tutti doctor` and `tutti probe` with --on."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tutti.clusters.cluster_job import NodeCommands
from tutti.clusters.profile_file import read_profile, with_requests
from tutti.clusters.schedulers import scheduler_for
from tutti.errors import LaunchError


def run_on_nodes(words: Sequence[str], *, on: str, nodes: int, tasks_per_node: int, requests: Sequence[str]) -> int:
    """Let a cluster's scheduler run `tutti WORDS` on nodes, show what it prints, and return its exit code.

    Args:
        words: arguments of `tutti`.
        on: the scheduler's name.
        nodes: number of nodes.
        tasks_per_node: how often it is started on each.
        requests: settings, such as "partition=gpu".

    Raises:
        LaunchError: there is no such scheduler, it cannot do that, or it refuses.
    """
    scheduler = scheduler_for(on)
    if not isinstance(scheduler, NodeCommands):
        raise LaunchError(f"--on {on}: only slurm lets `tutti {words[0]}` run on its nodes; start it there by hand")
    settings = with_requests(getattr(read_profile(Path.cwd()), on, {}), requests)
    command = scheduler.command_on_nodes(words, nodes, tasks_per_node, settings)
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the command has got it, too, and ends what it has started
                continue
