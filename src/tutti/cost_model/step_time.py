"""`predict`: the cost of one plan on one cluster. A pure function of the model, the cluster and the plan."""

from dataclasses import dataclass, field, replace

import tutti.cost_model.cost_constants as cost_constants
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.consistency_modes import CONSISTENCY_MODES
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Estimate, Phase, Prediction, RankMemory, WarmupSpan
from tutti.config.refusals import check_plan
from tutti.cost_model.compressed_sync_cost import kernel_notes, phases
from tutti.cost_model.compute_cost import update_temporaries
from tutti.cost_model.cost_notes import (
    activation_notes,
    allocator_memory,
    disturbed,
    link_note,
    memory_notes,
    time_notes,
)
from tutti.cost_model.gradient_sync_cost import Sync, synchronise
from tutti.cost_model.group_links import RankGroup, network
from tutti.cost_model.loading_time import BatchLoad, data_note, feeds, most
from tutti.cost_model.memory_cost import held_by_stage, kept, rank_memory
from tutti.cost_model.microbatch_cost import Wires
from tutti.cost_model.module_costs import model_table
from tutti.cost_model.offload_cost import disk_limit_nbytes, host_limit_nbytes
from tutti.cost_model.overlap import BucketCost, CommCost
from tutti.cost_model.pipeline_cost import PipelineReplica, replicas_of
from tutti.cost_model.rank_placement import HostGroup, Link, place_ranks, samples_of
from tutti.cost_model.relaxed_sync_cost import check_diverged, diverged_notes
from tutti.cost_model.stage_cuts import stages_of
from tutti.cost_model.step_timeline import RankWork, Setting, replica_load, replica_work, workers_of
from tutti.cost_model.work_division import division, offload_regions, parts, recompute_regions
from tutti.cost_model.worker_speed import Worker
from tutti.errors import PlanError


def predict(model: ModelSpec, cluster: ClusterSpec, plan: Plan) -> Prediction:
    """Estimate the step time and memory of `plan`.

    Where the first updates exchange something else (warm-up of a codec, synchronous steps before local ones),
    their steps are estimated as well.

    Raises:
        PlanError: the plan cannot be costed. Its axes exclude each other, or divide nothing of the model, or do
        not divide it evenly; there are more ranks than CUDA devices; the cluster does not describe the precision
        or a link; or the batch is in tokens and the tokens of a sample are unknown.
    """
    final = _predict(model, cluster, plan, None)
    first = []
    for until, now, updates in _warmup(plan):
        early = _predict(model, cluster, now, updates)
        sent = early.sent_nbytes_per_rank
        first.append(WarmupSpan(until=until, step_time_s=early.step_time_s.value, sent_nbytes_per_rank=sent))
    return replace(final, first=tuple(first)) if first else final


def _warmup(plan: Plan) -> list[tuple[int, Plan, int | None]]:
    """Return the phases before the final one, in order: (last update, plan in force, update that is costed)."""
    if plan.sync.relaxed.after and plan.world_size > 1:
        return [(plan.sync.relaxed.after, replace(plan, sync=plan.sync.at_first), None)]
    return [(until, plan, until - 1) for until in phases(plan)]


