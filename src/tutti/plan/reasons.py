"""Why a plan lost, and what a choice means, in words with numbers."""

from collections.abc import Sequence

from tutti.plan.choice import Alternative, Request
from tutti.predict.placement import place, ring_link, ring_tier
from tutti.predict.words import bits_per_s, count, nbytes, seconds
from tutti.spec.cluster import ClusterSpec
from tutti.spec.model import ModelSpec
from tutti.spec.plan import Plan
from tutti.spec.prediction import Prediction

Costed = tuple[Plan, Prediction]


def budget_nbytes(cluster: ClusterSpec, plan: Plan) -> float:
    """Memory that each rank of a plan may fill, on its smallest device."""
    return min(seat.memory_nbytes for seat in place(cluster, plan.world_size))


def why(cluster: ClusterSpec, loser: Costed, best: Costed) -> str:
    """Why `loser` was not chosen over `best`, in one phrase."""
    plan, prediction = loser
    if not prediction.fits:
        return (
            f"does not fit: needs {nbytes(prediction.memory.total)} for each rank ({_largest_part(prediction)}), "
            f"there are {nbytes(budget_nbytes(cluster, plan))}"
        )
    ratio = prediction.step_time_s.value / best[1].step_time_s.value
    if ratio <= 1.02:
        return _tie(plan, best[0], ratio)
    return f"{ratio:.2f}x slower: {_cause(cluster, loser, best)}"


def _tie(plan: Plan, best: Plan, ratio: float) -> str:
    same = "as fast within 2 %" if ratio >= 0.995 else f"{1 - ratio:.1%} faster, which is within the error"
    if plan.world_size > best.world_size:
        return f"{same}, but takes {plan.world_size} devices instead of {best.world_size}"
    if plan.precision != best.precision:
        return f"{same}, but computes in {plan.precision}"
    if plan.batch.num_microbatches > best.batch.num_microbatches:
        return f"{same}, but needs {plan.batch.num_microbatches} microbatches"
    return f"{ratio - 1:.1%} slower" if ratio > 1 else same


def _cause(cluster: ClusterSpec, loser: Costed, best: Costed) -> str:
    """The part of the step that makes the largest difference."""
    (plan, slow), (chosen, fast) = loser, best
    own = {
        "compute": _compute_s(slow) - _compute_s(fast),
        "communication": slow.phases["exposed_communication"] - fast.phases["exposed_communication"],
        "optimizer": slow.phases["optimizer"] - fast.phases["optimizer"],
        "other": slow.phases["other"] - fast.phases["other"],
    }
    part = max(own, key=lambda name: own[name])
    if part == "communication":
        return _communication_cause(cluster, plan, slow)
    if part == "optimizer":
        return (
            f"{plan.world_size} ranks that share a memory update all parameters each: the optimizer takes "
            f"{seconds(slow.phases['optimizer'])} against {seconds(fast.phases['optimizer'])}"
        )
    against = f"{seconds(_compute_s(slow))} of compute against {seconds(_compute_s(fast))}"
    seats = place(cluster, plan.world_size)
    crowded = [seat for seat in seats if seat.oversubscribed > 1]
    if crowded:
        return f"{crowded[0].sharing} ranks share {count(crowded[0].device.cores, 'core')}; {against}"
    if plan.precision != chosen.precision:
        return f"{plan.precision} is slower on {seats[0].device.name}; {against}"
    if plan.world_size < chosen.world_size:
        who = (
            "one rank computes all samples"
            if plan.world_size == 1
            else f"each of {plan.world_size} ranks computes more"
        )
        return f"{who}; {against}"
    if plan.shares != chosen.shares and not plan.shares:
        slowest = {seat.device.name for seat in seats}
        return f"equal shares on unequal devices ({', '.join(sorted(slowest))}); {against}"
    if plan.batch.num_microbatches > chosen.batch.num_microbatches:
        return f"{plan.batch.num_microbatches} microbatches of smaller, less efficient operators; {against}"
    idle = seats[0].device.cores - seats[0].sharing * seats[0].threads if seats[0].device.kind == "cpu" else 0
    if idle > 0:
        return f"{count(plan.world_size, 'rank')} leave {count(idle, 'core')} idle; {against}"
    return f"ranks share cores and memory bandwidth; {against}"


