"""Loading a step's samples: loaders and storage as one more stage, beside or before the rest of the step.

A rank that loads its own samples does so between steps; worker processes load whole batches ahead. The time between two
batches is that of the busiest resource, as in a closed queueing network (Denning and Buzen 1978, "The operational
analysis of queueing network models", asymptotic bounds): a rank's own loaders, its host's storage, storage that all
hosts share, and the cores, on which workers and CPU ranks compute.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

import tutti.cost_model.cost_constants as cost_constants
from tutti.config.cluster import ClusterSpec, NodeSpec
from tutti.config.model import Loading, ModelSpec
from tutti.config.plan import Plan
from tutti.config.vocabulary import DATA_AXES
from tutti.cost_model.cost_notes import count, nbytes, seconds
from tutti.cost_model.rank_placement import HostGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """The loading of a rank's batch, in seconds from one batch to the next.

    Attributes:
        loaders_s: of its own loaders.
        cores_s: that all cores of the host take for its workers.
        held: the fraction of these cores that ranks compute with.
        ahead: workers load while the step before is computed.
    """

    loaders_s: float = 0.0
    storage_s: float = 0.0
    cores_s: float = 0.0
    held: float = 0.0
    ahead: bool = False

    @property
    def batch_s(self) -> float:
        """Seconds from one batch to the next where ranks do nothing else."""
        return max(self.loaders_s, self.storage_s)

    @property
    def free(self) -> bool:
        """Whether loading has no known cost."""
        return not (self.batch_s > 0 or self.cores_s > 0)

    def exposed_s(self, rest_s: float, idle_s: float) -> float:
        """The seconds that the rest of a step does not hide.

        Args:
            rest_s: seconds of the rest of the step.
            idle_s: seconds of it in which the rank computes nothing.
        """
        if not self.ahead:
            return self.batch_s
        beside = self.cores_s + self.held * (rest_s - idle_s) if self.cores_s > 0 else 0.0
        return max(0.0, self.batch_s - rest_s, beside - rest_s)


def most(loads: Iterable[BatchLoad]) -> BatchLoad:
    """The slowest loading of several ranks that wait for each other."""
    some = list(loads)
    return BatchLoad(
        loaders_s=max(one.loaders_s for one in some),
        storage_s=max(one.storage_s for one in some),
        cores_s=max(one.cores_s for one in some),
        held=max(one.held for one in some),
        ahead=any(one.ahead for one in some),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """How ranks of one host group load.

    Attributes:
        loader_s: seconds of one loader for a rank's sample.
        host_s: of its host's storage for a sample of each rank there.
        cores_s: of all cores of its host for all workers there.
        shared_s: of shared storage for all hosts, a step.
        whole: samples that every rank reads; 0: it reads its own.
    """

    loader_s: float = 0.0
    host_s: float = 0.0
    shared_s: float = 0.0
    cores_s: float = 0.0
    held: float = 0.0
    workers: int = 0
    whole: int = 0

    def load(self, samples: int) -> BatchLoad:
        """The loading of a rank with that many samples of a step."""
        own = self.whole or samples
        return BatchLoad(
            loaders_s=own * self.loader_s / max(1, self.workers),
            storage_s=max(own * self.host_s, self.shared_s),
            cores_s=own * self.cores_s,
            held=self.held,
            ahead=self.workers > 0,
        )


def feeds(
    model: ModelSpec, cluster: ClusterSpec, plan: Plan, host_groups: tuple[HostGroup, ...], samples: int
) -> tuple[Feed, ...]:
    """How ranks of each host group load a global batch of `samples`; free where the cost of a sample is unknown."""
    loading = model.loading
    if loading is None:
        return (Feed(),) * len(host_groups)
    by_host, fullest = _sets(plan, host_groups, loading), dict[tuple[NodeSpec, int], int]()
    kinds = [(replace(host_group.node, name="", count=1), host_group.ranks_per_host) for host_group in host_groups]
    for kind, sets in zip(kinds, by_host, strict=True):  # equal hosts are one kind, however they are listed
        fullest[kind] = max(fullest.get(kind, 0), int(sets.max()))
    part = 1 / plan.degree("space") if loading.parts else 1.0
    read = float(sum(sets.sum() for sets in by_host)) * part
    each = samples if loading.stream else samples / plan.data_parallel_degree
    return tuple(
        _feed(loading, _stored(model, host_group), cluster, host_group, part, fullest[kind], read * each, samples)
        for host_group, kind in zip(host_groups, kinds, strict=True)
    )


def loader_s(loading: Loading, *, oversubscription: float = 1.0, storage_s: float = 0.0) -> float:
    """Seconds in which one loader brings a sample in.

    Args:
        loading: what a sample costs.
        oversubscription: factor by which a core takes longer, because ranks share it.
        storage_s: seconds of reading the sample from storage.
    """
    return oversubscription * loading.core_s + loading.wait_s + storage_s


def _feed(
    loading: Loading,
    stored: float,
    cluster: ClusterSpec,
    host_group: HostGroup,
    part: float,
    sets: int,
    read: float,
    samples: int,
) -> Feed:
    """The loading of one host group.

    Args:
        stored: bytes of a sample that come from storage.
        sets: the most different samples that ranks of one of its hosts read at the same time.
        read: samples that all hosts read in a step.
    """
    shared = cluster.shared_read_bytes_per_s
    disk = None if shared is not None else host_group.node.disk_read_bytes_per_s  # the data lies in one of both
    rate = shared or disk or float("inf")
    cores, ranks = host_cores(host_group), host_group.ranks_per_host
    oversubscription = max(1.0, ranks / cores) if cores and not loading.workers else 1.0
    held = min(1.0, ranks * host_group.threads / cores) if cores else 0.0
    return Feed(
        loader_s=part * loader_s(loading, oversubscription=oversubscription, storage_s=stored / rate),
        host_s=part * sets * stored / disk if disk is not None else 0.0,
        shared_s=read * stored / shared if shared is not None else 0.0,
        cores_s=part * ranks * loading.core_s / cores if cores and loading.workers else 0.0,
        held=held,
        workers=loading.workers,
        whole=samples if loading.stream else 0,
    )


def host_cores(host_group: HostGroup) -> int:
    """Cores of a host; 0 where they are unknown."""
    if host_group.device.kind == "cpu":
        return max(1, host_group.device.cores) * host_group.node.devices_per_node
    return host_group.node.cores


def _stored(model: ModelSpec, host_group: HostGroup) -> float:
    """Bytes of a sample that are read from storage in every epoch; 0 where all of the data stays in memory."""
    assert model.loading is not None
    whole = model.loading.stored_nbytes * (model.dataset_samples or 0)
    kept = 0 < whole <= cost_constants.FILES_IN_MEMORY * host_group.node.memory_nbytes
    return 0.0 if kept else model.loading.stored_nbytes


def _sets(plan: Plan, host_groups: tuple[HostGroup, ...], loading: Loading) -> list[NDArray[np.intp]]:
    """For each host group, (hosts,): different samples, or parts of them, that a host's ranks read at the same time."""
    if loading.stream:
        return [np.ones(host_group.hosts, dtype=np.intp) for host_group in host_groups]
    own_batches = [axis in DATA_AXES or (loading.parts and axis == "space") for axis in plan.mesh]
    degrees = [degree if one else 1 for degree, one in zip(plan.mesh.values(), own_batches, strict=True)]
    samples = np.arange(prod(degrees)).reshape(degrees)
    of_ranks = np.broadcast_to(samples, list(plan.mesh.values())).reshape(-1)
    found, first = [], 0
    for host_group in host_groups:
        here = np.sort(of_ranks[first : first + host_group.ranks].reshape(host_group.hosts, -1), axis=1)
        found.append(1 + (here[:, 1:] != here[:, :-1]).sum(axis=1))
        first += host_group.ranks
    return found


