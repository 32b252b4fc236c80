"""What-if questions: a cluster changed as a user asks, and what would have to change for other plans to win."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tutti.config.cluster import ClusterSpec, LinkSpec, LinkTier, NodeSpec, WeightRate, scale_bandwidth
from tutti.config.model import ModelSpec
from tutti.config.option_syntax import BYTES, BYTES_PER_S, parse_quantity
from tutti.cost_model import predict
from tutti.cost_model.cost_notes import bits_per_s, nbytes
from tutti.cost_model.rank_placement import link_of_tier, place_ranks
from tutti.errors import PlanError, TuttiError
from tutti.planner.exploration import Costed
from tutti.planner.plan_description import plan_words
from tutti.planner.plan_request import PlanRequest

_FACTORS = (2.0, 4.0, 8.0, 16.0)
_RIVALS = 4
_TOLD = 3

_MOST_DEVICES = 2**24

_AROUND = 64
"""How many nodes more or fewer than a kind's proportional part are tried to reach a number of devices."""


def what_if(cluster: ClusterSpec, text: str) -> tuple[ClusterSpec, str]:
    """The cluster changed as `text` says, and the change as text.

    link=10gbit (between hosts, or the only links; node-link, network-link for one tier), devices=256,
    memory=80gb, speed=2x (devices, relative to now), storage=2GB/s (each host's reads, or the shared storage's).
    Raises PlanError for anything else.
    """
    name, _, value = text.strip().partition("=")
    key = name.strip().lower()
    if key in ("link", "node-link", "network-link"):
        return _with_link(cluster, key, value)
    if key == "devices":
        return _with_devices(cluster, value, text)
    if key == "memory":
        size = _number(value, text, BYTES, "memory=80gb")
        if size < 1:
            raise PlanError(f"--what-if {text}: {value!r} is less than a byte; write it like memory=80gb")
        return with_memory(cluster, size), f"{nbytes(size)} of memory a device"
    if key == "speed":
        factor = _number(value, text, {"": 1.0, "x": 1.0}, "speed=2x", bare=True)
        return with_speed(cluster, factor), f"devices {factor:g} times as fast"
    if key == "storage":
        rate = _number(value, text, BYTES_PER_S, "storage=2GB/s")
        return with_storage(cluster, rate), f"storage that reads {nbytes(rate)}/s"
    raise PlanError(
        f"--what-if {text}: there is no {name!r}; write link=10gbit, node-link=..., network-link=..., devices=256, "
        "memory=80gb, speed=2x or storage=2GB/s"
    )


def _number(value: str, text: str, units: dict[str, float], example: str, *, bare: bool = False) -> float:
    """Parses 10gbit, 80gb, 2x, 256 into numbers of the unit; `bare`: a number without a unit is allowed."""
    found = parse_quantity(value, units)
    if found is None or (not bare and value.strip()[-1:].isdecimal()):
        raise PlanError(f"--what-if {text}: {value!r} is not understood; write it like {example}")
    if not 0 < found < math.inf:
        raise PlanError(f"--what-if {text}: {value!r} is not a finite number above 0; write it like {example}")
    return found


def _with_link(cluster: ClusterSpec, key: str, value: str) -> tuple[ClusterSpec, str]:
    rate = _number(value, f"{key}={value}", BYTES_PER_S, f"{key}=10gbit")
    tiers = {link.tier for link in cluster.every_link}
    tier: LinkTier = "node" if key == "node-link" or (key == "link" and "network" not in tiers) else "network"
    if tier not in tiers:
        raise PlanError(f"--what-if {key}={value}: cluster {cluster.name!r} has no {tier} link; write one into it")
    return with_bandwidth(cluster, tier, rate), f"{bits_per_s(rate)} on {tier} links"


def with_bandwidth(cluster: ClusterSpec, tier: LinkTier, bandwidth: float) -> ClusterSpec:
    """The cluster with another bandwidth on a tier of links, on every host."""

    def other(link: LinkSpec) -> LinkSpec:
        quicker = scale_bandwidth(link, bandwidth / link.bandwidth_bytes_per_s)
        return dataclasses.replace(quicker, bandwidth_bytes_per_s=bandwidth, evidence="assumed", points=())

    return cluster.relinked(lambda link: other(link) if link.tier == tier else link)