def _communication_cause(cluster: ClusterSpec, plan: Plan, slow: Prediction) -> str:
    seats = place(cluster, plan.world_size)
    link = ring_link(cluster, seats)
    return (
        f"{seconds(slow.phases['exposed_communication'])} of exposed communication at "
        f"{bits_per_s(link.bandwidth_bytes_per_s)} ({ring_tier(seats)})"
    )


def _compute_s(prediction: Prediction) -> float:
    return prediction.phases["forward"] + prediction.phases["backward"]


def _largest_part(prediction: Prediction) -> str:
    memory = prediction.memory
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
        "libraries": memory.reserve,
    }
    ordered = sorted(parts.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {nbytes(value)}" for name, value in ordered)


def no_fit(model: ModelSpec, cluster: ClusterSpec, costed: Sequence[Costed]) -> str:
    """The sentence that refuses a model no candidate can hold: its smallest need against what there is."""
    plan, prediction = min(costed, key=lambda one: one[1].memory.total - budget_nbytes(cluster, one[0]))
    memory = prediction.memory
    seats = place(cluster, plan.world_size)
    state = memory.parameters + memory.gradients + memory.optimizer
    budget = budget_nbytes(cluster, plan)
    remedy = (
        "data parallelism keeps a copy of all of that on every rank; use devices with more memory or a smaller model"
        if state > budget
        else "use a smaller global_batch_size, more microbatches, recompute in the layout, or devices with more memory"
    )
    return (
        f"model {model.name!r} does not fit on cluster {cluster.name!r}: the smallest plan "
        f"({count(plan.world_size, 'rank')}, {count(plan.batch.num_microbatches, 'microbatch')}) needs "
        f"{nbytes(memory.total)} for each rank (parameters {nbytes(memory.parameters)}, gradients "
        f"{nbytes(memory.gradients)}, optimizer state {nbytes(memory.optimizer)}, activations "
        f"{nbytes(memory.activations)}), but {seats[0].device.name} has {nbytes(budget)}; {remedy}"
    )


def remarks(
    model: ModelSpec,
    cluster: ClusterSpec,
    request: Request,
    best: Costed,
    alternatives: Sequence[Alternative],
) -> tuple[str, ...]:
    """What the choice means, in sentences: how many devices and why no more, what limits, what was held fixed."""
    plan, prediction = best
    said = [_devices_remark(cluster, request, plan, alternatives)]
    said.append(prediction.notes[0][0].upper() + prediction.notes[0][1:])
    if request.precision == "script" and plan.precision == "full":
        faster = [a for a in alternatives if a.prediction and a.plan.precision != "full" and a.prediction.fits]
        said.append(
            "Precision stays as the script has it (full), because another changes the numbers"
            + ("; --precision auto would allow a faster one" if faster else "")
        )
    if request.keep_microbatches:
        said.append(f"The number of microbatches stays {plan.batch.num_microbatches}, as asked")
    elif model.batch_statistics and not request.allow_microbatches:
        said.append(
            f"The number of microbatches stays {plan.batch.num_microbatches}, because this model normalises over "
            "the batch and would compute something else; --allow-microbatches lifts that"
        )
    elif plan.batch.num_microbatches != request.script.batch.num_microbatches:
        said.append(
            f"The batch is cut into {count(plan.batch.num_microbatches, 'microbatch')} instead of the script's "
            f"{request.script.batch.num_microbatches}: the same sum of gradients, other memory and speed"
        )
    if plan.shares:
        said.append("Shares follow the devices' speeds, so that all finish together")
    return tuple(said)


def _devices_remark(cluster: ClusterSpec, request: Request, plan: Plan, alternatives: Sequence[Alternative]) -> str:
    if request.degree is not None:
        return f"{count(plan.world_size, 'rank')}, as asked"
    more = [a for a in alternatives if a.prediction and a.plan.world_size > plan.world_size]
    if plan.world_size == 1:
        if not more:
            return "One device: no more were to be considered"
        return f"One device is predicted to be the fastest; {more[0].plan.world_size} ranks would be {more[0].reason}"
    fewer = [a for a in alternatives if a.prediction and a.plan.world_size == 1]
    text = f"{plan.world_size} ranks, data parallel"
    return f"{text}; one device would be {fewer[0].reason}" if fewer else text
