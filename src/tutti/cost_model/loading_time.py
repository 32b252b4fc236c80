"""Loading of a step's samples: loaders and storage work beside the rest of the step, or before it.

A rank that loads its own samples does so between steps; worker processes load whole batches ahead. The time
between two batches is that of the busiest resource, as in a closed queueing network (Denning and Buzen 1978,
"The operational analysis of queueing network models", asymptotic bounds). The resources are a rank's own
loaders, its host's storage, storage that all hosts share, and the cores, on which workers and CPU ranks compute.
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
        loaders_s: seconds of the rank's loaders.
        storage_s: seconds of the storage.
        cores_s: seconds that the host's workers take from all of its cores.
        held: fraction of these cores that ranks compute with.
        ahead: workers load while the previous step is computed.
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
        """Return the seconds of loading that the rest of a step does not hide.

        Args:
            rest_s: seconds of the rest of the step.
            idle_s: seconds of it in which the rank computes nothing.
        """
        if not self.ahead:
            return self.batch_s
        beside = self.cores_s + self.held * (rest_s - idle_s) if self.cores_s > 0 else 0.0
        return max(0.0, self.batch_s - rest_s, beside - rest_s)


def most(loads: Iterable[BatchLoad]) -> BatchLoad:
    """Return the slowest loading of several ranks that wait for each other."""
    waited = list(loads)
    return BatchLoad(
        loaders_s=max(load.loaders_s for load in waited),
        storage_s=max(load.storage_s for load in waited),
        cores_s=max(load.cores_s for load in waited),
        held=max(load.held for load in waited),
        ahead=any(load.ahead for load in waited),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """How the ranks of one host group load samples.

    Attributes:
        loader_s: seconds of one loader for one sample of a rank.
        host_s: seconds of the host's storage for one sample of each of its ranks.
        shared_s: seconds of shared storage in a step, for all hosts.
        cores_s: seconds of all cores of the host for one sample of each of its ranks.
        held: fraction of the host's cores that ranks compute with.
        workers: loader processes of each rank; 0: the rank loads.
        whole: samples of a step where every rank reads all of them; 0: each rank reads its own.
    """

    loader_s: float = 0.0
    host_s: float = 0.0
    shared_s: float = 0.0
    cores_s: float = 0.0
    held: float = 0.0
    workers: int = 0
    whole: int = 0

    def load(self, samples: int) -> BatchLoad:
        """Return the loading of a rank with `samples` samples of a step."""
        read = self.whole or samples
        return BatchLoad(
            loaders_s=read * self.loader_s / max(1, self.workers),
            storage_s=max(read * self.host_s, self.shared_s),
            cores_s=read * self.cores_s,
            held=self.held,
            ahead=self.workers > 0,
        )


def feeds(
    model: ModelSpec, cluster: ClusterSpec, plan: Plan, host_groups: tuple[HostGroup, ...], samples: int
) -> tuple[Feed, ...]:
    """Return how the ranks of each host group load a global batch of `samples`.

    Loading is free where the cost of a sample is unknown.
    """
    loading = model.loading
    if loading is None:
        return (Feed(),) * len(host_groups)
    by_host, fullest = _sets(plan, host_groups, loading), dict[tuple[NodeSpec, int], int]()
    kinds = [(replace(host_group.node, name="", count=1), host_group.ranks_per_host) for host_group in host_groups]
    for kind, sets in zip(kinds, by_host, strict=True):  # equal hosts are one kind, even in different host groups
        fullest[kind] = max(fullest.get(kind, 0), int(sets.max()))
    part = 1 / plan.degree("space") if loading.parts else 1.0
    read = float(sum(sets.sum() for sets in by_host)) * part
    per_rank = samples if loading.stream else samples / plan.data_parallel_degree
    return tuple(
        _feed(loading, _stored(model, host_group), cluster, host_group, part, fullest[kind], read * per_rank, samples)
        for host_group, kind in zip(host_groups, kinds, strict=True)
    )


def loader_s(loading: Loading, *, oversubscription: float = 1.0, storage_s: float = 0.0) -> float:
    """Return the seconds in which one loader loads a sample.

    Args:
        loading: the cost of a sample.
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
    """Return the loading of one host group.

    Args:
        stored: bytes of a sample that come from storage.
        part: fraction of a sample that a rank loads.
        sets: the largest number of different samples that the ranks of one host read at the same time.
        read: samples that all hosts read in a step.
        samples: samples of a global batch.
    """
    shared = cluster.shared_read_bytes_per_s
    disk = None if shared is not None else host_group.node.disk_read_bytes_per_s  # data is in only one of them
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
    """Return the cores of a host; 0 where they are unknown."""
    if host_group.device.kind == "cpu":
        return max(1, host_group.device.cores) * host_group.node.devices_per_node
    return host_group.node.cores


