"""What-if questions: change the cluster as a user asks, and find the changes with which another plan would win."""

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
_MAX_RIVALS = 4
_MAX_SENTENCES = 3

_MOST_DEVICES = 2**24

_SEARCH_RADIUS = 64
"""How far the search for a number of devices goes, in nodes of a kind above and below its proportional count."""


def what_if(cluster: ClusterSpec, text: str) -> tuple[ClusterSpec, str]:
    """Return the cluster changed as the user asks, and a description of the change.

    Args:
        cluster: the machines as they are.
        text: one change, as typed after `--what-if`. `link=10gbit` sets the links between hosts, or the only links
            there are; `node-link=` and `network-link=` name the tier. `devices=256` sets the number of devices,
            `memory=80gb` the memory of each. `speed=2x` is relative to the present speed of the devices.
            `storage=2GB/s` sets the read rate of the shared storage, or else of every host.

    Raises:
        PlanError: the text is not understood, or this cluster cannot be changed that way.
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
    """Return the number that a text such as 10gbit, 80gb, 2x or 256 gives, in the base unit.

    Args:
        value: the text after the equals sign.
        text: the whole change, for messages.
        units: factor of each unit.
        example: a correct change, for messages.
        bare: whether a number without a unit is allowed.
    """
    number = parse_quantity(value, units)
    if number is None or (not bare and value.strip()[-1:].isdecimal()):
        raise PlanError(f"--what-if {text}: {value!r} is not understood; write it like {example}")
    if not 0 < number < math.inf:
        raise PlanError(f"--what-if {text}: {value!r} is not a finite number above 0; write it like {example}")
    return number


def _with_link(cluster: ClusterSpec, key: str, value: str) -> tuple[ClusterSpec, str]:
    """Return the cluster with the bandwidth of a tier of links changed, and a description of the change."""
    rate = _number(value, f"{key}={value}", BYTES_PER_S, f"{key}=10gbit")
    tiers = {link.tier for link in cluster.every_link}
    tier: LinkTier = "node" if key == "node-link" or (key == "link" and "network" not in tiers) else "network"
    if tier not in tiers:
        raise PlanError(
            f"--what-if {key}={value}: cluster {cluster.name!r} has no {tier} link; add one to the cluster file"
        )
    return with_bandwidth(cluster, tier, rate), f"{bits_per_s(rate)} on {tier} links"


def with_bandwidth(cluster: ClusterSpec, tier: LinkTier, bandwidth: float) -> ClusterSpec:
    """Return the cluster with this bandwidth, in bytes per second, on all links of a tier."""

    def other(link: LinkSpec) -> LinkSpec:
        quicker = scale_bandwidth(link, bandwidth / link.bandwidth_bytes_per_s)
        return dataclasses.replace(quicker, bandwidth_bytes_per_s=bandwidth, evidence="assumed", points=())

    return cluster.relinked(lambda link: other(link) if link.tier == tier else link)


def with_memory(cluster: ClusterSpec, size: float) -> ClusterSpec:
    """Return the cluster with `size` bytes of memory on every device.

    Hosts that compute on their CPU get `size` bytes for each of their devices.
    """
    devices = {name: dataclasses.replace(device, memory_nbytes=int(size)) for name, device in cluster.devices.items()}
    nodes = tuple(
        dataclasses.replace(node, memory_nbytes=int(size) * node.devices_per_node)
        if cluster.devices[node.device].kind == "cpu"
        else node
        for node in cluster.nodes
    )
    return dataclasses.replace(cluster, devices=devices, nodes=nodes)


def _weights_at(rate: WeightRate, factor: float) -> WeightRate:
    """Return the rate of passes over weights, `factor` times as fast."""
    return dataclasses.replace(
        rate,
        forward=rate.forward * factor,
        input_gradient=rate.input_gradient * factor,
        weight_gradient=rate.weight_gradient * factor,
    )


def with_storage(cluster: ClusterSpec, rate: float) -> ClusterSpec:
    """Return the cluster with another read rate, in bytes per second, of its shared storage or else of every host."""
    if cluster.shared_read_bytes_per_s is not None:
        return dataclasses.replace(cluster, shared_read_bytes_per_s=rate)
    nodes = tuple(dataclasses.replace(node, disk_read_bytes_per_s=rate) for node in cluster.nodes)
    return dataclasses.replace(cluster, nodes=nodes)


def with_speed(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """Return the cluster with devices that compute and copy `factor` times as fast."""
    devices = {}
    for name, device in cluster.devices.items():
        devices[name] = dataclasses.replace(
            device,
            memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * factor,
            peak_flops_per_s={dtype: rate * factor for dtype, rate in device.peak_flops_per_s.items()},
            gemm=tuple(
                dataclasses.replace(measured, flops_per_s=measured.flops_per_s * factor) for measured in device.gemm
            ),
            gemm_concurrent=tuple(
                dataclasses.replace(measured, flops_per_s=measured.flops_per_s * factor)
                for measured in device.gemm_concurrent
            ),
            weight_rates=tuple(_weights_at(measured, factor) for measured in device.weight_rates),
            memory_rates=tuple(
                dataclasses.replace(measured, bytes_per_s=measured.bytes_per_s * factor)
                for measured in device.memory_rates
            ),
            kernel_overhead_s=device.kernel_overhead_s / factor,
            launch_s=None if device.launch_s is None else device.launch_s / factor,
        )
    return dataclasses.replace(cluster, devices=devices)


def _with_devices(cluster: ClusterSpec, value: str, text: str) -> tuple[ClusterSpec, str]:
    """Return the cluster with another number of devices, and a description of the change."""
    number = _number(value, text, {"": 1.0, "devices": 1.0}, "devices=256", bare=True)
    count = int(number)
    if count != number or not 1 <= count <= _MOST_DEVICES:
        raise PlanError(
            f"--what-if {text}: {value!r} is not a number of devices up to {_MOST_DEVICES:,}; write a whole "
            "number, such as 256"
        )
    nodes = _one_kind(cluster, count, text) if len(cluster.nodes) == 1 else _in_proportion(cluster, count, text)
    many = sum(node.count for node in nodes)
    if many > 1 and any(cluster.link_at(node, "network") is None for node in nodes):
        raise PlanError(
            f"--what-if {text}: {many} nodes need a link between them; add a network link to the cluster file"
        )
    description = f"{count} devices"
    if len(cluster.nodes) > 1:
        description += (
            " (" + ", ".join(f"{kind.count} x {kind.devices_per_node} of {kind.name}" for kind in nodes) + ")"
        )
    return dataclasses.replace(cluster, nodes=nodes), description


def _one_kind(cluster: ClusterSpec, count: int, text: str) -> tuple[NodeSpec, ...]:
    """Return nodes of the only kind with `count` devices in total.

    If `count` is less than a node has, the result is one node with only that many devices.
    """
    node = cluster.nodes[0]
    per_node = min(node.devices_per_node, count)
    if count % per_node:
        raise PlanError(
            f"--what-if {text}: nodes of {cluster.name!r} have {per_node} devices; give a multiple of {per_node}"
        )
    return (dataclasses.replace(node, devices_per_node=per_node, count=count // per_node),)


def _in_proportion(cluster: ClusterSpec, count: int, text: str) -> tuple[NodeSpec, ...]:
    """Return whole nodes of several kinds with exactly `count` devices, as near as possible to the present proportions.

    This is dynamic programming over the kinds. `least[d]` is the smallest sum of squared deviations, in devices,
    with which the kinds so far have d devices together. Kinds that get no node are left out.
    """
    whole = cluster.device_count
    least = np.full(count + 1, np.inf)
    least[0] = 0.0
    taken: list[NDArray[np.int64]] = []
    for node in cluster.nodes:
        wanted = count * node.count * node.devices_per_node / whole
        nearest = int(wanted / node.devices_per_node)
        counts_to_try = range(max(0, nearest - _SEARCH_RADIUS), nearest + _SEARCH_RADIUS + 1)
        reached, chosen = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
        for many in counts_to_try:
            devices = many * node.devices_per_node
            if devices > count:
                break
            moved = least[: count + 1 - devices] + (devices - wanted) ** 2
            better = moved < reached[devices:]
            reached[devices:][better], chosen[devices:][better] = moved[better], many
        least, taken = reached, [*taken, chosen]
    if not np.isfinite(least[count]):
        sizes = ", ".join(f"{node.devices_per_node} ({node.name})" for node in cluster.nodes)
        raise PlanError(
            f"--what-if {text}: {count} devices cannot be made up of whole nodes of {cluster.name!r}, whose kinds "
            f"have {sizes} devices each; give a multiple of {whole}, or another number"
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
    """Return sentences saying at which link bandwidth another plan would win.

    Args:
        model: what is trained.
        best: the chosen plan.
        others: the other plans, the best first.
        request: what was asked. Only for throughput and time to quality is there an answer.
        over: returns true when time is up; no further bandwidth is tried then.
    """
    if request.objective not in ("throughput", "time-to-quality"):
        return ()
    sentences: list[str] = []
    rivals = [rival for rival in others if rival.plan.mesh != best.plan.mesh][: 3 * _MAX_RIVALS]
    tiers: tuple[LinkTier, ...] = ("network", "node")
    for tier in tiers:
        if _link_of(best, tier) is None:
            continue
        sentence = _at_which_link(model, best, rivals[:_MAX_RIVALS], tier, over)
        sentences += [sentence] if sentence else []
    return tuple(sentences[:_MAX_SENTENCES])


def _at_which_link(
    model: ModelSpec, best: Costed, rivals: list[Costed], tier: LinkTier, over: Callable[[], bool]
) -> str:
    """Name the first bandwidth of a tier at which one of the rivals wins, or return an empty text.

    Powers of two of the present bandwidth are tried, upwards and downwards.
    """
    link = _link_of(best, tier)
    assert link is not None
    for power in _FACTORS:
        for factor in (power, 1 / power):
            if over():
                return ""
            bandwidth = link.bandwidth_bytes_per_s * factor
            cluster = with_bandwidth(best.cluster, tier, bandwidth)
            best_s = _step(model, cluster, best)
            for rival in rivals:
                rival_s = _step(model, with_bandwidth(rival.cluster, tier, bandwidth), rival)
                gained = rival.prediction.step_time_s.value / best.prediction.step_time_s.value - rival_s / best_s
                if (
                    rival_s < 0.98 * best_s and gained > 0.02
                ):  # otherwise the rival was as good at the present bandwidth
                    return (
                        f"At {bits_per_s(bandwidth)} on {tier} links instead of "
                        f"{bits_per_s(link.bandwidth_bytes_per_s)}, {plan_words(rival.plan)} would be "
                        f"{best_s / rival_s:.2f}x as fast as this plan"
                    )
    return ""


def _link_of(costed: Costed, tier: LinkTier) -> LinkSpec | None:
    """Return the link of a tier that the ranks of a plan use; None where they use none."""
    return link_of_tier(costed.cluster, place_ranks(costed.cluster, costed.plan.world_size), tier)


def _step(model: ModelSpec, cluster: ClusterSpec, costed: Costed) -> float:
    """Predict the step time of a plan on a changed cluster, in seconds; infinite where that is impossible."""
    try:
        return predict(model, cluster, costed.plan).step_time_s.value
    except TuttiError:
        return math.inf