def _predict(model: ModelSpec, cluster: ClusterSpec, plan: Plan, updates: int | None) -> Prediction:
    """Estimate a step after `updates` updates; None: warm-up is over."""
    step = worked_out(model, cluster, plan, updates)
    setting, samples, host_groups = step.setting, step.samples, step.setting.wires.network.host_groups
    slowest = slowest_of(setting, [work for replica in step.replicas for work in replica_work(setting, replica)])
    worker, work, sync = setting.workers[slowest.work.host_group], slowest.work, slowest.sync
    everyone = setting.wires.network.group(*plan.mesh)
    beside_s = work.waits_s + loss_s(setting)
    exchange = CommCost(total_s=sync.exchange.total_s + beside_s, exposed_s=sync.exchange.exposed_s + beside_s)
    memory, host_group, when = min(
        memories(setting, step.replicas, slowest.syncs).values(),
        key=lambda entry: entry[1].memory_nbytes - entry[0].total,
    )
    other_s = overhead_s(setting, work)
    data_s = wait_s(setting, work, sync.exchange.exposed_s)
    step_s = data_s + work.forward_s + work.backward_s + work.optimizer_s + exchange.exposed_s + other_s
    link = everyone.link if everyone.ranks > 1 else None
    margin = _margin(cluster, worker, link, exchange.exposed_s / step_s)
    units = plan.batch.global_batch_size if plan.batch.unit == "tokens" else samples
    return Prediction(
        plan_digest=serialization.digest(plan),
        step_time_s=_estimate(step_s, margin),
        phases=_phases(data_s, work, exchange, other_s),
        memory_nbytes=_estimate(memory.total, cost_constants.MEMORY_MARGIN),
        memory=memory,
        allocator=allocator_memory(memory, host_group),
        fits=memory.total <= host_group.memory_nbytes
        and memory.host <= host_limit_nbytes(host_group)
        and memory.disk <= disk_limit_nbytes(host_group),
        sent_nbytes_per_rank=slowest.sent_nbytes,
        throughput_per_s=units / step_s,
        model_flops_per_s=setting.wires.columns.sample_flops * samples / step_s,
        devices=plan.world_size,
        notes=(
            *time_notes(
                host_groups, setting.host_groups[work.host_group], worker, work.limits, exchange, margin, data_s, link
            ),
            data_note(cluster, model, host_groups, work.load, data_s),
            *diverged_notes(plan.sync),
            *kernel_notes(plan, setting.host_groups[work.host_group].device),
            *_axes_notes(setting),
            *((link_note(link),) if link else ()),
            *memory_notes(memory, host_group, when),
            *activation_notes(plan, host_group),
            *disturbed(cluster),
            *model.notes,
        ),
    )


def loss_s(setting: Setting) -> float:
    """Return the seconds of the all-reduce of the losses; 0 where ranks do not wait for each other."""
    if CONSISTENCY_MODES[setting.plan.sync.mode].asynchronous:
        return 0.0
    return setting.wires.network.group(*setting.plan.mesh).all_reduce(cost_constants.LOSS_NBYTES)


def overhead_s(setting: Setting, work: RankWork) -> float:
    """Return the seconds of a rank's step outside of operators."""
    worker = setting.workers[work.host_group]
    cpu = setting.host_groups[work.host_group].device.kind == "cpu"
    return worker.slowdown * (
        cost_constants.STEP_CALLS * worker.kernel_overhead_s if cpu else cost_constants.STEP_OVERHEAD_S
    )


