"""Totals of a model by the degrees that divide it, looked up row by row. Bounds and estimates are made of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from tutti.config.cluster import ClusterSpec, LinkSpec, LinkTier, NodeSpec
from tutti.config.model import ModelSpec, ModuleSpec
from tutti.config.plan import LayoutRule
from tutti.config.vocabulary import Precision
from tutti.cost_model import compute_cost
from tutti.cost_model.group_links import RankGroup, Span
from tutti.cost_model.microbatch_cost import at_least, each_of
from tutti.cost_model.plan_table import Array
from tutti.cost_model.rank_placement import HostGroup, Link, least_all_reduce, place_ranks, seated_link
from tutti.cost_model.work_division import divided_linears
from tutti.cost_model.worker_speed import Curve, Efficiency, WeightPassTime, Worker, best_of, worker_at
from tutti.errors import PlanError

_TIERS: tuple[LinkTier, ...] = ("node", "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What is known of the devices on which a number of ranks runs.

    Attributes:
        best: index of a worker that is at least as good as every rank's in each respect. Its links are known too,
            so other kinds of hosts make another one.
        speed: upper bound of the ranks' mean speed, relative to the best worker.
        memory_nbytes: memory of the largest rank.
        least_nbytes: memory of the smallest rank.
        hosts: number of hosts.
        speeds: (ranks, relative speed of each), in order of ranks.
    """

    best: int
    speed: float
    memory_nbytes: float
    least_nbytes: float
    hosts: int
    speeds: tuple[tuple[int, float], ...]


