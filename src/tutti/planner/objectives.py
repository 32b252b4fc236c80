"""What a plan costs beyond one step: the training's time, device-hours, price and energy; the objective's value."""

import math
from functools import partial

import numpy as np
from numpy.typing import NDArray

import tutti.planner.plan_request as plan_request
from tutti.config.cluster import ClusterSpec, DeviceSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Prediction
from tutti.cost_model.cost_notes import nbytes, seconds
from tutti.cost_model.offload_cost import disk_limit_nbytes, host_limit_nbytes
from tutti.cost_model.rank_placement import HostGroup, place_ranks
from tutti.errors import PlanError
from tutti.planner.plan_request import PlanRequest, Totals, steps_to_quality

Array = NDArray[np.float64]

_WH_PER_J = 1.0 / 3600.0


def check(cluster: ClusterSpec, request: PlanRequest) -> None:
    """Check that the cluster and the request say what the objective and the limits need.

    Raises:
        PlanError: a price, a power or the length of the training is missing.
    """
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
    """Refuse the cluster unless each of the devices has the field `name`."""
    for device in devices:
        if getattr(device, name) is None:
            raise PlanError(
                f"device {device.name!r} of cluster {cluster.name!r} has no {name}, needed to compare plans by "
                f"{words.removeprefix('a ')}; add it to the cluster file"
            )


def steps(request: PlanRequest, plan: Plan) -> int | None:
    """Return the steps of the whole training with a plan's global batch; None where its length is unknown."""
    batch = plan.batch.global_batch_size
    if plan.batch.ramp and (sizes := _sizes(request, plan)) is not None:
        return sum(many for _, many in sizes)
    if request.noise is not None:
        return math.ceil(steps_to_quality(batch, request.noise))
    return None if request.train_samples is None else math.ceil(request.train_samples / batch)


def _sizes(request: PlanRequest, plan: Plan) -> list[tuple[int, int]] | None:
    """Return pairs (size, steps) of a growing batch; None where the length of training is unknown."""
    if request.noise is not None:
        return plan_request.sizes_to_quality(plan.batch, request.noise)
    return None if request.train_samples is None else plan_request.sizes_of(plan.batch, request.train_samples)


def _time_s(request: PlanRequest, plan: Plan, prediction: Prediction) -> float:
    """Return the seconds of all steps, or of one step where their number is unknown."""
    sizes = _sizes(request, plan) if plan.batch.ramp else None
    count = steps(request, plan)
    if sizes is None:
        return prediction.step_time_s.value * (count or 1) + _warmup_s(prediction, count)
    whole = plan.batch.global_batch_size
    return sum(many * plan_request.step_s(prediction, size, whole) for size, many in sizes) + _warmup_s(
        prediction, count
    )


def _warmup_s(prediction: Prediction, count: int | None) -> float:
    """Return by how many seconds the first of `count` steps exceed as many later ones; may be negative."""
    beyond, done = 0.0, 0
    for phase in prediction.first if count is not None else ():
        until = min(phase.until, count or 0)
        beyond += (until - done) * (phase.step_time_s - prediction.step_time_s.value)
        done = until
    return beyond


def begun(request: PlanRequest, plan: Plan, prediction: Prediction) -> float:
    """Return the time of all steps relative to that of as many later ones; 1 where their number is unknown.

    The first steps of a training may take longer or shorter than later ones.
    """
    count = steps(request, plan)
    return 1.0 + _warmup_s(prediction, count) / (count * prediction.step_time_s.value) if count else 1.0


