"""Commands that run on the nodes of a cluster while one waits for them: `tutti doctor` and `tutti probe` with --on."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.clusters.cluster_job import NodeCommand, NodeCommands, NodeRuns
from tutti.clusters.cluster_resources import HeterogeneousJobs
from tutti.clusters.profile_file import read_profile, with_requests
from tutti.clusters.schedulers import ALIASES, scheduler_for
from tutti.errors import LaunchError

SENT = "tutti-sends "
"""Begins the line in which a node sends a value, after the node's name if there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesResult:
    """How a command on nodes has ended.

    Attributes:
        code: its exit code.
        nodes: names of the nodes; none where the scheduler does not tell.
        sent: what a node has sent; empty for nothing.
    """

    code: int
    nodes: tuple[str, ...] = ()
    sent: str = ""


def cluster_settings(on: str, requests: Sequence[str], hosts: str | None) -> Mapping[str, Any]:
    """Return the settings of a scheduler: those of tutti.toml, with what the command line says.

    Args:
        on: its name.
        requests: texts such as "partition=gpu".
        hosts: the hosts of ssh.

    Raises:
        LaunchError: a text is no setting, or hosts are named for another scheduler.
    """
    if hosts is not None and on not in ("ssh", "mpi"):
        raise LaunchError(f"--hosts is for --on ssh or mpi, and --on is {on}; leave it out, or add --on ssh")
    found = with_requests(getattr(read_profile(Path.cwd()), on, {}), requests)
    return found | ({} if hosts is None else {"hosts": hosts})


def run_on_nodes(
    command: NodeCommand, *, on: str, requests: Sequence[str], hosts: str | None = None, tasks_per_node: int | None = 1
) -> NodesResult:
    """Let a cluster run a command of `tutti` on nodes, show what it prints, and return how it has ended.

    Args:
        command: what is to run.
        on: the scheduler's name.
        requests: settings, such as "partition=gpu".
        hosts: the hosts of ssh.
        tasks_per_node: how often it is started on each node, where the scheduler numbers the ranks; None for as many
            ranks as the settings name.

    Raises:
        LaunchError: there is no such scheduler, it cannot do that, or it refuses.
    """
    on = ALIASES.get(on, on)
    scheduler = scheduler_for(on)
    settings = cluster_settings(on, requests, hosts)
    if isinstance(scheduler, NodeCommands):
        count = len(scheduler.nodes(settings, command.nodes)) or command.nodes or 1  # named ones, or as many as asked
        words = scheduler.command_on_nodes(command.words, count, tasks_per_node, settings)
        return NodesResult(code=_waited_for(words))
    if not isinstance(scheduler, NodeRuns):
        raise LaunchError(
            f"--on {on}: that does not let `tutti {command.words[0]}` run on its nodes; start it there by hand"
        )
    sent = [""]

    def show(line: str) -> None:
        text = line.partition(SENT)[2]
        if text:
            sent[0] = text
        else:
            print(line, flush=True)

    code, nodes = scheduler.run_on_nodes(command, settings, show)
    return NodesResult(code=code, nodes=nodes, sent=sent[0])


def names_ranks(on: str, requests: Sequence[str]) -> bool:
    """Return whether the settings of a job with nodes of several kinds name the ranks of each node."""
    scheduler = scheduler_for(ALIASES.get(on, on))
    if not isinstance(scheduler, HeterogeneousJobs):
        return False
    settings = cluster_settings(on, requests, None)
    return bool(scheduler.kinds(settings)) and None not in scheduler.nodes(settings, None)


def sends_to(on: str) -> bool:
    """Return whether nodes of a scheduler send results back, as they share no disk with this machine."""
    return not isinstance(scheduler_for(on), NodeCommands)


def _waited_for(words: Sequence[str]) -> int:
    with subprocess.Popen(words) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the command has got it, too, and ends what it has started
                continue