def loading_words(loading: Loading) -> str:
    """What a sample costs, and who loads it."""
    costs = [f"{seconds(loading.core_s)} of a core"]
    costs += [f"{seconds(loading.wait_s)} of waiting"] if loading.wait_s > 0 else []
    costs += [f"{nbytes(loading.stored_nbytes)} of storage"] if loading.stored_nbytes >= 0.5 else []
    ahead = f"{count(loading.workers, 'worker')} of each rank load ahead"
    how = ahead if loading.workers else "ranks load between steps"
    return f"a sample takes {', '.join(costs)} ({loading.evidence}); {how}"


def storage_known(cluster: ClusterSpec, host_groups: tuple[HostGroup, ...]) -> bool:
    """Whether the read rate of every host in use is known."""
    known = all(host_group.node.disk_read_bytes_per_s is not None for host_group in host_groups)
    return known or cluster.shared_read_bytes_per_s is not None


def data_note(
    cluster: ClusterSpec, model: ModelSpec, host_groups: tuple[HostGroup, ...], load: BatchLoad, data_s: float
) -> str:
    """The parts of the wait for data, or that it is unknown."""
    loading = model.loading
    if loading is None:
        return "what samples cost to load is not known and not predicted, nor is the script's own work between steps"
    said = f"data: {loading_words(loading)}, a batch every {seconds(load.batch_s)}"
    said += f", for which a step waits {seconds(data_s)}" if data_s > 0 else ", behind the rest of the step"
    if loading.stored_nbytes >= 0.5:
        if not any(_stored(model, host_group) for host_group in host_groups):
            said += "; all of it is taken to stay in memory after the first epoch"
        elif not storage_known(cluster, host_groups):
            said += "; how fast storage is read is not known and not counted"
    return said + "; the script's own work between steps is not predicted"