class BestCase:
    """Totals of one model on one cluster in one precision, with the script's `layout`. All are per sample unless
    noted.
    """

    def __init__(
        self, model: ModelSpec, cluster: ClusterSpec, precision: Precision, layout: tuple[LayoutRule, ...] = ()
    ) -> None:
        self.model, self.cluster, self.precision = model, cluster, precision
        self.half = precision in ("bfloat16", "float16")
        self._table = compute_cost.op_table(model)
        self._bests: dict[object, int] = {}
        self._workers: list[Worker] = []
        self._wires: list[dict[LinkTier, LinkSpec | None]] = []
        self._worlds: dict[int, Ground] = {}
        self._linear = divided_linears(model, layout).tolist()
        self._owners = {module.tied_to for module in model.modules if module.tied_to is not None}
        self.width = 0.5 if self.half else 1.0
        each = [ranks_of_node(cluster, node) for node in cluster.nodes]
        self.per_node, self.unequal, self.mixed = max(each), len(set(each)) > 1, is_mixed(cluster)
        kinds = {cluster.devices[node.device].kind for node in cluster.nodes}
        joined = all(cluster.link_at(node, tier) is not None for node in cluster.nodes for tier in _TIERS)
        self.aligned = not self.unequal and kinds == {"cuda"} and joined

    def ground(self, world: int) -> Ground:
        """What is known of the devices of `world` ranks. Raises PlanError where the cluster has too few devices."""
        if world not in self._worlds:
            host_groups = place_ranks(self.cluster, world)
            self._worlds[world] = self._of_host_groups(host_groups)
        return self._worlds[world]

    def _of_host_groups(self, host_groups: tuple[HostGroup, ...]) -> Ground:
        key = tuple(
            (host_group.device.name, host_group.node.name, host_group.sharing, host_group.threads, host_group.ranks)
            for host_group in host_groups
        )
        alike = tuple(dict.fromkeys(part[:4] for part in key))
        workers = [worker_at(host_group, self.model.dtype, self.precision) for host_group in _first(host_groups)]
        if alike not in self._bests:
            self._bests[alike] = len(self._workers)
            self._workers.append(_best(workers))
            self._wires.append({tier: seated_link(self.cluster, host_groups, tier) for tier in _TIERS})
        best = self._workers[self._bests[alike]]
        of = {kind: min(1.0, _relative(worker, best)) for kind, worker in zip(alike, workers, strict=True)}
        ranks = sum(host_group.ranks for host_group in host_groups)
        memory = [host_group.memory_nbytes for host_group in host_groups]
        return Ground(
            best=self._bests[alike],
            speed=sum(of[part[:4]] * part[4] for part in key) / ranks,
            memory_nbytes=max(memory),
            least_nbytes=min(memory),
            hosts=sum(host_group.hosts for host_group in host_groups),
            speeds=tuple((part[4], of[part[:4]]) for part in key),
        )

    def facts(self, world: int) -> tuple[float, float, float]:
        """(index of the best worker, mean speed, hosts) of `world` ranks."""
        ground = self.ground(world)
        return float(ground.best), ground.speed, float(ground.hosts)

    def relative_speed(self, world: int, stage: int, inner: int, split: int, microbatches: int) -> tuple[float]:
        """Upper bound of the mean speed of pipeline replicas, relative to the best worker that never waits.

        A pipeline replica has `stage` places of `inner` times `split` ranks each. Unequal ranks along split may have
        parts in proportion to their speeds. `microbatches` is 0 where nothing is known of the work before.
        """
        speeds = np.concatenate([np.full(count, speed) for count, speed in self.ground(world).speeds])
        grid = speeds.reshape(stage, -1, inner, split)
        places = (grid.mean(axis=3) if uneven(self, world, split)[0] else grid.min(axis=3)).min(axis=2)
        return (paced(places, microbatches) if microbatches else float(places.mean()),)

    def worker(self, best: int) -> Worker:
        """The best worker with this index."""
        return self._workers[best]

    def seconds(self, samples: int, best: int) -> tuple[float, float]:
        """(forward, backward) seconds of one microbatch of `samples` samples on an undivided model.

        Weights and calls are not counted, because they are fewer where the model is divided.
        """
        own = self._workers[best]
        worker = replace(own, call_s=0.0, convolutions=own.convolutions.rising, images=own.images.rising)
        passes, count = (compute_cost.forward, compute_cost.backward), len(self.model.modules)
        ahead, back = (at_least(one, self._table, worker, samples, count, weights=False) for one in passes)
        return float(ahead.seconds.sum()), float(back.seconds.sum())

    def ring(self, best: int, degree: int, inside: int) -> Callable[[Array], Array]:
        """A function from bytes to the least seconds of an all-reduce over an axis with `inside` ranks in the axes
        within it.
        """
        if degree == 1:
            return np.zeros_like
        near = self.per_node % (degree * inside) == 0
        if inside == 1 and degree % self.per_node == 0 and self.aligned and not near:
            return self._across(best, degree)
        latency, bandwidth = self.link(best, "node") if near else (0.0, self.fastest(best)[1])
        return lambda nbytes: least_all_reduce(latency, bandwidth, nbytes, degree)

    def _across(self, best: int, degree: int) -> Callable[[Array], Array]:
        """The same for groups that do not share their hosts, as the prediction computes it."""
        span = Span(ranks=degree, hosts=degree // self.per_node, per_host=self.per_node, sharing_groups=1, leaving=1)
        both = (self.link(best, tier) for tier in _TIERS)
        node, network = (Link(latency_s=latency, bandwidth_bytes_per_s=bandwidth) for latency, bandwidth in both)
        group = RankGroup(span=span, node=node if self.per_node > 1 else None, network=network, chooses=True)
        return lambda nbytes: each_of(group.all_reduce, nbytes)

    def exchange(self, best: int, degree: int, inside: int) -> Callable[[Array], Array]:
        """A function from bytes to the least seconds of an all-to-all of so many bytes from every rank of an axis."""
        if degree == 1:
            return np.zeros_like
        if self.per_node % (degree * inside) == 0:
            return lambda nbytes: (degree - 1) / degree * nbytes / self.link(best, "node")[1]
        if self.per_node % inside or self.unequal:
            return np.zeros_like
        here = self.per_node // inside
        return lambda nbytes: max(0, degree - here) / degree * nbytes * self.per_node / self.link(best, "network")[1]

    def link(self, best: int, tier: LinkTier) -> tuple[float, float]:
        """(latency, bandwidth) of a tier for the ranks with this best worker. Without such a link: no latency, and the
        best bandwidth of any link.
        """
        found = self._wires[best][tier]
        if found is not None:
            return found.latency_s, found.bandwidth_bytes_per_s
        return 0.0, max((link.bandwidth_bytes_per_s for link in self.cluster.every_link), default=1e9)

    def fastest(self, best: int) -> tuple[float, float]:
        """(latency, bandwidth) that none of these ranks' links exceeds."""
        latency = min((link.latency_s for link in self.cluster.every_link), default=0.0)
        return latency, max(self.link(best, tier)[1] for tier in _TIERS)

    def across_hosts(self, best: int) -> tuple[float, float]:
        """(latency, bandwidth) of a rank's messages where all ranks of its host send to another host."""
        latency, bandwidth = self.link(best, "network")
        return latency, bandwidth / self.per_node

    def links_of(self, best: int) -> tuple[float, float, float, float]:
        """(bandwidth within hosts, between them, latency of a message between hosts, the least latency of any link)."""
        between, network = self.link(best, "network")
        return self.link(best, "node")[1], network, between, self.fastest(best)[0]

    def state(self, split: int, expert: int, table: int) -> tuple[float, float, float, float]:
        """Whole bytes of (parameters, gradients, optimizer state) for one rank of these axes, and of the parameters
        outside of blocks or tied.
        """
        totals = [0.0] * 4
        for module, linear in zip(self.model.modules, self._linear, strict=True):
            if module.parameter_nbytes:
                over = table if module.table or (linear and split == 1) else 1
                part = 1.0 / (split_of(module, split) * (expert if module.expert else 1) * over)
                totals[0] += part * module.parameter_nbytes
                totals[1] += part * module.gradient_nbytes
                totals[2] += part * module.optimizer_nbytes
                totals[3] += part * module.parameter_nbytes if module.block < 0 or module.name in self._owners else 0.0
        return totals[0], totals[1], totals[2], totals[3]


def paced(speeds: ArrayLike, microbatches: int) -> float:
    """The mean over pipeline replicas of work per second, relative to places of speed 1 that never wait, for any cut
    of the work. `speeds`: (places, replicas).

    With t_q the seconds of place q in a microbatch, a step lasts at least m t_p and all t_q before p, for every p
    (see ModelWork.step). So it lasts at least the sum of these with weights l_p that add up to 1. Choose m l_q as
    place q's speed less all l_p after q: then t_q counts with at least its speed, before the weights are scaled.
    The sum is then the work over the weights.
    """
    places = np.asarray(speeds, dtype=np.float64)
    weights = np.zeros(places.shape[1])
    for speed in places[::-1]:
        weights = weights + np.maximum(0.0, speed - weights) / microbatches
    return float(weights.mean()) * microbatches / len(places)


def uneven(best_case: BestCase, world: int, split: int) -> tuple[float]:
    """1 where places along split have ranks of unequal speed or memory, and so may get unequal parts, else 0."""
    if split == 1 or not best_case.mixed:
        return (0.0,)
    kinds = [
        (
            host_group.device.name,
            host_group.node.memory_nbytes,
            host_group.ranks_per_host,
            host_group.sharing,
            host_group.threads,
        )
        for host_group in place_ranks(best_case.cluster, world)
        for _ in range(host_group.ranks)
    ]
    return (float(len({frozenset(kinds[at::split]) for at in range(split)}) > 1),)


def is_mixed(cluster: ClusterSpec) -> bool:
    """Whether ranks may differ in speed or memory."""
    return len({(node.device, node.devices_per_node, node.memory_nbytes) for node in cluster.nodes}) > 1


def ranks_of_node(cluster: ClusterSpec, node: NodeSpec) -> int:
    """The number of ranks that one host takes without two ranks sharing a core."""
    device = cluster.devices[node.device]
    return node.devices_per_node * (max(1, device.cores) if device.kind == "cpu" else 1)


def split_of(module: ModuleSpec, degree: int) -> int:
    """The largest number of parts into which a module is divided over `degree` split ranks."""
    if not module.split:
        return 1
    return degree if module.split_limit == 0 else min(degree, module.split_limit)


def _first(host_groups: tuple[HostGroup, ...]) -> list[HostGroup]:
    found: dict[object, HostGroup] = {}
    for host_group in host_groups:
        found.setdefault(
            (host_group.device.name, host_group.node.name, host_group.sharing, host_group.threads), host_group
        )
    return list(found.values())


def _best(workers: list[Worker]) -> Worker:
    """A worker whose every rate is the best of any: no work takes it longer than any of them.

    Its matrix rate never falls with size, so a part of some work never takes less than its part of the time.
    """
    if not workers:
        raise PlanError("a plan has 1 rank or more")
    flops = np.unique(np.concatenate([worker.matrix.flops for worker in workers]))
    seconds = np.min([worker.matrix.time(flops) - worker.matrix.ramp_s for worker in workers], axis=0)
    rate = np.maximum.accumulate(flops / seconds)
    curve = Curve(flops=flops, seconds=flops / rate, ramp_s=min(worker.matrix.ramp_s for worker in workers))
    return replace(
        workers[0],
        matrix=curve,
        weights=_quickest([worker.weights for worker in workers]),
        convolution_weights=_quickest([worker.convolution_weights for worker in workers]),
        vector_rate=max(worker.vector_rate for worker in workers),
        bandwidth_bytes_per_s=max(worker.bandwidth_bytes_per_s for worker in workers),
        efficiency=_most([worker.efficiency for worker in workers]),
        convolutions=best_of([worker.convolutions for worker in workers]),
        images=best_of([worker.images for worker in workers]),
        kernel_overhead_s=min(worker.kernel_overhead_s for worker in workers),
        call_s=min(worker.call_s for worker in workers),
        slowdown=min(worker.slowdown for worker in workers),
        half=all(worker.half for worker in workers),
    )


def _most(some: list[Efficiency]) -> Efficiency:
    forward, backward = (
        np.max([getattr(one, strategy) for one in some], axis=0) for strategy in ("forward", "backward")
    )
    return Efficiency(forward=forward, backward=backward)


def _quickest(times: list[WeightPassTime]) -> WeightPassTime:
    return WeightPassTime(
        forward_s=min(pass_time.forward_s for pass_time in times),
        backward_s=min(pass_time.backward_s for pass_time in times),
    )


def _relative(worker: Worker, best: Worker) -> float:
    """The speed of a worker relative to the best one, in the respect in which it compares best."""
    at = best.matrix.flops
    ratios = [
        float(np.max(best.matrix.time(at) / np.maximum(worker.matrix.time(at), 1e-300))),
        worker.vector_rate / best.vector_rate,
        worker.bandwidth_bytes_per_s / best.bandwidth_bytes_per_s,
    ]
    if worker.call_s > 0:
        ratios.append(best.call_s / worker.call_s)
    if worker.matrix.ramp_s > 0:
        ratios.append(best.matrix.ramp_s / worker.matrix.ramp_s)
    for own, quickest in (
        (worker.weights, best.weights),
        (worker.convolution_weights, best.convolution_weights),
    ):
        if own.forward_s > 0:
            ratios.append(quickest.forward_s / own.forward_s)
        if own.backward_s > 0:
            ratios.append(quickest.backward_s / own.backward_s)
    return max(ratios) * best.slowdown / worker.slowdown