def wait_s(setting: Setting, work: RankWork, exposed_s: float) -> float:
    """Return the seconds that a rank waits for its batch.

    Args:
        exposed_s: seconds that the rank waits for communication that happens once a step.
    """
    if work.load.free:
        return 0.0
    idle_s = work.waits_s + exposed_s + loss_s(setting)
    computes_s = work.forward_s + work.backward_s + work.optimizer_s + overhead_s(setting, work)
    return work.load.exposed_s(computes_s + idle_s, idle_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step before it is costed.

    Attributes:
        samples: samples of a global batch.
        replicas: the pipeline replicas that differ from each other.
    """

    setting: Setting
    samples: int
    replicas: list[PipelineReplica]


def worked_out(model: ModelSpec, cluster: ClusterSpec, plan: Plan, updates: int | None = None) -> Step:
    """Distribute a step after `updates` updates over the ranks and their devices.

    Raises:
        PlanError: as in `predict`.
    """
    check_plan(plan)
    samples = _samples(model, plan)
    host_groups = place_ranks(cluster, plan.world_size)
    setting = replace(_setting(model, cluster, plan, host_groups, samples), updates=updates)
    check_diverged(plan, setting.wires.network)
    return Step(setting=setting, samples=samples, replicas=replicas_of(plan, host_groups, samples))


def load_of(model: ModelSpec, cluster: ClusterSpec, plan: Plan) -> BatchLoad:
    """Return how the samples of a step are loaded on the ranks that load most.

    Raises:
        PlanError: as in `predict`.
    """
    step = worked_out(model, cluster, plan)
    return most(replica_load(step.setting, replica) for replica in step.replicas)


def _samples(model: ModelSpec, plan: Plan) -> int:
    """Return the samples of a global batch; refuse more microbatches than samples."""
    samples = samples_of(plan.batch.global_batch_size, plan.batch.unit, model.tokens_per_sample)
    if plan.batch.num_microbatches > samples:
        raise PlanError(
            f"num_microbatches = {plan.batch.num_microbatches} exceeds the {samples} samples of a global batch; "
            f"set batch.num_microbatches to at most {samples}"
        )
    return samples


def _setting(
    model: ModelSpec, cluster: ClusterSpec, plan: Plan, host_groups: tuple[HostGroup, ...], samples: int
) -> Setting:
    """Return what all replicas of a plan have in common."""
    wires = Wires(
        model=model,
        plan=plan,
        columns=model_table(model),
        division=division(model, plan),
        network=network(cluster, host_groups, plan),
        half=plan.precision in ("bfloat16", "float16"),
        on_cpu=host_groups[0].device.kind == "cpu",
    )
    divisions, feeding = parts(model, plan), feeds(model, cluster, plan, host_groups, samples)
    return Setting(
        model=model,
        plan=plan,
        host_groups=tuple(host_group for host_group in host_groups for _ in divisions),
        workers=tuple(worker for worker in workers_of(model, plan, host_groups) for _ in divisions),
        parts=divisions * len(host_groups),
        wires=wires,
        stages=stages_of(model, plan),
        regions=recompute_regions(model, plan),
        feeds=tuple(feed for feed in feeding for _ in divisions),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """The rank that ends last.

    Attributes:
        work: its work.
        sync: its gradient reductions.
        syncs: the gradient reductions of each stage.
        sent_nbytes: bytes sent by the rank that sends most.
    """

    work: RankWork
    sync: Sync
    syncs: dict[int, Sync]
    sent_nbytes: float


def slowest_of(setting: Setting, works: list[RankWork]) -> Slowest:
    """Find the rank that ends last, communication that happens once a step included."""

    def lasts_s(work: RankWork, exposed_s: float = 0.0) -> float:
        return work.total_s + exposed_s + overhead_s(setting, work) + wait_s(setting, work, exposed_s)

    longest: dict[tuple[int, int], RankWork] = {}
    # Of each kind of rank at a place, the one with the most work ends last: more work hides no more than its own time.
    for work in works:
        key = work.stage, work.host_group
        if key not in longest or lasts_s(work) > lasts_s(longest[key]):
            longest[key] = work
    latest: dict[int, tuple[float, RankWork, Sync]] = {}
    once = _Once(setting=setting)
    for work in sorted(longest.values(), key=lasts_s, reverse=True):
        least_s, _, sync = latest.get(work.stage, (-1.0, None, None))
        if sync is None or lasts_s(work) + sync.exchange.total_s > least_s:
            sync = once.of(work)
            end_s = lasts_s(work, sync.exchange.exposed_s)
            if end_s > least_s:
                latest[work.stage] = end_s, work, sync
    _, last, sync = max(latest.values(), key=lambda entry: entry[0])
    syncs = {stage: stage_sync for stage, (_, _, stage_sync) in latest.items()}
    return Slowest(
        work=last,
        sync=sync,
        syncs=syncs,
        sent_nbytes=max(work.sent_nbytes + syncs[work.stage].sent_nbytes for work in works),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Once:
    """The communication that happens once a step.

    Attributes:
        known: cached results. Stages of equal blocks exchange alike.
    """

    setting: Setting
    known: dict[object, Sync] = field(default_factory=dict)

    def of(self, work: RankWork) -> Sync:
        """Return the communication of one rank."""
        setting, wires = self.setting, self.setting.wires
        columns, own = wires.columns, setting.own(work.stage)
        weights = columns.gradients * wires.division.weight
        nbytes = [float(weights[setting.own(stage)].sum()) for stage in range(setting.plan.degree("stage"))]
        net = wires.network.of_stage(work.stage, nbytes)
        like = (columns.gradients, columns.expert, columns.table, columns.sequence, *work.passes, *work.taken.backward)
        key = (
            *(column[own].tobytes() for column in like),
            work.taken.after.tobytes(),
            work.optimizer_s,
            net.concurrent_fraction,
        )
        if key not in self.known:
            self.known[key] = synchronise(
                columns,
                wires.division,
                net,
                setting.plan,
                own,
                work.passes,
                work.taken,
                setting.updates,
                work.optimizer_s,
            )
        return self.known[key]


def _axes_notes(setting: Setting) -> tuple[str, ...]:
    """Describe where the groups of each axis communicate.

    There is no note for a mesh that has only the replicate axis.
    """
    named = [axis for axis, degree in setting.plan.mesh.items() if degree > 1]
    if named in ([], ["replicate"]):
        return ()
    places = [f"{axis} {setting.plan.mesh[axis]} {_where(setting.wires.network.group(axis))}" for axis in named]
    return ("groups: " + ", ".join(places),)


def _where(group: RankGroup) -> str:
    """Describe the hosts over which a group extends."""
    span = group.span
    if span.hosts == 1:
        return "within a host"
    return f"over {span.hosts} hosts" + (
        f" ({span.sharing_groups} groups share a host's connection)" if span.sharing_groups > 1 else ""
    )


def _margin(cluster: ClusterSpec, worker: Worker, link: Link | None, exposed: float) -> float:
    """Return the relative half-width of the time's interval: margins of compute and of links, weighted by their
    parts of the step.

    Rates measured beside other work are worth no more than assumptions.

    Args:
        exposed: exposed communication as a fraction of the step.
    """
    if disturbed(cluster):
        return cost_constants.STEP_MARGIN["assumed"]
    links = cost_constants.STEP_MARGIN[link.evidence] if link else 0.0
    return (1 - exposed) * cost_constants.STEP_MARGIN[worker.evidence] + exposed * links


def _phases(data_s: float, work: RankWork, exchanged: CommCost, other_s: float) -> dict[Phase, float]:
    return {
        "data": data_s,
        "forward": work.forward_s,
        "backward": work.backward_s,
        "exposed_communication": exchanged.exposed_s,
        "optimizer": work.optimizer_s,
        "evaluation": 0.0,
        "other": other_s,
    }


Held = tuple[RankMemory, HostGroup, str]
"""The memory of a rank, its host group, and when the memory is at its peak."""


def memories(
    setting: Setting, replicas: list[PipelineReplica], syncs: dict[int, Sync]
) -> dict[tuple[int, tuple[int, int], int], Held]:
    """Return the memory of the ranks.

    Keys are (place on the stage axis, (samples, number) of the last microbatches, kind of rank).
    """
    wires, plan = setting.wires, setting.plan
    models = {
        id(part): held_by_stage(
            wires.columns,
            part,
            setting.stages,
            kept(wires.columns, part, setting.regions, half=wires.half),
            plan,
            update_temporaries(wires.model),
            offload_regions(wires.model, plan.layout),
        )
        for part in setting.parts
    }
    by_kind: dict[tuple[int, tuple[int, int], int], Held] = {}
    cached = wires.model.cached if wires.half else ()
    for replica in replicas:
        for stage, kinds in enumerate(replica.host_groups):
            fused: tuple[BucketCost, ...] = syncs[stage].buckets
            samples = replica.microbatches
            for host_group in kinds:
                key = (stage, replica.samples[-1], host_group)
                if key not in by_kind:
                    kind, model = setting.host_groups[host_group].device.kind, models[id(setting.parts[host_group])]
                    memory, when = rank_memory(
                        model, plan, samples=samples, stage=stage, fused=fused, kind=kind, cached=cached
                    )
                    if kind == "cpu":
                        memory = replace(memory, script=wires.model.script_nbytes)
                    by_kind[key] = (memory, setting.host_groups[host_group], when)
    return by_kind


def _estimate(value: float, margin: float) -> Estimate:
    return Estimate(value=value, low=value / (1 + margin), high=value * (1 + margin))
