"""predict: what one plan costs on one cluster. Pure: three values in, one value out."""

from dataclasses import dataclass, replace

import numpy as np

from tutti.errors import PlanError
from tutti.predict import compute, constants
from tutti.predict.batch_statistics import statistics_s
from tutti.predict.compute import Array, OpTable, Worker
from tutti.predict.counts import rank_samples, ring_sent_nbytes, samples_of
from tutti.predict.layout import Region, recompute_regions
from tutti.predict.memory import rank_memory
from tutti.predict.network import Link, ring_all_reduce
from tutti.predict.overlap import Bucket, Exchange, buckets, exchange
from tutti.predict.placement import Seat, place, ring_link, ring_tier
from tutti.predict.words import disturbed, link_note, memory_notes, time_notes
from tutti.spec import codec
from tutti.spec.cluster import ClusterSpec, DeviceKind
from tutti.spec.model import ModelSpec
from tutti.spec.plan import Plan
from tutti.spec.prediction import Estimate, Phase, Prediction, RankMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """Seconds of a step's own work on one rank. `last_backward_s`: by module, in order of backward, of the last
    microbatch, the one that communicates. `limits`: seconds by what limits them."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    last_backward_s: Array
    limits: dict[str, float]

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One kind of rank: its seat, what it computes with, and (samples, in how many microbatches), the last last."""

    seat: Seat
    worker: Worker
    samples: tuple[tuple[int, int], ...]


def predict(model: ModelSpec, cluster: ClusterSpec, plan: Plan) -> Prediction:
    """Estimate the step time and memory of `plan`.

    Raises PlanError where the plan cannot be costed: more ranks than CUDA devices, a precision or a link that the
    cluster does not describe, a batch in tokens of unknown number.
    """
    _check_mesh(plan)
    seats = place(cluster, plan.world_size)
    samples = samples_of(plan.batch.global_batch_size, plan.batch.unit, model.tokens_per_sample)
    if plan.batch.num_microbatches > samples:
        raise PlanError(
            f"num_microbatches = {plan.batch.num_microbatches} exceeds the {samples} samples of a global batch; "
            f"set batch.num_microbatches to at most {samples}"
        )
    ranks = _ranks(model, plan, seats, samples)
    table, regions = compute.op_table(model), recompute_regions(model, plan)
    works = [rank_work(model, table, regions, rank) for rank in ranks]
    index = max(range(len(ranks)), key=lambda index: works[index].total_s)
    slowest, work = ranks[index], works[index]
    link = ring_link(cluster, seats) if plan.world_size > 1 else None
    if link is not None:
        work = _with_statistics(work, *statistics_s(model, plan, link))
    fused = _fused(model, plan)
    exchanged = _exchange(plan, work, fused, link, seats)
    memory, seat = _memory(model, plan, ranks, regions, fused)
    other_s = constants.STEP_OVERHEAD_S * slowest.worker.slowdown
    step_s = work.total_s + exchanged.exposed_s + other_s
    margin = _margin(cluster, slowest.worker, link, exchanged.exposed_s / step_s)
    units = plan.batch.global_batch_size if plan.batch.unit == "tokens" else samples
    return Prediction(
        plan_digest=codec.digest(plan),
        step_time_s=_estimate(step_s, margin),
        phases=_phases(work, exchanged, other_s),
        memory_nbytes=_estimate(memory.total, constants.MEMORY_MARGIN),
        memory=memory,
        fits=memory.total <= seat.memory_nbytes,
        sent_nbytes_per_rank=ring_sent_nbytes(_gradient_nbytes(model), plan.data_parallel_degree),
        throughput_per_s=units / step_s,
        model_flops_per_s=(model.flops_forward + model.flops_backward) * samples / step_s,
        devices=plan.world_size,
        notes=(
            *time_notes(seats, slowest.seat, slowest.worker, work.limits, exchanged, margin),
            *((link_note(link),) if link else ()),
            *memory_notes(memory, seat),
            *disturbed(cluster),
            *model.notes,
        ),
    )


def _check_mesh(plan: Plan) -> None:
    unknown = [axis for axis, degree in plan.mesh.items() if degree > 1 and axis != "replicate"]
    if unknown:
        raise PlanError(
            f"the time of a step over mesh.{', mesh.'.join(unknown)} is not predicted yet; the plan runs and is "
            "verified all the same (tutti run --no-predict)"
        )


def _with_statistics(work: RankWork, forward_s: float, backward_s: float) -> RankWork:
    """The work with its exchanges of batch statistics, which forward and backward wait for."""
    return replace(work, forward_s=work.forward_s + forward_s, backward_s=work.backward_s + backward_s)


def _margin(cluster: ClusterSpec, worker: Worker, link: Link | None, exposed: float) -> float:
    """Half-width of the time's interval: that of compute and that of links, by their parts of the step.

    Rates that were measured beside other work are worth no more than assumptions.
    """
    if disturbed(cluster):
        return constants.STEP_MARGIN["assumed"]
    links = constants.STEP_MARGIN[link.evidence] if link else 0.0
    return (1 - exposed) * constants.STEP_MARGIN[worker.evidence] + exposed * links


def _phases(work: RankWork, exchanged: Exchange, other_s: float) -> dict[Phase, float]:
    return {
        "data": 0.0,
        "forward": work.forward_s,
        "backward": work.backward_s,
        "exposed_communication": exchanged.exposed_s,
        "optimizer": work.optimizer_s,
        "evaluation": 0.0,
        "other": other_s,
    }


