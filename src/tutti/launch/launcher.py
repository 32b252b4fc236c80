"""The one interface of all launchers: a LaunchSpec goes in, a Handle on the started ranks comes out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from tutti.errors import LaunchError

ErrorKind = Literal["user", "run", "exception", "peer", "killed"]
"""user, run: an error tutti raised on purpose (exit code 2, 1); exception: any other in user code; peer: a
collective failed because another rank was gone, so not the cause; killed: ended by a signal that the launcher
did not send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """Why one rank failed: what it writes to error.json in its folder. `time_s` is Unix time."""

    rank: int
    host: str
    time_s: float
    kind: ErrorKind
    exit_code: int
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What to start on this node, and where it stands in the whole world of ranks.

    `target`: a script's path, or a module's dotted name when `is_module`. `folder`: the run folder, absolute.
    `ranks_per_node`: how many ranks each node has; the sum is the world size. `rendezvous`: "host:port" on
    node 0, needed with more than one node. `timeout_s`: how long ranks wait for each other. `threads`: per
    rank. `environment`: added to that of every rank.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    folder: Path
    ranks_per_node: tuple[int, ...] = (1,)
    node_rank: int = 0
    rendezvous: str | None = None
    timeout_s: float = 600.0
    threads: int = 1
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ranks_per_node or min(self.ranks_per_node) < 1:
            raise LaunchError(f"ranks per node = {list(self.ranks_per_node)}; give each node 1 rank or more")
        if not 0 <= self.node_rank < self.nodes:
            raise LaunchError(
                f"node rank {self.node_rank} of {self.nodes} nodes; node ranks run from 0 to {self.nodes - 1}"
            )
        if self.nodes > 1 and self.rendezvous is None:
            raise LaunchError(
                f"{self.nodes} nodes have no place to meet; add --rendezvous HOST:PORT with the host of node 0"
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
        """The rank of this node's local rank 0."""
        return sum(self.ranks_per_node[: self.node_rank])

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.first_rank, self.first_rank + self.local_world_size)


class Handle(Protocol):
    """Ranks that have been started."""

    def wait(self, timeout_s: float) -> dict[int, int]:
        """Exit codes by rank of those ended so far (-N: by signal N); returns once another ends, or in time."""
        ...

    def stop(self, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """End all ranks and what they started: asked first, by force after `grace_s` seconds or on `hurry`.

        A second call does nothing.
        """
        ...


class Launcher(Protocol):
    """Starts the ranks of one node."""

    def start(self, spec: LaunchSpec) -> Handle:
        """Start the ranks and return at once. Raises LaunchError when they cannot be started."""
        ...
