"""Explain in sentences with numbers why a plan lost and what a choice means."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import tutti.planner.objectives as objectives
from tutti.config.cluster import ClusterSpec
from tutti.config.model import Loading, ModelSpec
from tutti.config.plan import PipelinePlan, Plan
from tutti.config.prediction import Prediction
from tutti.config.vocabulary import DATA_AXES
from tutti.cost_model.cost_notes import bits_per_s, count, nbytes, seconds
from tutti.cost_model.loading_time import BatchLoad, host_cores, storage_known
from tutti.cost_model.rank_placement import HostGroup, place_ranks, ring_link, ring_tier
from tutti.cost_model.step_time import load_of, predict
from tutti.errors import PlanError
from tutti.planner.exploration import Costed
from tutti.planner.plan_description import axes_of, mesh_words, plan_words, recompute_words, settings_words
from tutti.planner.plan_refinement import wide_remark
from tutti.planner.plan_request import Alternative, PlanRequest

_GOALS = {
    "device-hours": "to take the fewest device-hours",
    "cost": "to cost the least",
    "energy": "to take the least energy",
    "memory": "to need the least memory",
    "time-to-quality": "to reach the quality first",
}


def why(request: PlanRequest, loser: Costed, best: Costed) -> str:
    """Return one phrase saying why `loser` was not chosen instead of `best`."""
    plan, prediction = loser.plan, loser.prediction
    host_nbytes = objectives.host_capacity_nbytes(loser.cluster, plan)
    if prediction.memory.host > host_nbytes:
        return (
            f"does not fit: needs {nbytes(prediction.memory.host)} of the host's memory for each rank, but may fill "
            f"{nbytes(host_nbytes)}"
        )
    disk_nbytes = objectives.disk_capacity_nbytes(loser.cluster, plan)
    if prediction.memory.disk > disk_nbytes:
        return (
            f"does not fit: needs {nbytes(prediction.memory.disk)} of the host's disk for each rank, but may fill "
            f"{nbytes(disk_nbytes)}"
        )
    if not prediction.fits:
        return (
            f"does not fit: needs {nbytes(prediction.memory.total)} for each rank ({_largest_part(prediction)}), "
            f"but a rank has {nbytes(objectives.capacity_nbytes(loser.cluster, plan))}"
        )
    if loser.broken:
        return f"not allowed: {loser.broken}"
    ratio = loser.value / best.value
    if ratio <= 1.02:
        return _tie(loser, best, ratio)
    if request.objective == "throughput":
        return f"{ratio:.2f}x slower: {_cause(loser, best)}"
    lost, chosen = (
        objectives.shown_value(
            request,
            objectives.totals(candidate.cluster, request, candidate.plan, candidate.prediction),
            candidate.prediction,
        )
        for candidate in (loser, best)
    )
    steps = f"a step takes {seconds(prediction.step_time_s.value)}, not {seconds(best.prediction.step_time_s.value)}"
    return f"{ratio:.2f}x as much: {lost} against {chosen}; {steps}"


def _tie(loser: Costed, best: Costed, ratio: float) -> str:
    """Say why a plan lost whose value is about as good as the best."""
    same = "as good within 2 %" if ratio >= 0.995 else f"{1 - ratio:.1%} better, which is within the error"
    plan, chosen = loser.plan, best.plan
    step_s, best_step_s = loser.prediction.step_time_s.value, best.prediction.step_time_s.value
    if step_s > 1.02 * best_step_s and abs(step_s / best_step_s - ratio) > 0.02:  # the objective is not time
        return f"{same}, but a step takes {seconds(step_s)}, not {seconds(best_step_s)}"
    if plan.world_size > chosen.world_size:
        return f"{same}, but with {plan.world_size} devices instead of {chosen.world_size}"
    if plan.precision != chosen.precision:
        return f"{same}, but computes in {plan.precision}"
    if len(axes_of(plan)) > len(axes_of(chosen)):
        return f"{same}, but divides the model along more axes"
    if settings_words(plan) != settings_words(chosen) and recompute_words(plan) != "none":
        return f"{same}, but needs {settings_words(plan)}"
    if plan.batch.num_microbatches > chosen.batch.num_microbatches:
        return f"{same}, but needs {plan.batch.num_microbatches} microbatches"
    return f"{ratio - 1:.1%} worse" if ratio > 1 else same


def _cause(loser: Costed, best: Costed) -> str:
    """Name the phase of the step that makes the largest difference, with both times."""
    slow, fast = loser.prediction, best.prediction
    differences = {
        "compute": _compute_s(slow) - _compute_s(fast),
        "communication": slow.phases["exposed_communication"] - fast.phases["exposed_communication"],
        "data": slow.phases["data"] - fast.phases["data"],
        "optimizer": slow.phases["optimizer"] - fast.phases["optimizer"],
        "other": slow.phases["other"] - fast.phases["other"],
    }
    part = max(differences, key=lambda name: differences[name])
    if part == "communication":
        return _communication_cause(loser.cluster, loser.plan, slow)
    if part == "optimizer":
        took = f"the optimizer takes {seconds(slow.phases['optimizer'])} against {seconds(fast.phases['optimizer'])}"
        oversubscription = max(_sharing_memory(place_ranks(loser.cluster, loser.plan.world_size)))
        if set(axes_of(loser.plan)) <= {"replicate"} and oversubscription > 1:
            return f"{oversubscription} ranks that share a memory update all parameters each: {took}"
        return took
    if part == "data":
        return f"{seconds(slow.phases['data'])} of loading data against {seconds(fast.phases['data'])}"
    if part == "other":
        return f"{seconds(slow.phases['other'])} of waiting against {seconds(fast.phases['other'])}"
    return _compute_cause(loser, best)


def _sharing_memory(host_groups: tuple[HostGroup, ...]) -> list[int]:
    """Return for each host group how many ranks of a host share one memory; 1 on GPUs, which have their own."""
    return [host_group.ranks_per_host if host_group.device.kind == "cpu" else 1 for host_group in host_groups]


def _compute_cause(loser: Costed, best: Costed) -> str:
    """Say why a plan computes longer than the best one."""
    plan, chosen = loser.plan, best.plan
    against = f"{seconds(_compute_s(loser.prediction))} of compute against {seconds(_compute_s(best.prediction))}"
    host_groups = place_ranks(loser.cluster, plan.world_size)
    oversubscribed = [host_group for host_group in host_groups if host_group.oversubscribed > 1]
    if oversubscribed:
        return f"{oversubscribed[0].sharing} ranks share {count(oversubscribed[0].device.cores, 'core')}; {against}"
    if plan.precision != chosen.precision:
        return f"{plan.precision} is slower on {host_groups[0].device.name}; {against}"
    if plan.world_size < chosen.world_size:
        who = (
            "one rank computes all samples"
            if plan.world_size == 1
            else f"each of {plan.world_size} ranks computes more"
        )
        return f"{who}; {against}"
    if (again := recompute_words(plan)) != recompute_words(chosen) and again != "none":
        return f"{'forward' if again == 'full' else 'part of forward'} is computed twice; {against}"
    if plan.shares != chosen.shares and not plan.shares and plan.data_parallel_degree > 1:
        slowest = {host_group.device.name for host_group in host_groups}
        return f"equal shares on unequal devices ({', '.join(sorted(slowest))}); {against}"
    if chosen.split_shares and not plan.split_shares and plan.degree("split") > 1:
        unequal = {host_group.device.name for host_group in host_groups}
        return f"equal parts of layers on unequal devices ({', '.join(sorted(unequal))}); {against}"
    if plan.degree("split", "space") > chosen.degree("split", "space"):
        return f"operators cut into {plan.degree('split', 'space')} parts are smaller and less efficient; {against}"
    if plan.batch.num_microbatches > chosen.batch.num_microbatches:
        return f"{plan.batch.num_microbatches} microbatches have smaller, less efficient operators; {against}"
    idle = (
        host_groups[0].device.cores - host_groups[0].sharing * host_groups[0].threads
        if host_groups[0].device.kind == "cpu"
        else 0
    )
    if idle > 0:
        return f"{count(plan.world_size, 'rank')} leave {count(idle, 'core')} idle; {against}"
    if max(_sharing_memory(host_groups)) > 1 and set(axes_of(plan)) <= set(DATA_AXES):
        return f"ranks share cores and memory bandwidth; {against}"
    return against


def _communication_cause(cluster: ClusterSpec, plan: Plan, slow: Prediction) -> str:
    """Name the exposed communication of a plan and the link that it waits for."""
    if plan.world_size == 1:
        return f"{seconds(slow.phases['exposed_communication'])} of waiting for copies between device and host"
    host_groups = place_ranks(cluster, plan.world_size)
    link = ring_link(cluster, host_groups)
    over = "" if set(axes_of(plan)) <= {"replicate"} else f" over {mesh_words(plan)}"
    return (
        f"{seconds(slow.phases['exposed_communication'])} of exposed communication{over} at "
        f"{bits_per_s(link.bandwidth_bytes_per_s)} ({ring_tier(host_groups)})"
    )


def _compute_s(prediction: Prediction) -> float:
    """Return the seconds of forward and backward."""
    return prediction.phases["forward"] + prediction.phases["backward"]


def _largest_part(prediction: Prediction) -> str:
    """Name the two largest parts of a rank's memory."""
    memory = prediction.memory
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
        "libraries": memory.reserve,
        "the script's own data": memory.script,
    }
    ordered = sorted(parts.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {nbytes(value)}" for name, value in ordered)


def remarks(
    model: ModelSpec,
    cluster: ClusterSpec,
    request: PlanRequest,
    best: Costed,
    alternatives: Sequence[Alternative],
) -> tuple[str, ...]:
    """Return sentences on what the choice means: why this many devices, what limits the plan, what was held fixed.

    Args:
        model: what is trained.
        cluster: the machines, in their own order.
        request: what was asked.
        best: the chosen plan.
        alternatives: plans that were not chosen, the best first.
    """
    plan, prediction = best.plan, best.prediction
    sentences = [
        _mesh_remark(model, request, best) if request.mesh is not None else _devices_remark(request, best, alternatives)
    ]
    sentences.append(prediction.notes[0][0].upper() + prediction.notes[0][1:])
    if slow := data_wait_remark(model, best.cluster, plan, prediction):
        sentences.append(slow)
    if wide := wide_remark(model, plan):
        sentences.append(wide)
    sentences += _kept_settings_remarks(model, request, plan, alternatives)
    idle = cluster.device_count - plan.world_size
    used = {host_group.device.kind for host_group in place_ranks(best.cluster, plan.world_size)}
    if idle > 0 and used == {"cuda"} and request.degree is None and request.scope != "data":
        gained = _gain_of_more_devices(request, best, alternatives)
        sentences.append(
            f"{count(idle, 'device')} of {cluster.device_count} {'stays' if idle == 1 else 'stay'} idle: "
            + (
                f"the best plan with more of them is only {gained:.1%} better"
                if gained >= 0.001
                else "no better plan with them was found"
            )
        )
    if plan.shares:
        sentences.append(
            "Shares follow the devices' speeds, as far as their memory allows, so that all ranks finish together"
        )
    if plan.split_shares:
        sentences.append(
            "Parts of layers along split follow the devices' speeds, as far as their memory allows, so that all ranks "
            "finish together"
        )
    if best.cluster.nodes != cluster.nodes:
        names = ", ".join(node.name for node in best.cluster.nodes)
        sentences.append(f"Start the nodes in this order, which is not the cluster file's: {names}")
    if plan.batch.global_batch_size != request.script.batch.global_batch_size:
        script_batch = request.script.batch
        sentences.append(
            f"The global batch is {plan.batch.global_batch_size} instead of {script_batch.global_batch_size} "
            f"{script_batch.unit}, because the quality is reached sooner: this changes what is computed"
        )
    return tuple(sentences)


def _gain_of_more_devices(request: PlanRequest, best: Costed, alternatives: Sequence[Alternative]) -> float:
    """Return the fraction by which the best plan on more devices is better than the chosen one; 0 if none is."""
    values = [
        objectives.value(best.cluster, request, other.plan, other.prediction)
        for other in alternatives
        if other.prediction is not None
        and other.totals is not None
        and other.prediction.fits
        and other.plan.world_size > best.plan.world_size
        and not objectives.broken_limit(request, other.totals, other.prediction)
    ]
    return max(0.0, 1 - min(values, default=best.value) / best.value)


def _kept_settings_remarks(
    model: ModelSpec, request: PlanRequest, plan: Plan, alternatives: Sequence[Alternative]
) -> list[str]:
    """Say which settings stay as the script has them, and which changed without an effect on results."""
    sentences = []
    if request.precision == "script" and plan.precision == "full":
        faster = [a for a in alternatives if a.prediction and a.plan.precision != "full" and a.prediction.fits]
        sentences.append(
            "Precision stays as the script has it (full), because another precision changes the numbers"
            + ("; --precision auto would allow a faster one" if faster else "")
        )
    if request.precision == "auto" and plan.precision not in ("full", request.script.precision):
        sentences.append(
            f"Matrix products are computed in {plan.precision}, which changes the numbers; --precision full keeps the "
            "model's own"
        )
    if request.keep_microbatches:
        sentences.append(f"The number of microbatches stays {plan.batch.num_microbatches}, as asked")
    elif model.batch_statistics and not request.allow_microbatches:
        sentences.append(
            f"The number of microbatches stays {plan.batch.num_microbatches}, because this model normalises over "
            "the batch and its results would change; --allow-microbatches allows that"
        )
    elif plan.batch.num_microbatches != request.script.batch.num_microbatches:
        sentences.append(
            f"The batch is cut into {count(plan.batch.num_microbatches, 'microbatch')} instead of "
            f"{request.script.batch.num_microbatches}: the gradients are the same, memory and speed differ"
        )
    return sentences


def _mesh_remark(model: ModelSpec, request: PlanRequest, best: Costed) -> str:
    """Say that the mesh is the user's, and compare it with one device, which the search does not try in this case."""
    mesh = f"The mesh is {mesh_words(best.plan)}, as asked"
    one_device = _single_device_plan(model, request, best) if best.plan.world_size > 1 else None
    if one_device is None:
        return mesh
    if not one_device.good:
        return f"{mesh}; one device {'is ' if one_device.prediction.fits else ''}{why(request, one_device, best)}"
    if request.objective != "throughput":
        totals = objectives.totals(one_device.cluster, request, one_device.plan, one_device.prediction)
        return f"{mesh}; one device would take {objectives.shown_value(request, totals, one_device.prediction)}"
    ratio = one_device.value / best.value
    words = f"{ratio:.2f}x slower" if ratio >= 1 else f"{1 / ratio:.2f}x as fast"
    return f"{mesh}; one device would be {words}{_interval_warning(best.prediction, one_device.prediction)}"


def _single_device_plan(model: ModelSpec, request: PlanRequest, best: Costed) -> Costed | None:
    """Return the better of two plans on one device; None where neither can be predicted.

    One has the script's number of microbatches, the other that of `best`.
    """
    script, costed = request.script, []
    for many in {script.batch.num_microbatches, best.plan.batch.num_microbatches}:
        batch = replace(best.plan.batch, num_microbatches=many)
        plan = replace(
            script,
            batch=batch,
            mesh={"replicate": 1},
            shares=(),
            split_shares=(),
            precision=best.plan.precision,
            pipeline=PipelinePlan(),
        )
        try:
            prediction = predict(model, best.cluster, plan)
        except PlanError:
            continue
        value = objectives.value(best.cluster, request, plan, prediction)
        broken = objectives.broken_limit(
            request, objectives.totals(best.cluster, request, plan, prediction), prediction
        )
        costed.append(Costed(plan=plan, prediction=prediction, cluster=best.cluster, value=value, broken=broken))
    return min(costed, key=lambda candidate: (not candidate.good, candidate.value), default=None)


def _interval_warning(best: Prediction, other: Prediction) -> str:
    """Warn if another plan's step time lies within the interval of the best plan's; else return an empty text."""
    time = best.step_time_s
    if not time.low <= other.step_time_s.value <= time.high:
        return ""
    return (
        f"; that is less than the prediction's interval ({seconds(time.low)} to {seconds(time.high)}), so measure both"
    )


def _one_device(request: PlanRequest, chosen: Costed, more: Alternative) -> str:
    """Say that one device was chosen, and how the nearest plan on several devices compares."""
    ranks, best = more.plan.world_size, _GOALS.get(request.objective, "to be the fastest")
    if more.prediction is None or not more.prediction.fits or more.reason.startswith("not allowed"):
        return f"One device is predicted {best}; {ranks} ranks: {more.reason}"
    ratio = objectives.value(chosen.cluster, request, more.plan, more.prediction) / chosen.value
    if ratio <= 1.02:  # among equal plans, fewer devices are preferred
        return (
            f"One device is chosen, because the gain of more is within the prediction's error; {ranks} ranks: "
            f"{more.reason}"
        )
    return f"One device is predicted {best}; {ranks} ranks would be {more.reason}"


def _devices_remark(request: PlanRequest, chosen: Costed, alternatives: Sequence[Alternative]) -> str:
    """Say how many devices were chosen, and how one device compares."""
    plan = chosen.plan
    if request.degree is not None and set(axes_of(plan)) <= {"replicate"}:
        return f"{count(plan.world_size, 'rank')}, as asked"
    more = [a for a in alternatives if a.prediction and a.plan.world_size > plan.world_size]
    if plan.world_size == 1:
        if not more:
            return "One device: the request allows no more"
        return _one_device(request, chosen, more[0])
    fewer = [
        a for a in alternatives if a.prediction and a.plan.world_size == 1 and a.plan.precision == plan.precision
    ]  # in another precision, the comparison would be one of precisions
    text = f"{count(plan.world_size, 'rank')}, data parallel"
    if not set(axes_of(plan)) <= {"replicate"}:
        text = f"{count(plan.world_size, 'rank')} as {plan_words(plan)}"
    if not fewer:
        return text
    one_device = fewer[0]
    fits = one_device.prediction is not None and one_device.prediction.fits and request.objective == "throughput"
    warning = (
        _interval_warning(chosen.prediction, one_device.prediction)
        if fits and one_device.prediction is not None
        else ""
    )
    return f"{text}; one device would be {one_device.reason}{warning}"


_MIN_REPORTED_WAIT = 0.02
"""Waiting for data is not reported where it takes less than this fraction of a step."""

_MAX_STEP_FRACTION = 0.95
"""More workers are advised only where they bring the step below this fraction of its time."""

_MOST_WORKERS = 16
"""Largest number of workers per rank that is advised; also the number of cores assumed for a host that does not
tell.
"""


def sample_nbytes(model: ModelSpec) -> float:
    """Return the bytes of one sample as the model's input. As stored, it may be smaller (compressed) or larger."""
    return float(sum(math.prod(tensor.shape) * _width(tensor.dtype) for tensor in model.inputs))


def _width(dtype: str) -> float:
    """Return the bytes of a value from the name of its dtype: float32, int64, bool."""
    bits = re.search(r"\d+", dtype)
    return int(bits.group()) / 8 if bits else 1.0


def data_wait_remark(model: ModelSpec, cluster: ClusterSpec, plan: Plan, prediction: Prediction) -> str:
    """Return a sentence if a step waits for data, or may wait and the cost of samples is unknown; else nothing."""
    if model.loading is None:
        return _storage_warning(model, cluster, plan, prediction)
    step_s, data_s = prediction.step_time_s.value, prediction.phases["data"]
    if data_s <= _MIN_REPORTED_WAIT * step_s:
        return ""
    load, rest_s = load_of(model, cluster, plan), step_s - data_s
    why = _loading_cause(model.loading, load, rest_s)
    return f"A step waits {seconds(data_s)} for data ({data_s / step_s:.0%} of it): {why}" + _worker_advice(
        model, cluster, plan, load, rest_s
    )


def _storage_warning(model: ModelSpec, cluster: ClusterSpec, plan: Plan, prediction: Prediction) -> str:
    """Return a warning if reading samples may take longer than a step.

    Samples are assumed to be stored as the model takes them, and to be loaded ahead by workers at no cost.
    """
    as_taken = Loading(stored_nbytes=sample_nbytes(model), workers=1)
    batch_s = load_of(replace(model, loading=as_taken), cluster, plan).batch_s
    if not storage_known(cluster, place_ranks(cluster, plan.world_size)) or batch_s <= prediction.step_time_s.value:
        return ""
    return (
        f"Storage may be slower than that: reading a step's samples takes {seconds(batch_s)} at the hosts' rates, if "
        f"stored as the model takes them ({nbytes(sample_nbytes(model))} each); the prediction holds for data in memory"
    )


def _loading_cause(loading: Loading, load: BatchLoad, rest_s: float) -> str:
    """Name the part of loading that is slower than the rest of the step."""
    if load.storage_s >= max(load.loaders_s, rest_s):
        return f"storage gives a batch every {seconds(load.storage_s)}; faster storage or smaller files would help"
    if not load.ahead:
        return "ranks load samples between steps"
    if load.loaders_s > rest_s and loading.stream:
        return "every rank reads the whole stream; a data set with __len__ and __getitem__ would be shared"
    if load.loaders_s > rest_s:
        return f"a rank's workers give a batch every {seconds(load.loaders_s)}"
    return "the loaders' workers and the ranks share the same cores; samples that are cheaper to decode would help"


def _worker_advice(model: ModelSpec, cluster: ClusterSpec, plan: Plan, load: BatchLoad, rest_s: float) -> str:
    """Advise as many workers as keep up with the step and the cores allow; empty where they save little."""
    assert model.loading is not None
    host_groups = place_ranks(cluster, plan.world_size)
    most = min((host_cores(host_group) or _MOST_WORKERS) // host_group.ranks_per_host for host_group in host_groups)
    now = max(1, model.loading.workers)
    workers = 1 if model.loading.stream else max(1, min(math.ceil(now * load.loaders_s / rest_s), most, _MOST_WORKERS))
    if workers <= model.loading.workers:
        return ""
    more_workers = replace(model, loading=replace(model.loading, workers=workers))
    now_s, then_s = (predict(variant, cluster, plan).step_time_s.value for variant in (model, more_workers))
    return (
        f"; with prepare(..., num_workers={workers}) it would take {seconds(then_s)}"
        if then_s < _MAX_STEP_FRACTION * now_s
        else ""
    )
