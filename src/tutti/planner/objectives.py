"""What a plan costs beyond its step: the whole training's time, device-hours, price and energy; and the
objective's value.
"""

import math
from functools import partial

import numpy as np
from numpy.typing import NDArray

import tutti.planner.plan_request as plan_request
from tutti.config.cluster import ClusterSpec, DeviceSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Prediction
from tutti.cost_model.cost_notes import nbytes, seconds
from tutti.cost_model.rank_placement import HostGroup, place_ranks
from tutti.errors import PlanError
from tutti.planner.plan_request import PlanRequest, Totals, steps_to_quality

Array = NDArray[np.float64]

_WH_PER_J = 1.0 / 3600.0


def check(cluster: ClusterSpec, request: PlanRequest) -> None:
    """Raises PlanError where an objective or a limit needs what the cluster or the request does not say."""
    used = {node.device for node in cluster.nodes}
    devices = [cluster.devices[name] for name in sorted(used)]
    if request.objective == "cost" or request.budget is not None:
        _have(devices, "price_per_device_hour", "a price", cluster)
    if request.objective == "energy":
        _have(devices, "power_w", "a power", cluster)
    if (request.budget is not None or request.deadline_s is not None) and steps(request, request.script) is None:
        raise PlanError(
            "a budget or a deadline needs the length of the whole training, which is unknown; give its samples or "
            "epochs (--samples, --epochs)"
        )


def _have(devices: list[DeviceSpec], name: str, words: str, cluster: ClusterSpec) -> None:
    for device in devices:
        if getattr(device, name) is None:
            raise PlanError(
                f"device {device.name!r} of cluster {cluster.name!r} has no {name}, needed to compare plans by "
                f"{words.removeprefix('a ')}; add it to the cluster file"
            )


def steps(request: PlanRequest, plan: Plan) -> int | None:
    """Steps of the whole training with a plan's global batch; None where the length of training is unknown."""
    batch = plan.batch.global_batch_size
    if plan.batch.ramp and (sizes := _sizes(request, plan)) is not None:
        return sum(many for _, many in sizes)
    if request.noise is not None:
        return math.ceil(steps_to_quality(batch, request.noise))
    return None if request.train_samples is None else math.ceil(request.train_samples / batch)


def _sizes(request: PlanRequest, plan: Plan) -> list[tuple[int, int]] | None:
    """(size, steps) of a batch that grows; None where the length of training is unknown."""
    if request.noise is not None:
        return plan_request.sizes_to_quality(plan.batch, request.noise)
    return None if request.train_samples is None else plan_request.sizes_of(plan.batch, request.train_samples)


def _time_s(request: PlanRequest, plan: Plan, prediction: Prediction) -> float:
    """Seconds of all steps, or of one where their number is unknown."""
    sizes = _sizes(request, plan) if plan.batch.ramp else None
    count = steps(request, plan)
    if sizes is None:
        return prediction.step_time_s.value * (count or 1) + _warmup_s(prediction, count)
    whole = plan.batch.global_batch_size
    return sum(many * plan_request.step_s(prediction, size, whole) for size, many in sizes) + _warmup_s(
        prediction, count
    )


def _warmup_s(prediction: Prediction, count: int | None) -> float:
    """Seconds that the first of `count` steps take more than as many later ones; may be negative."""
    beyond, done = 0.0, 0
    for phase in prediction.first if count is not None else ():
        until = min(phase.until, count or 0)
        beyond += (until - done) * (phase.step_time_s - prediction.step_time_s.value)
        done = until
    return beyond


def begun(request: PlanRequest, plan: Plan, prediction: Prediction) -> float:
    """The time of all steps relative to that of as many later ones, because of the first steps; 1 where their number
    is unknown.
    """
    count = steps(request, plan)
    return 1.0 + _warmup_s(prediction, count) / (count * prediction.step_time_s.value) if count else 1.0


def totals(cluster: ClusterSpec, request: PlanRequest, plan: Plan, prediction: Prediction) -> Totals:
    """Time, device-hours, price and energy of the training, or of one step where its length is unknown.

    Devices that the plan leaves idle are not paid for. A device that is used counts for all of the time, at its
    full power. Where the batch grows, each size counts with its own step time.
    """
    used = place_ranks(cluster, plan.world_size)
    count = steps(request, plan)
    time_s = _time_s(request, plan, prediction)
    hours = time_s / 3600.0
    rate = {name: rate_of(used, name) for name in ("price_per_device_hour", "power_w")}
    price, power = rate["price_per_device_hour"], rate["power_w"]
    return Totals(
        steps=count,
        time_s=time_s,
        device_hours=hours * sum(map(devices_of, used)),
        cost=None if price is None else hours * price,
        energy_kwh=None if power is None else hours * power / 1000.0,
        evidence=request.noise.evidence if request.noise is not None else "predicted",
    )


