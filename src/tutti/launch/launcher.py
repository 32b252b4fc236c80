"""The interface of all launchers: `Launcher.start` takes a LaunchSpec and returns a Handle on the started ranks."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from tutti.errors import LaunchError

ErrorKind = Literal["user", "run", "exception", "peer", "killed"]
"""The kind of a rank's failure.

user, run: an error that tutti raised on purpose (exit codes 2 and 1). exception: any other exception in user code.
peer: a collective failed because another rank was gone, so this rank is not the cause. killed: ended by a signal that
the launcher did not send, or without a record.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """Why one rank failed, as it writes it to error.json in its folder.

    Attributes:
        time_s: Unix time of the failure.
        traceback: the user's frames; empty if there are none.
        error: name of the exception's class; empty if there was none.
    """

    rank: int
    host: str
    time_s: float
    kind: ErrorKind
    exit_code: int
    message: str
    traceback: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The ranks to start on this node, and its place among all nodes.

    Attributes:
        target: a script's path, or a module's dotted name if `is_module`.
        folder: the run folder, absolute.
        ranks_per_node: number of ranks of each node; the sum is the world size.
        rendezvous: "host:port" on node 0, needed with more than one node.
        timeout_s: seconds that ranks wait for each other.
        adaptive_timeout: whether ranks that do nothing end earlier, as the user stated no time-out.
        threads: threads per rank.
        environment: variables added to those of every rank.
        secret: proves that a process is a rank of this job; only where all nodes are started from here. Not shown.

    Raises:
        LaunchError: the numbers of nodes and ranks contradict each other, or several nodes have no rendezvous.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    folder: Path
    ranks_per_node: tuple[int, ...] = (1,)
    node_rank: int = 0
    rendezvous: str | None = None
    timeout_s: float = 600.0
    adaptive_timeout: bool = False
    threads: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    secret: str = field(default_factory=lambda: secrets.token_bytes(32).hex(), repr=False)

    def __post_init__(self) -> None:
        if not self.ranks_per_node or min(self.ranks_per_node) < 1:
            raise LaunchError(f"ranks per node = {list(self.ranks_per_node)}; give each node 1 rank or more")
        if not 0 <= self.node_rank < self.nodes:
            raise LaunchError(f"node rank {self.node_rank} does not exist; node ranks run from 0 to {self.nodes - 1}")
        if self.nodes > 1 and self.rendezvous is None:
            raise LaunchError(
                f"{self.nodes} nodes need a rendezvous; add --rendezvous HOST:PORT with the host of node 0"
            )

    @property
    def nodes(self) -> int:
        return len(self.ranks_per_node)

    @property
    def world_size(self) -> int:
        return sum(self.ranks_per_node)

    @property
    def local_world_size(self) -> int:
        return self.ranks_per_node[self.node_rank]

    @property
    def first_rank(self) -> int:
        """The global rank of this node's local rank 0."""
        return sum(self.ranks_per_node[: self.node_rank])

    @property
    def ranks(self) -> range:
        """The global ranks of this node."""
        return range(self.first_rank, self.first_rank + self.local_world_size)


class Handle(Protocol):
    """Ranks that have been started."""

    def wait(self, timeout_s: float) -> dict[int, int]:
        """Wait until a rank ends that no earlier call has returned, or for `timeout_s` seconds.

        Returns:
            Exit codes by rank of all ranks that have ended so far; -N for a rank ended by signal N.
        """
        ...

    def stop(self, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """End all ranks and everything they started. A second call does nothing.

        Args:
            grace_s: seconds that ranks have to end by themselves, before they are killed.
            hurry: asked while waiting; true (the user pressed Ctrl-C again) ends the grace.
        """
        ...


@runtime_checkable
class Explaining(Protocol):
    """A handle that may know why a rank ended without a record."""

    def explain(self, rank: int) -> str | None:
        """Return the cause of this rank's end in words, or None if the launcher knows none."""
        ...


class Launcher(Protocol):
    """Starts the ranks that one `tutti run` is responsible for; with `--nnodes`, those of the node it runs on.

    What a launcher provides, also one whose ranks do not share a host (pods, jobs of a cluster):

    - Each rank runs `rank_main.rank_command(spec)`, or forks `rank_main.main`, under the variables of
      `launch_environment.of_node` and `of_rank`. So its output and its failure are recorded where the supervisor looks.
      The command begins with this process' interpreter, and `spec.threads` is chosen for this machine's cores: replace
      both where ranks run on others.
    - The run folder `spec.folder` is the same folder for every rank and for the process that called `start`: the
      supervisor reads each rank's stdout.log, stderr.log and error.json there.
    - `of_node` lets the ranks of a single node meet in a file and over loopback. Ranks that share no host need
      TUTTI_RENDEZVOUS = tcp://HOST:PORT, with the host of rank 0, and their own LOCAL_RANK, LOCAL_WORLD_SIZE and
      NODE_RANK; leave GLOO_SOCKET_IFNAME out.
    - TUTTI_SECRET, which `of_node` sets, reaches the ranks where others cannot read it: not on a command line.
    - The handle tells the exit codes of ranks, and `stop` ends ranks with everything that they started.
    """

    def start(self, spec: LaunchSpec) -> Handle:
        """Start the ranks and return at once.

        Raises:
            LaunchError: the ranks cannot be started.
        """
        ...
