"""The best case of a model on a cluster: the best rates of any device and link, from which bounds are made."""

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
from tutti.cost_model.rank_placement import HostGroup, Link, least_all_reduce, link_of_tier, place_ranks
from tutti.cost_model.work_division import divided_linears
from tutti.cost_model.worker_speed import Curve, Efficiency, WeightPassTime, Worker, best_of, worker_at
from tutti.errors import PlanError

_TIERS: tuple[LinkTier, ...] = ("node", "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The devices on which a number of ranks runs.

    Attributes:
        best: index of a worker that is at least as fast as every rank's in each respect. Its links are known too, so
            other kinds of hosts have another index.
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
    """One model on one cluster in one precision, at the best rates of the cluster. Figures are per sample unless noted.

    Args:
        model: what a sample costs.
        cluster: the devices and links.
        precision: number format of the computation.
        layout: the script's layout rules.
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
        """Return what is known of the devices of `world` ranks.

        Raises:
            PlanError: the cluster has too few devices.
        """
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
        workers = [
            worker_at(host_group, self.model.dtype, self.precision, channels_last=self.model.channels_last)
            for host_group in _first(host_groups)
        ]
        if alike not in self._bests:
            self._bests[alike] = len(self._workers)
            self._workers.append(_best(workers))
            self._wires.append({tier: link_of_tier(self.cluster, host_groups, tier) for tier in _TIERS})
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
        """Return (index of the best worker, mean speed, hosts) of `world` ranks."""
        ground = self.ground(world)
        return float(ground.best), ground.speed, float(ground.hosts)

    def relative_speed(self, world: int, stage: int, inner: int, split: int, microbatches: int) -> tuple[float]:
        """Return an upper bound of the mean speed of pipeline replicas, relative to the best worker that never waits.

        A pipeline replica has `stage` places of `inner` times `split` ranks each. Unequal ranks along split may have
        parts in proportion to their speeds.

        Args:
            world: ranks of the plan.
            stage: places on the stage axis.
            inner: ranks of a place along context and space.
            split: ranks along split.
            microbatches: of a step; 0 where the schedule does not fill and drain whole stages.
        """
        speeds = np.concatenate([np.full(count, speed) for count, speed in self.ground(world).speeds])
        grid = speeds.reshape(stage, -1, inner, split)
        places = (grid.mean(axis=3) if uneven(self, world, split)[0] else grid.min(axis=3)).min(axis=2)
        return (pipeline_speed_bound(places, microbatches) if microbatches else float(places.mean()),)

    def worker(self, best: int) -> Worker:
        """Return the best worker with this index."""
        return self._workers[best]

    def seconds(self, samples: int, best: int) -> tuple[float, float]:
        """Return (forward, backward) seconds of one microbatch of `samples` samples on an undivided model.

        Reading weights and calling operators are not counted, because a divided model has less of both.
        """
        own = self._workers[best]
        worker = replace(own, call_s=0.0, convolutions=own.convolutions.rising, images=own.images.rising)
        passes, count = (compute_cost.forward, compute_cost.backward), len(self.model.modules)
        ahead, back = (at_least(one, self._table, worker, samples, count, weights=False) for one in passes)
        return float(ahead.seconds.sum()), float(back.seconds.sum())

    def ring(self, best: int, degree: int, inside: int) -> Callable[[Array], Array]:
        """Return a function from bytes to the least seconds of an all-reduce along an axis of `degree` ranks.

        `inside` is the number of ranks in the axes within this one.
        """
        if degree == 1:
            return np.zeros_like
        near = self.per_node % (degree * inside) == 0
        if inside == 1 and degree % self.per_node == 0 and self.aligned and not near:
            return self._across(best, degree)
        latency, bandwidth = self.link(best, "node") if near else (0.0, self.fastest(best)[1])
        return lambda nbytes: least_all_reduce(latency, bandwidth, nbytes, degree)

    def _across(self, best: int, degree: int) -> Callable[[Array], Array]:
        """Return the same for groups that share no host, computed as the prediction does."""
        span = Span(ranks=degree, hosts=degree // self.per_node, per_host=self.per_node, sharing_groups=1, leaving=1)
        both = (self.link(best, tier) for tier in _TIERS)
        node, network = (Link(latency_s=latency, bandwidth_bytes_per_s=bandwidth) for latency, bandwidth in both)
        group = RankGroup(span=span, node=node if self.per_node > 1 else None, network=network, chooses=True)
        return lambda nbytes: each_of(group.all_reduce, nbytes)

    def exchange(self, best: int, degree: int, inside: int) -> Callable[[Array], Array]:
        """Return a function from bytes to the least seconds of an all-to-all along an axis.

        Every rank of the axis sends so many bytes.
        """
        if degree == 1:
            return np.zeros_like
        if self.per_node % (degree * inside) == 0:
            return lambda nbytes: (degree - 1) / degree * nbytes / self.link(best, "node")[1]
        if self.per_node % inside or self.unequal:
            return np.zeros_like
        here = self.per_node // inside
        return lambda nbytes: max(0, degree - here) / degree * nbytes * self.per_node / self.link(best, "network")[1]

    def link(self, best: int, tier: LinkTier) -> tuple[float, float]:
        """Return (latency, bandwidth) of a tier for the ranks with this best worker.

        Where the cluster has no such link, the latency is 0 and the bandwidth is the best of any link.
        """
        found = self._wires[best][tier]
        if found is not None:
            return found.latency_s, found.bandwidth_bytes_per_s
        return 0.0, max((link.bandwidth_bytes_per_s for link in self.cluster.every_link), default=1e9)

    def fastest(self, best: int) -> tuple[float, float]:
        """Return the (latency, bandwidth) that none of these ranks' links exceeds."""
        latency = min((link.latency_s for link in self.cluster.every_link), default=0.0)
        return latency, max(self.link(best, tier)[1] for tier in _TIERS)

    def across_hosts(self, best: int) -> tuple[float, float]:
        """Return (latency, bandwidth) of a rank's messages while all ranks of its host send to another host."""
        latency, bandwidth = self.link(best, "network")
        return latency, bandwidth / self.per_node

    def links_of(self, best: int) -> tuple[float, float, float, float]:
        """Return (bandwidth in hosts, bandwidth between hosts, latency between hosts, least latency of any link)."""
        between, network = self.link(best, "network")
        return self.link(best, "node")[1], network, between, self.fastest(best)[0]

    def state(self, split: int, expert: int, table: int) -> tuple[float, float, float, float]:
        """Return a rank's bytes of (parameters, gradients, optimizer state, parameters outside of blocks or tied).

        The rank has all stages; the axes split, expert and table divide the model in the given degrees.
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


def pipeline_speed_bound(speeds: ArrayLike, microbatches: int) -> float:
    """Return an upper bound of the work per second of pipeline replicas, as a mean, for any cut of the work.

    The unit is the work of a place of speed 1 that never waits.

    Let t_q be the seconds of place q in a microbatch. A step lasts at least m t_p plus all t_q before p, for every p
    (see BestCaseWork.step), so it lasts at least any weighted mean of these sums, with weights l_p that add up to 1.
    Choose m l_q as place q's speed less all l_p after q. Then t_q counts with at least its speed before the weights
    are scaled, and the mean is the work divided by the weights.

    Args:
        speeds: (places, replicas), relative speeds.
        microbatches: of a step.
    """
    places = np.asarray(speeds, dtype=np.float64)
    weights = np.zeros(places.shape[1])
    for speed in places[::-1]:
        weights = weights + np.maximum(0.0, speed - weights) / microbatches
    return float(weights.mean()) * microbatches / len(places)


def uneven(best_case: BestCase, world: int, split: int) -> tuple[float]:
    """Return 1 where places along split have ranks of unequal speed or memory, which may get unequal parts, else 0."""
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
    """Return whether ranks of the cluster may differ in speed or memory."""
    return len({(node.device, node.devices_per_node, node.memory_nbytes, node.ranks) for node in cluster.nodes}) > 1


def ranks_of_node(cluster: ClusterSpec, node: NodeSpec) -> int:
    """Return the number of ranks that one host takes without two ranks sharing a core."""
    device = cluster.devices[node.device]
    return node.devices_per_node * (max(1, device.cores) if device.kind == "cpu" else 1)


def split_of(module: ModuleSpec, degree: int) -> int:
    """Return the largest number of parts into which a module is divided over `degree` split ranks."""
    if not module.split:
        return 1
    return degree if module.split_limit == 0 else min(degree, module.split_limit)


def _first(host_groups: tuple[HostGroup, ...]) -> list[HostGroup]:
    """Return the first host group of each kind."""
    found: dict[object, HostGroup] = {}
    for host_group in host_groups:
        found.setdefault(
            (host_group.device.name, host_group.node.name, host_group.sharing, host_group.threads), host_group
        )
    return list(found.values())


def _best(workers: list[Worker]) -> Worker:
    """Return a worker whose every rate is the best of any worker's.

    Its matrix rate never falls with size, so a part of some work never takes less than its fraction of the time.
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
        launch_s=min(worker.launch_s for worker in workers),
        slowdown=min(worker.slowdown for worker in workers),
        half=all(worker.half for worker in workers),
    )


def _most(some: list[Efficiency]) -> Efficiency:
    """Return the best efficiency of each kind of operator."""
    forward, backward = (
        np.max([getattr(one, strategy) for one in some], axis=0) for strategy in ("forward", "backward")
    )
    return Efficiency(forward=forward, backward=backward)


def _quickest(times: list[WeightPassTime]) -> WeightPassTime:
    """Return the least seconds of a pass over the weights."""
    return WeightPassTime(
        forward_s=min(pass_time.forward_s for pass_time in times),
        backward_s=min(pass_time.backward_s for pass_time in times),
    )


def _relative(worker: Worker, best: Worker) -> float:
    """Return the speed of a worker relative to the best one, in the respect in which it compares best."""
    at = best.matrix.flops
    ratios = [
        float(np.max(best.matrix.time(at) / np.maximum(worker.matrix.time(at), 1e-300))),
        worker.vector_rate / best.vector_rate,
        worker.bandwidth_bytes_per_s / best.bandwidth_bytes_per_s,
    ]
    if worker.call_s > 0:
        ratios.append(best.call_s / worker.call_s)
    if worker.launch_s > 0:
        ratios.append(best.launch_s / worker.launch_s)
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