def _ranks(model: ModelSpec, plan: Plan, seats: tuple[Seat, ...], samples: int) -> list[Rank]:
    """The different kinds of ranks: those of one seat with equal samples count once."""
    counts = rank_samples(samples, plan.batch.num_microbatches, plan.world_size, plan.shares)
    kinds: list[Rank] = []
    first = 0
    for seat in seats:
        worker = compute.worker(seat, model.dtype, plan.precision)
        seen = dict.fromkeys(counts[first : first + seat.ranks])
        kinds.extend(Rank(seat=seat, worker=worker, samples=samples_of_rank) for samples_of_rank in seen)
        first += seat.ranks
    return kinds


def rank_work(model: ModelSpec, table: OpTable, regions: tuple[Region, ...], rank: Rank) -> RankWork:
    """The work of a rank; a recomputed module's forward counts twice."""
    worker = rank.worker
    modules = len(model.modules)
    again = np.zeros(modules)
    again[[index for region in regions for index in region.members]] = 1.0
    forward_s = backward_s = 0.0
    limits = {"compute": 0.0, "memory traffic": 0.0, "operator calls": 0.0}
    last = np.zeros(modules)
    for count, times in rank.samples:
        ahead = compute.forward(table, worker, count, modules)
        back = compute.backward(table, worker, count, modules)
        last = back.seconds + again * ahead.seconds
        forward_s += times * float(ahead.seconds.sum())
        backward_s += times * float(last.sum())
        repeat = float((again * ahead.seconds).sum() / ahead.seconds.sum()) if ahead.seconds.any() else 0.0
        limits["compute"] += times * ((1 + repeat) * ahead.compute_s + back.compute_s)
        limits["memory traffic"] += times * ((1 + repeat) * ahead.memory_s + back.memory_s)
        limits["operator calls"] += times * ((1 + repeat) * ahead.overhead_s + back.overhead_s)
    traffic, calls = update_cost(model, rank.seat.device.kind)
    # From the second microbatch on, gradients are read, added to and written.
    accumulate_s = (
        (sum(times for _, times in rank.samples) - 1)
        * 3
        * _gradient_nbytes(model)
        / worker.bandwidth_bytes_per_s
        * worker.slowdown
    )
    optimizer_traffic_s = worker.slowdown * traffic / worker.bandwidth_bytes_per_s
    optimizer_calls_s = worker.slowdown * calls * worker.kernel_overhead_s
    limits["memory traffic"] += accumulate_s + optimizer_traffic_s
    limits["operator calls"] += optimizer_calls_s
    return RankWork(
        forward_s=forward_s,
        backward_s=backward_s + accumulate_s,
        optimizer_s=optimizer_traffic_s + optimizer_calls_s,
        last_backward_s=last[::-1],
        limits=limits,
    )


def update_cost(model: ModelSpec, kind: DeviceKind) -> tuple[float, float]:
    """(bytes, bare operator calls) of one optimizer update. On CUDA one multi-tensor kernel takes many tensors."""
    trainable = [module for module in model.modules if module.gradient_nbytes]
    passes = constants.OPTIMIZER_PASSES.get(model.optimizer, constants.OPTIMIZER_PASSES_OTHER)
    traffic = sum(3.0 * module.gradient_nbytes + passes * module.optimizer_nbytes for module in trainable)
    per_tensor = constants.OPTIMIZER_CALLS.get(model.optimizer, constants.OPTIMIZER_CALLS_OTHER)
    tensors = constants.TENSORS_PER_MODULE * len(trainable)
    groups = -(-tensors // constants.FUSED_TENSORS) if kind == "cuda" else tensors
    return traffic, float(per_tensor * groups)


def _gradient_nbytes(model: ModelSpec) -> float:
    return float(sum(module.gradient_nbytes for module in model.modules))


def _fused(model: ModelSpec, plan: Plan) -> tuple[Bucket, ...]:
    """DDP's buckets over the modules in order of backward; none on one rank."""
    if plan.data_parallel_degree == 1:
        return ()
    return buckets([module.gradient_nbytes for module in model.modules], plan.sync.bucket_nbytes)


def _exchange(
    plan: Plan, work: RankWork, fused: tuple[Bucket, ...], link: Link | None, seats: tuple[Seat, ...]
) -> Exchange:
    if link is None:
        return Exchange(total_s=0.0, exposed_s=0.0)
    degree = plan.data_parallel_degree
    on_cpu = seats[0].device.kind == "cpu"
    gradients = exchange(
        work.last_backward_s.tolist(),
        fused,
        [ring_all_reduce(link, bucket.nbytes, degree) for bucket in fused],
        compute_share=constants.CPU_COMMUNICATION_SHARE[ring_tier(seats)] if on_cpu else 0.0,
    )
    loss_s = ring_all_reduce(link, constants.LOSS_NBYTES, degree)
    return Exchange(total_s=gradients.total_s + loss_s, exposed_s=gradients.exposed_s + loss_s)


def _memory(
    model: ModelSpec, plan: Plan, ranks: list[Rank], regions: tuple[Region, ...], fused: tuple[Bucket, ...]
) -> tuple[RankMemory, Seat]:
    """The memory of the rank with the least room left, and its seat."""
    pairs = [
        (
            rank_memory(
                model,
                plan,
                regions=regions,
                slice_samples=max(count for count, _ in rank.samples),
                bucket_nbytes=max((bucket.nbytes for bucket in fused), default=0.0),
                kind=rank.seat.device.kind,
            ),
            rank.seat,
        )
        for rank in ranks
    ]
    return min(pairs, key=lambda pair: pair[1].memory_nbytes - pair[0].total)


def _estimate(value: float, margin: float) -> Estimate:
    return Estimate(value=value, low=value / (1 + margin), high=value * (1 + margin))