def totals(cluster: ClusterSpec, request: PlanRequest, plan: Plan, prediction: Prediction) -> Totals:
    """Return time, device-hours, price and energy of the training, or of one step where its length is unknown.

    Devices that the plan leaves idle are not counted. A device in use counts for the whole time, at its full power.
    Where the batch grows, each size counts with its own step time.

    Args:
        cluster: the machines, in the order in which ranks are placed.
        request: what was asked; it has the length of the training.
        plan: the plan.
        prediction: the prediction for that plan.
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


def capacity_nbytes(cluster: ClusterSpec, plan: Plan) -> float:
    """Return the bytes that each rank of a plan may fill, on its smallest device."""
    return min(host_group.memory_nbytes for host_group in place_ranks(cluster, plan.world_size))


def host_capacity_nbytes(cluster: ClusterSpec, plan: Plan) -> float:
    """Return the bytes of its host's memory that a rank's offloaded state may fill."""
    return min(host_limit_nbytes(host_group) for host_group in place_ranks(cluster, plan.world_size))


def disk_capacity_nbytes(cluster: ClusterSpec, plan: Plan) -> float:
    """Return the bytes of its host's disk that a rank's offloaded state may fill."""
    return min(disk_limit_nbytes(host_group) for host_group in place_ranks(cluster, plan.world_size))


def nvme_path(cluster: ClusterSpec) -> str:
    """Return the folder for optimizer state on a disk; empty unless it is the same on every node."""
    paths = {"" if node.nvme is None else node.nvme.path for node in cluster.nodes}
    return paths.pop() if len(paths) == 1 else ""


def devices_of(host_group: HostGroup) -> int:
    """Return the number of devices that the ranks of a host group use."""
    return host_group.hosts * -(-host_group.ranks_per_host // host_group.sharing)


def rate_of(host_groups: tuple[HostGroup, ...], name: str) -> float | None:
    """Return the sum of a rate over all devices in use; None where a device does not have it.

    Args:
        host_groups: where the ranks run.
        name: "price_per_device_hour" or "power_w".
    """
    values = [getattr(host_group.device, name) for host_group in host_groups]
    if any(value is None for value in values):
        return None
    return float(sum(devices_of(host_group) * value for host_group, value in zip(host_groups, values, strict=True)))


def value(cluster: ClusterSpec, request: PlanRequest, plan: Plan, prediction: Prediction) -> float:
    """Return the objective's value of a plan; less is better.

    Args:
        cluster: the machines, in the order in which ranks are placed.
        request: what was asked.
        plan: the plan.
        prediction: the prediction for that plan.
    """
    if request.objective == "memory":
        return prediction.memory.total
    return prediction.step_time_s.value * factor(cluster, request, plan.world_size) * _repeats(request, plan)


def _repeats(request: PlanRequest, plan: Plan) -> float:
    """Return the number of steps to the quality where the objective is time to quality, else 1."""
    noise = request.noise
    if request.objective != "time-to-quality" or noise is None:
        return 1.0
    return steps_to_quality(plan.batch.global_batch_size, noise)


def factor(cluster: ClusterSpec, request: PlanRequest, world: int) -> float:
    """Return how much one second of a step of `world` ranks counts under an objective other than memory."""
    if request.objective in ("throughput", "time-to-quality", "memory"):
        return 1.0
    used = place_ranks(cluster, world)
    if request.objective == "device-hours":
        return float(sum(map(devices_of, used))) / 3600.0
    name = "price_per_device_hour" if request.objective == "cost" else "power_w"
    return (rate_of(used, name) or 0.0) * (_WH_PER_J / 1000.0 if name == "power_w" else 1.0 / 3600.0)


def bound(cluster: ClusterSpec, request: PlanRequest, step_s: Array, world: NDArray[np.int64], memory: Array) -> Array:
    """Return lower bounds of the objective's value, (plans,).

    Args:
        cluster: the machines, in the order in which ranks are placed.
        request: what was asked.
        step_s: lower bounds of the step time in seconds, (plans,).
        world: numbers of ranks, (plans,).
        memory: lower bounds of the memory of the fullest rank in bytes, (plans,).
    """
    if request.objective == "memory":
        return memory
    unit = _repeats(request, request.script)
    if request.objective in ("throughput", "time-to-quality"):
        return step_s * unit
    kinds, where = np.unique(world, return_inverse=True)
    factors = np.array(list(map(partial(factor, cluster, request), kinds.tolist())))
    return np.asarray(step_s * factors[where.reshape(-1)], dtype=np.float64)


def broken_limit(request: PlanRequest, training: Totals, prediction: Prediction) -> str:
    """Return a phrase with the limit of the request that a plan breaks; empty where the plan keeps all.

    Args:
        request: what was asked.
        training: the whole training with the plan.
        prediction: the prediction for that plan.
    """
    if request.memory_nbytes is not None and prediction.memory.total > request.memory_nbytes:
        return f"takes {nbytes(prediction.memory.total)} a rank, but the limit is {nbytes(request.memory_nbytes)}"
    if request.budget is not None and training.cost is not None and training.cost > request.budget:
        return f"costs {money(training.cost)}, but the budget is {money(request.budget)}"
    if request.deadline_s is not None and training.steps is not None and training.time_s > request.deadline_s:
        return f"takes {duration(training.time_s)}, but the deadline is {duration(request.deadline_s)}"
    return ""


def over_limits(request: PlanRequest, training: Totals, prediction: Prediction) -> float:
    """Return the factor by which a plan exceeds the limit that it breaks most; at most 1 where it keeps all.

    Args:
        request: what was asked.
        training: the whole training with the plan.
        prediction: the prediction for that plan.
    """
    limits = (
        (request.memory_nbytes, prediction.memory.total),
        (request.budget, training.cost),
        (request.deadline_s, training.time_s if training.steps is not None else None),
    )
    return max((has / limit for limit, has in limits if limit is not None and has is not None), default=0.0)


def duration(value: float) -> str:
    """Return a time in seconds as text: 45.6 ms, 12.3 s, 5.1 h, 3.2 days."""
    if value >= 2 * 86400:
        return f"{value / 86400:.1f} days"
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 120 else seconds(value)


def money(value: float) -> str:
    """Return a price as text, to four digits: 1,234,568; 0.01038."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def shown_value(request: PlanRequest, training: Totals, prediction: Prediction) -> str:
    """Return the objective's value of a plan as text.

    Args:
        request: what was asked.
        training: the whole training with the plan, or one step of it.
        prediction: the prediction for that plan.
    """
    whole = "" if training.steps is not None else " a step"
    if request.objective == "device-hours":
        return f"{training.device_hours:,.3g} device-hours{whole}"
    if request.objective == "cost":
        return f"a cost of {money(training.cost or 0.0)}{whole}"
    if request.objective == "energy":
        return f"{training.energy_kwh or 0.0:,.3g} kWh{whole}"
    if request.objective == "memory":
        return f"{nbytes(prediction.memory.total)} a rank"
    if request.objective == "time-to-quality":
        return f"{duration(training.time_s)} to the quality"
    return f"{seconds(prediction.step_time_s.value)} a step"