def with_memory(cluster: ClusterSpec, size: float) -> ClusterSpec:
    """The cluster with this much memory on every device, and on every host for each of its devices."""
    devices = {name: dataclasses.replace(device, memory_nbytes=int(size)) for name, device in cluster.devices.items()}
    nodes = tuple(
        dataclasses.replace(node, memory_nbytes=int(size) * node.devices_per_node)
        if cluster.devices[node.device].kind == "cpu"
        else node
        for node in cluster.nodes
    )
    return dataclasses.replace(cluster, devices=devices, nodes=nodes)


def _weights_at(rate: WeightRate, factor: float) -> WeightRate:
    return dataclasses.replace(
        rate,
        forward=rate.forward * factor,
        input_gradient=rate.input_gradient * factor,
        weight_gradient=rate.weight_gradient * factor,
    )


def with_storage(cluster: ClusterSpec, rate: float) -> ClusterSpec:
    """The cluster with another storage rate: of the shared storage where there is one, else of each host's own."""
    if cluster.shared_read_bytes_per_s is not None:
        return dataclasses.replace(cluster, shared_read_bytes_per_s=rate)
    nodes = tuple(dataclasses.replace(node, disk_read_bytes_per_s=rate) for node in cluster.nodes)
    return dataclasses.replace(cluster, nodes=nodes)


