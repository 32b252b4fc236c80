"""What a cluster has: pools of nodes from which a job may get some, as its scheduler tells of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A node, as the scheduler tells of it.

    Attributes:
        cores: that a job may get.
        memory_nbytes: that a job may get; None where the scheduler does not know.
        gpus: number of its GPUs that a job may get.
        gpu: what the cluster calls their kind; empty where it has no name for them.
        idle: whether nothing runs on it now; None where that is not known.
    """

    name: str
    cores: int
    memory_nbytes: int | None
    gpus: int = 0
    gpu: str = ""
    idle: bool | None = True

    @property
    def kind(self) -> tuple[int, int | None, int, str]:
        """What equal nodes have in common."""
        return self.cores, self.memory_nbytes, self.gpus, self.gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """Nodes from which one job may get some, such as a partition of Slurm.

    Attributes:
        name: of the pool; empty where the cluster has only one.
        nodes: that can be used, now or when other jobs have ended.
        absent: why other nodes of it cannot be used, by name.
        closed: why no job can be started there; empty if one can.
        most_nodes: that one job may get; None for all.
        time_limit_s: of a job; None for no limit.
        request: the setting that chooses this pool, such as "partition=gpu"; empty if none is needed.
        whole: a job is to get all of these nodes, as they were named one by one.
        probed: what nodes have measured of themselves, as files of a ClusterSpec, by name.
        notes: what else is to be known.
    """

    name: str
    nodes: tuple[ClusterNode, ...]
    absent: Mapping[str, str] = field(default_factory=dict)
    closed: str = ""
    most_nodes: int | None = None
    time_limit_s: float | None = None
    request: str = ""
    whole: bool = False
    probed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequest:
    """Nodes that a job of several kinds of nodes asks for, as one of its parts.

    Attributes:
        name: how messages call it, such as "component 2".
        count: number of nodes.
        ranks: on each of them; None for one on each GPU.
        pool: from which it gets them; its nodes are those that serve it.
    """

    name: str
    count: int
    ranks: int | None
    pool: NodePool


@runtime_checkable
class HeterogeneousJobs(Protocol):
    """A scheduler whose settings may ask for nodes of several kinds in one job, as heterogeneous jobs of Slurm do."""

    def kinds(self, settings: Mapping[str, Any]) -> int:
        """Return how many different requests for nodes a job has; 0 if all of its nodes are asked for as one.

        Args:
            settings: the scheduler's own.

        Raises:
            LaunchError: a setting does not exist.
        """
        ...

    def requests(self, settings: Mapping[str, Any]) -> tuple[NodeRequest, ...]:
        """Return the requests of a job in the order of its nodes; none if all of its nodes are asked for as one.

        Args:
            settings: the scheduler's own.

        Raises:
            LaunchError: a setting does not exist, or the scheduler does not answer.
        """
        ...


@runtime_checkable
class NodeInventory(Protocol):
    """A scheduler that tells what its cluster has, as `tutti plan --on NAME` needs."""

    def pools(self, settings: Mapping[str, Any]) -> tuple[NodePool, ...]:
        """Return the pools that a job with these settings may use.

        Args:
            settings: the scheduler's own.

        Raises:
            LaunchError: a setting does not exist, or the scheduler does not answer.
        """
        ...