def room_nbytes(cluster: ClusterSpec, plan: Plan) -> float:
    """Memory that each rank of a plan may fill, on its smallest device."""
    return min(host_group.memory_nbytes for host_group in place_ranks(cluster, plan.world_size))


def devices_of(host_group: HostGroup) -> int:
    """Number of devices that the ranks of a host group keep busy."""
    return host_group.hosts * -(-host_group.ranks_per_host // host_group.sharing)


def rate_of(host_groups: tuple[HostGroup, ...], name: str) -> float | None:
    """Price an hour, or power, of all used devices together; None where a device does not have it."""
    values = [getattr(host_group.device, name) for host_group in host_groups]
    if any(value is None for value in values):
        return None
    return float(sum(devices_of(host_group) * value for host_group, value in zip(host_groups, values, strict=True)))


def value(cluster: ClusterSpec, request: PlanRequest, plan: Plan, prediction: Prediction) -> float:
    """The objective's value; less is better."""
    if request.objective == "memory":
        return prediction.memory.total
    return prediction.step_time_s.value * factor(cluster, request, plan.world_size) * _repeats(request, plan)


def _repeats(request: PlanRequest, plan: Plan) -> float:
    noise = request.noise
    if request.objective != "time-to-quality" or noise is None:
        return 1.0
    return steps_to_quality(plan.batch.global_batch_size, noise)


def factor(cluster: ClusterSpec, request: PlanRequest, world: int) -> float:
    """Weight of a second of a step of `world` ranks under the objective. Not for the objective memory."""
    if request.objective in ("throughput", "time-to-quality", "memory"):
        return 1.0
    used = place_ranks(cluster, world)
    if request.objective == "device-hours":
        return float(sum(map(devices_of, used))) / 3600.0
    name = "price_per_device_hour" if request.objective == "cost" else "power_w"
    return (rate_of(used, name) or 0.0) * (_WH_PER_J / 1000.0 if name == "power_w" else 1.0 / 3600.0)


def bound(cluster: ClusterSpec, request: PlanRequest, step_s: Array, world: NDArray[np.int64], memory: Array) -> Array:
    """The objective's value for steps of at least `step_s` seconds and at least `memory` bytes, row by row."""
    if request.objective == "memory":
        return memory
    unit = _repeats(request, request.script)
    if request.objective in ("throughput", "time-to-quality"):
        return step_s * unit
    kinds, where = np.unique(world, return_inverse=True)
    factors = np.array(list(map(partial(factor, cluster, request), kinds.tolist())))
    return np.asarray(step_s * factors[where.reshape(-1)], dtype=np.float64)


def broken_limit(request: PlanRequest, found: Totals, prediction: Prediction) -> str:
    """The limit of the request that a plan breaks, as text; empty where it keeps all."""
    if request.memory_nbytes is not None and prediction.memory.total > request.memory_nbytes:
        return f"takes {nbytes(prediction.memory.total)} a rank, but the limit is {nbytes(request.memory_nbytes)}"
    if request.budget is not None and found.cost is not None and found.cost > request.budget:
        return f"costs {money(found.cost)}, but the budget is {money(request.budget)}"
    if request.deadline_s is not None and found.steps is not None and found.time_s > request.deadline_s:
        return f"takes {duration(found.time_s)}, but the deadline is {duration(request.deadline_s)}"
    return ""


def over_limits(request: PlanRequest, found: Totals, prediction: Prediction) -> float:
    """The factor by which a plan exceeds the limit that it breaks most; at most 1 where it keeps all."""
    limits = (
        (request.memory_nbytes, prediction.memory.total),
        (request.budget, found.cost),
        (request.deadline_s, found.time_s if found.steps is not None else None),
    )
    return max((has / limit for limit, has in limits if limit is not None and has is not None), default=0.0)


def duration(value: float) -> str:
    """A time as text: 45.6 ms, 12.3 s, 5.1 h, 3.2 days."""
    if value >= 2 * 86400:
        return f"{value / 86400:.1f} days"
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 120 else seconds(value)


def money(value: float) -> str:
    """A price, to four digits: 1,234,568; 0.01038."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def shown_value(request: PlanRequest, found: Totals, prediction: Prediction) -> str:
    """The objective's value of a plan as text."""
    whole = "" if found.steps is not None else " a step"
    if request.objective == "device-hours":
        return f"{found.device_hours:,.3g} device-hours{whole}"
    if request.objective == "cost":
        return f"a cost of {money(found.cost or 0.0)}{whole}"
    if request.objective == "energy":
        return f"{found.energy_kwh or 0.0:,.3g} kWh{whole}"
    if request.objective == "memory":
        return f"{nbytes(prediction.memory.total)} a rank"
    if request.objective == "time-to-quality":
        return f"{duration(found.time_s)} to the quality"
    return f"{seconds(prediction.step_time_s.value)} a step"