def _stored(model: ModelSpec, host_group: HostGroup) -> float:
    """Return the bytes of a sample that are read from storage in every epoch; 0 where all data stays in memory."""
    assert model.loading is not None
    whole = model.loading.stored_nbytes * (model.dataset_samples or 0)
    kept = 0 < whole <= cost_constants.FILES_IN_MEMORY * host_group.node.memory_nbytes
    return 0.0 if kept else model.loading.stored_nbytes


def _sets(plan: Plan, host_groups: tuple[HostGroup, ...], loading: Loading) -> list[NDArray[np.intp]]:
    """Return for each host group, (hosts,): the number of different samples, or parts of samples, that a host's
    ranks read at the same time.
    """
    if loading.stream:
        return [np.ones(host_group.hosts, dtype=np.intp) for host_group in host_groups]
    own_batches = [axis in DATA_AXES or (loading.parts and axis == "space") for axis in plan.mesh]
    degrees = [
        degree if own_samples else 1 for degree, own_samples in zip(plan.mesh.values(), own_batches, strict=True)
    ]
    samples = np.arange(prod(degrees)).reshape(degrees)
    of_ranks = np.broadcast_to(samples, list(plan.mesh.values())).reshape(-1)
    by_host, first = [], 0
    for host_group in host_groups:
        here = np.sort(of_ranks[first : first + host_group.ranks].reshape(host_group.hosts, -1), axis=1)
        by_host.append(1 + (here[:, 1:] != here[:, :-1]).sum(axis=1))
        first += host_group.ranks
    return by_host


def loading_words(loading: Loading) -> str:
    """Describe the cost of loading a sample, and who loads it."""
    costs = [f"{seconds(loading.core_s)} of a core"]
    costs += [f"{seconds(loading.wait_s)} of waiting"] if loading.wait_s > 0 else []
    costs += [f"{nbytes(loading.stored_nbytes)} of storage"] if loading.stored_nbytes >= 0.5 else []
    ahead = f"{count(loading.workers, 'worker')} of each rank load ahead"
    how = ahead if loading.workers else "ranks load between steps"
    return f"a sample takes {', '.join(costs)} ({loading.evidence}); {how}"


def storage_known(cluster: ClusterSpec, host_groups: tuple[HostGroup, ...]) -> bool:
    """Return whether the read rate of every host in use is known."""
    known = all(host_group.node.disk_read_bytes_per_s is not None for host_group in host_groups)
    return known or cluster.shared_read_bytes_per_s is not None


def data_note(
    cluster: ClusterSpec, model: ModelSpec, host_groups: tuple[HostGroup, ...], load: BatchLoad, data_s: float
) -> str:
    """Describe the wait for data, or that it is unknown."""
    loading = model.loading
    if loading is None:
        return (
            "the cost of loading samples is unknown and not predicted, and neither is the script's own work between "
            "steps"
        )
    note = f"data: {loading_words(loading)}, a batch every {seconds(load.batch_s)}"
    note += f", for which a step waits {seconds(data_s)}" if data_s > 0 else ", behind the rest of the step"
    if loading.stored_nbytes >= 0.5:
        if not any(_stored(model, host_group) for host_group in host_groups):
            note += "; assumed: all data will stay in memory after the first epoch"
        elif not storage_known(cluster, host_groups):
            note += "; the read rate of storage is unknown and not counted"
    return note + "; the script's own work between steps is not predicted"