def with_speed(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The cluster with devices that compute and copy `factor` times as fast."""
    devices = {}
    for name, device in cluster.devices.items():
        devices[name] = dataclasses.replace(
            device,
            memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * factor,
            peak_flops_per_s={dtype: rate * factor for dtype, rate in device.peak_flops_per_s.items()},
            gemm=tuple(dataclasses.replace(one, flops_per_s=one.flops_per_s * factor) for one in device.gemm),
            gemm_concurrent=tuple(
                dataclasses.replace(one, flops_per_s=one.flops_per_s * factor) for one in device.gemm_concurrent
            ),
            weight_rates=tuple(_weights_at(one, factor) for one in device.weight_rates),
            memory_rates=tuple(
                dataclasses.replace(one, bytes_per_s=one.bytes_per_s * factor) for one in device.memory_rates
            ),
            kernel_overhead_s=device.kernel_overhead_s / factor,
        )
    return dataclasses.replace(cluster, devices=devices)


def _with_devices(cluster: ClusterSpec, value: str, text: str) -> tuple[ClusterSpec, str]:
    number = _number(value, text, {"": 1.0, "devices": 1.0}, "devices=256", bare=True)
    count = int(number)
    if count != number or not 1 <= count <= _MOST_DEVICES:
        raise PlanError(
            f"--what-if {text}: {value!r} is not a number of devices up to {_MOST_DEVICES:,}; write a whole one, such "
            "as 256"
        )
    nodes = _one_kind(cluster, count, text) if len(cluster.nodes) == 1 else _in_proportion(cluster, count, text)
    many = sum(node.count for node in nodes)
    if many > 1 and any(cluster.link_at(node, "network") is None for node in nodes):
        raise PlanError(
            f"--what-if {text}: {many} nodes need a link between them; add one of tier network to the cluster"
        )
    words = f"{count} devices"
    if len(cluster.nodes) > 1:
        words += " (" + ", ".join(f"{one.count} x {one.devices_per_node} of {one.name}" for one in nodes) + ")"
    return dataclasses.replace(cluster, nodes=nodes), words


def _one_kind(cluster: ClusterSpec, count: int, text: str) -> tuple[NodeSpec, ...]:
    """Whole nodes of the only kind with this many devices; for fewer than a node has, a part of one node."""
    node = cluster.nodes[0]
    each = min(node.devices_per_node, count)
    if count % each:
        raise PlanError(f"--what-if {text}: nodes of {cluster.name!r} have {each} devices; give a multiple of {each}")
    return (dataclasses.replace(node, devices_per_node=each, count=count // each),)


def _in_proportion(cluster: ClusterSpec, count: int, text: str) -> tuple[NodeSpec, ...]:
    """Whole nodes of several kinds with exactly this many devices, as near as possible to the kinds' present
    proportions.

    Dynamic programming over the kinds: `least[d]` is the smallest sum of squared differences in devices with
    which the kinds so far have d of them. Kinds that get no node are left out.
    """
    whole = cluster.device_count
    least = np.full(count + 1, np.inf)
    least[0] = 0.0
    taken: list[NDArray[np.int64]] = []
    for node in cluster.nodes:
        wanted = count * node.count * node.devices_per_node / whole
        nearest = int(wanted / node.devices_per_node)
        some = range(max(0, nearest - _AROUND), nearest + _AROUND + 1)
        found, chosen = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
        for many in some:
            devices = many * node.devices_per_node
            if devices > count:
                break
            moved = least[: count + 1 - devices] + (devices - wanted) ** 2
            better = moved < found[devices:]
            found[devices:][better], chosen[devices:][better] = moved[better], many
        least, taken = found, [*taken, chosen]
    if not np.isfinite(least[count]):
        each = ", ".join(f"{node.devices_per_node} ({node.name})" for node in cluster.nodes)
        raise PlanError(
            f"--what-if {text}: {count} devices are not whole nodes of the kinds of {cluster.name!r}, which have "
            f"{each} devices each; give a multiple of {whole}, or another number"
        )
    counts, rest = [], count
    for node, chosen in zip(reversed(cluster.nodes), reversed(taken), strict=True):
        counts.append(int(chosen[rest]))
        rest -= counts[-1] * node.devices_per_node
    pairs = zip(cluster.nodes, reversed(counts), strict=True)
    return tuple(dataclasses.replace(node, count=many) for node, many in pairs if many)


def changes(
    model: ModelSpec, best: Costed, others: list[Costed], request: PlanRequest, over: Callable[[], bool] = lambda: False
) -> tuple[str, ...]:
    """What would have to change for the nearest alternatives to win: links faster or slower. Stops when `over`
    returns true.
    """
    if request.objective not in ("throughput", "time-to-quality"):
        return ()
    told: list[str] = []
    rivals = [one for one in others if one.plan.mesh != best.plan.mesh][: 3 * _RIVALS]
    tiers: tuple[LinkTier, ...] = ("network", "node")
    for tier in tiers:
        if _link_of(best, tier) is None:
            continue
        sentence = _at_which_link(model, best, rivals[:_RIVALS], tier, over)
        told += [sentence] if sentence else []
    return tuple(told[:_TOLD])


def _at_which_link(
    model: ModelSpec, best: Costed, rivals: list[Costed], tier: LinkTier, over: Callable[[], bool]
) -> str:
    """The bandwidth of a tier at which one of the rivals first is faster, trying powers of two up and down."""
    link = _link_of(best, tier)
    assert link is not None
    for power in _FACTORS:
        for factor in (power, 1 / power):
            if over():
                return ""
            bandwidth = link.bandwidth_bytes_per_s * factor
            cluster = with_bandwidth(best.cluster, tier, bandwidth)
            own = _step(model, cluster, best)
            for rival in rivals:
                other = _step(model, with_bandwidth(rival.cluster, tier, bandwidth), rival)
                gained = rival.prediction.step_time_s.value / best.prediction.step_time_s.value - other / own
                if other < 0.98 * own and gained > 0.02:  # else it was as good before
                    return (
                        f"At {bits_per_s(bandwidth)} on {tier} links instead of "
                        f"{bits_per_s(link.bandwidth_bytes_per_s)}, {plan_words(rival.plan)} would be "
                        f"{own / other:.2f}x as fast as this plan"
                    )
    return ""


def _link_of(one: Costed, tier: LinkTier) -> LinkSpec | None:
    return link_of_tier(one.cluster, place_ranks(one.cluster, one.plan.world_size), tier)


def _step(model: ModelSpec, cluster: ClusterSpec, one: Costed) -> float:
    try:
        return predict(model, cluster, one.plan).step_time_s.value
    except TuttiError:
        return math.inf
