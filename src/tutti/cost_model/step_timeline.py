"""The step of one pipeline replica: the ranks that compute one share of the batch together, stage by stage."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

import tutti.cost_model.cost_constants as cost_constants
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.cost_model.compute_cost import accumulation_s, update_calls, update_nbytes
from tutti.cost_model.cost_notes import STAGES
from tutti.cost_model.loading_time import BatchLoad, Feed, most
from tutti.cost_model.memory_cost import kept
from tutti.cost_model.microbatch_cost import Passed, Wires, each_of, passed
from tutti.cost_model.module_costs import Flags
from tutti.cost_model.offload_cost import (
    is_offloaded,
    moved_nbytes,
    saved_copies_s,
    update_bytes_per_s,
    update_with_disk_s,
)
from tutti.cost_model.overlap import TIERS, Taken
from tutti.cost_model.pipeline_cost import (
    Actions,
    Messages,
    Oversubscription,
    PipelineReplica,
    by_share_and_stage,
    oversubscription_of,
)
from tutti.cost_model.rank_placement import HostGroup, message
from tutti.cost_model.stage_cuts import StageCuts
from tutti.cost_model.work_division import Division, Region, offload_regions
from tutti.cost_model.worker_speed import Array, Worker, worker_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all replicas of a plan have in common.

    `host_groups`, `workers`, `parts` and `feeds` have one entry for each kind of rank
    (`pipeline_cost.kinds_of_ranks`).

    Attributes:
        host_groups: where ranks of this kind are placed.
        workers: their speed.
        parts: their part of each module.
        wires: what exchanges depend on, with the largest part of each module.
        feeds: how they load their samples.
        updates: updates made before the step; None: more than any warm-up has.
    """

    model: ModelSpec
    plan: Plan
    host_groups: tuple[HostGroup, ...]
    workers: tuple[Worker, ...]
    parts: tuple[Division, ...]
    wires: Wires
    stages: StageCuts
    regions: tuple[Region, ...]
    feeds: tuple[Feed, ...]
    updates: int | None = None

    def own(self, stage: int) -> Flags:
        """Return a mask of the modules on one place of the stage axis."""
        modules: Flags = self.stages.stage % self.plan.degree("stage") == stage
        return modules

    def wires_of(self, host_group: int) -> Wires:
        """Return what the exchanges of one kind of rank depend on."""
        return replace(self.wires, division=self.parts[host_group]) if self.plan.split_weights else self.wires

    def gradients(self, host_group: int) -> Array:
        """Return the bytes of the gradients that one kind of rank has, by module."""
        nbytes: Array = self.wires.columns.gradients * self.parts[host_group].weight
        return nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """The step of one rank, in seconds.

    Attributes:
        stage: its place on the stage axis.
        host_group: its kind of rank.
        waits_s: waiting for other ranks, in exchanges and in the pipeline.
        passes: (forward, backward) of the last microbatch by module, exchanges included.
        limits: seconds of the rank's own work by what limits it, and those of `waits_s` that wait for other
            stages.
        sent_nbytes: bytes that it sends for its microbatches.
        taken: when links carry the exchanges of its passes.
        load: how the samples of its replica are loaded.
    """

    replica: PipelineReplica
    stage: int
    host_group: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    waits_s: float
    passes: tuple[Array, Array]
    limits: dict[str, float]
    sent_nbytes: float
    taken: Taken
    load: BatchLoad

    @property
    def total_s(self) -> float:
        """Seconds of the step without the wait for data."""
        return self.forward_s + self.backward_s + self.optimizer_s + self.waits_s

    def stretched(self, factor: float) -> "RankWork":
        """Return the same work with forward and backward `factor` times as long."""
        if factor == 1.0:
            return self
        return replace(self, forward_s=factor * self.forward_s, backward_s=factor * self.backward_s)


def replica_work(setting: Setting, replica: PipelineReplica) -> list[RankWork]:
    """Return the work of a replica, one entry for each place on the stage axis.

    Each entry is that of the kind of rank at that place that ends last.
    """
    known = passes_of(setting, replica)
    places = [
        [_own_work(setting, replica, stage, host_group, known) for host_group in kinds]
        for stage, kinds in enumerate(replica.host_groups)
    ]
    if len(places) > 1:
        ended, stretch = actions_of(setting, replica, known).ends(setting.plan)
        rows = zip(places, ended, stretch, _sent_nbytes(setting, replica), strict=True)
        places = [
            [_among(setting, work.stretched(factor), end, nbytes) for work in kinds]
            for kinds, end, factor, nbytes in rows
        ]
    return [max(kinds, key=lambda work: work.total_s) for kinds in places]


def _among(setting: Setting, one: RankWork, end: float, nbytes: float) -> RankWork:
    """Return a rank's work within a pipeline.

    Args:
        end: when the rank has finished all its actions.
        nbytes: bytes that it sends to other stages.
    """
    waits_s = max(0.0, end - one.forward_s - one.backward_s)
    limits = {**one.limits, STAGES: max(0.0, waits_s - one.waits_s)}
    return replace(one, waits_s=waits_s + ties_s(setting), limits=limits, sent_nbytes=one.sent_nbytes + nbytes)


def passes_of(setting: Setting, replica: PipelineReplica) -> dict[tuple[int, int], Passed]:
    """Return the cost of a replica's microbatches by (kind of rank, samples)."""
    return {
        (host_group, count): passed(setting.wires_of(host_group), setting.workers[host_group], setting.regions, count)
        for host_group in {host_group for kinds in replica.host_groups for host_group in kinds}
        for count, _ in replica.samples
    }


def _own_work(
    setting: Setting, replica: PipelineReplica, stage: int, host_group: int, known: dict[tuple[int, int], Passed]
) -> RankWork:
    """Return a rank's passes one after another, as if it never waited for another stage."""
    own = setting.own(stage)
    forward_s = backward_s = waits_s = sent = 0.0
    limits = np.zeros(3)
    followed = followed_s(setting, host_group)
    for count, times in replica.samples:
        cost = known[host_group, count]
        ahead_s, back_s = float(cost.forward_s[own].sum()), float(cost.backward_s[own].sum())
        copies_s = _saved_copies_s(setting, host_group, count, (ahead_s, back_s))
        forward_s += times * (ahead_s + copies_s[0] + followed)
        backward_s += times * (back_s + copies_s[1])
        waits_s += times * float((cost.waits.forward_s + cost.waits.backward_s)[own].sum())
        sent += times * float((cost.waits.forward_nbytes + cost.waits.backward_nbytes)[own].sum())
        limits += times * cost.limits[:, own].sum(axis=1)
        limits[2] += times * followed
    last = known[host_group, replica.samples[-1][0]]
    traffic_s, calls_s = _update_s(setting, host_group, own)
    again = (setting.plan.batch.num_microbatches - 1) * added_s(setting, host_group, own)
    return RankWork(
        replica=replica,
        stage=stage,
        host_group=host_group,
        forward_s=forward_s,
        backward_s=backward_s + again,
        optimizer_s=traffic_s + calls_s,
        waits_s=waits_s,
        passes=(last.forward_s + last.waits.forward_s, last.backward_s + last.waits.backward_s),
        limits={
            "compute": float(limits[0]),
            "memory traffic": float(limits[1]) + again + traffic_s,
            "operator calls": float(limits[2]) + calls_s,
        },
        sent_nbytes=sent,
        taken=Taken(
            forward=last.waits.forward_link_s,
            backward=last.waits.backward_link_s,
            after=_last_message(setting, replica, stage),
        ),
        load=replica_load(setting, replica),
    )


def _saved_copies_s(
    setting: Setting, host_group: int, samples: int, passes_s: tuple[float, float]
) -> tuple[float, float]:
    """Return the seconds by which offloaded activations prolong a microbatch's forward and backward."""
    regions = offload_regions(setting.model, setting.plan.layout)
    if not regions or setting.host_groups[host_group].device.kind == "cpu":
        return 0.0, 0.0
    wires = setting.wires
    keeps = kept(wires.columns, setting.parts[host_group], setting.regions, half=wires.half)
    moved = moved_nbytes([keeps.always[list(region)].tolist() for region in regions], samples)
    return saved_copies_s(sum(moved), passes_s, setting.host_groups[host_group])


def replica_load(setting: Setting, replica: PipelineReplica) -> BatchLoad:
    """Return how a replica's samples are loaded: each of its ranks loads all of them, whatever part it computes."""
    samples = sum(max(1, size) * times for size, times in replica.samples)
    return most(
        setting.feeds[host_group].load(samples)
        for host_group in {host_group for kinds in replica.host_groups for host_group in kinds}
    )


def added_s(setting: Setting, host_group: int, own: Flags) -> float:
    """Return the seconds of adding a microbatch's gradients of the modules `own` to those of the microbatch before."""
    return float(accumulation_s(setting.workers[host_group], setting.gradients(host_group)[own]).sum())


def _sent_nbytes(setting: Setting, replica: PipelineReplica) -> list[float]:
    """Return the bytes that each place on the stage axis sends to other places."""
    plan, stages, ranks = setting.plan, setting.stages, setting.plan.degree("stage")
    samples = np.array(replica.microbatches, dtype=np.float64) / plan.degree("context")
    sent = stages.by_rank[0] * samples.sum() + stages.by_rank[1] * len(samples)
    tied = setting.wires.columns.gradients * setting.wires.division.weight
    for index, owner in stages.ties:  # reduced over two ranks: each sends the whole gradient
        sent[[stages.stage[index] % ranks, stages.stage[owner] % ranks]] += tied[owner]
    by_place: list[float] = sent.tolist()
    return by_place


def actions_of(setting: Setting, replica: PipelineReplica, known: dict[tuple[int, int], Passed]) -> Actions:
    """Return the actions of a replica with several places on the stage axis."""
    stages = setting.stages
    ranks, counts = setting.plan.degree("stage"), replica.microbatches
    times: dict[int, Array] = {}
    for count, _ in replica.samples:
        per_host_group = {
            host_group: np.stack(
                [
                    stage_seconds(setting, known[host_group, count], host_group),
                    _waits(setting, known[host_group, count]),
                ]
            )
            for host_group in {s for kinds in replica.host_groups for s in kinds}
        }
        slowest = [
            _slowest([per_host_group[host_group][:, :, stage] for host_group in replica.host_groups[stage % ranks]])
            for stage in range(stages.count)
        ]
        times[count] = np.stack(slowest, axis=2)
    seconds, waits = np.stack([times[count] for count in counts], axis=3)
    return Actions(
        seconds=seconds,
        waits=waits,
        messages=_messages(setting, replica, known),
        oversubscription=_oversubscription(setting),
    )


def _oversubscription(setting: Setting) -> Oversubscription | None:
    """Return which places share cores; None where there are enough cores."""
    if all(host_group.oversubscribed <= 1 for host_group in setting.host_groups):
        return None
    return oversubscription_of(
        setting.wires.network.host_groups, by_share_and_stage(setting.plan, np.arange(setting.plan.world_size))
    )


def _slowest(host_groups: list[Array]) -> Array:
    """Return (seconds and waits, kinds of action) of the rank that takes longest, for each kind of action."""
    times = np.stack(host_groups)
    return np.asarray(np.take_along_axis(times, times[:, :1].argmax(axis=0)[None], axis=0)[0], dtype=np.float64)


def _waits(setting: Setting, one: Passed) -> Array:
    """Return (kinds of action, stages): the seconds of the actions that are spent in exchanges."""
    stages = setting.stages
    ahead, back = (
        np.bincount(stages.stage, weights=seconds, minlength=stages.count)
        for seconds in (one.waits.forward_s, one.waits.backward_s)
    )
    halves = not any(rule.recompute for rule in setting.plan.layout)
    return np.array([ahead, back, *((back / 2, back / 2) if halves else (back, np.zeros(stages.count)))])


def _messages(setting: Setting, replica: PipelineReplica, known: dict[tuple[int, int], Passed]) -> Messages:
    """Return the times of the messages between a replica's stages.

    A message may share its link with the exchanges of its sender's next pass. It then gets half of the link, so it
    takes as much longer as they last, but at most twice as long. Ranks that take turns on cores do not send at the
    same moment, so a message shares its link only with those of its own replica. The next message on the link still
    waits for those of all ranks.
    """
    stages, ranks = setting.stages, setting.plan.degree("stage")
    counts = np.array(replica.microbatches)
    uncontended = _uncontended_s(setting, counts)
    away = np.array(setting.wires.network.across_hosts("stage"), dtype=np.intp)
    meets: dict[int, Array] = {}
    for count, _ in replica.samples:
        by_stage = np.zeros((len(TIERS), stages.count))
        for (_, samples), cost in known.items():
            if samples == count:
                rows = [np.bincount(stages.stage, row, minlength=stages.count) for row in cost.waits.forward_link_s]
                by_stage = np.maximum(by_stage, rows)
        meets[count] = by_stage
    senders = np.arange(stages.count - 1)
    met = np.stack([meets[count][away[senders % ranks], senders] for count in replica.microbatches], axis=1)
    besides = np.minimum(uncontended, met)
    links = setting.wires.network.neighbours("stage")
    latency = np.array([links[sender % ranks].latency_s for sender in senders])
    in_turns = uncontended if _oversubscription(setting) is None else _uncontended_s(setting, counts, in_turns=True)
    return Messages(arrive_s=in_turns + besides, occupy_s=np.maximum(0.0, uncontended + besides - latency[:, None]))


def _uncontended_s(setting: Setting, counts: NDArray[np.intp], *, in_turns: bool = False) -> Array:
    """Return (boundaries, microbatches): seconds of the messages of microbatches of `counts` samples.

    A message shares its link only with messages of ranks at the same place of the stage axis. With `in_turns`,
    these are only the ranks of the same replica, which exchange within passes and so send at the same moment.
    """
    stages, ranks, plan = setting.stages, setting.plan.degree("stage"), setting.plan
    in_step = plan.world_size // plan.data_parallel_degree // ranks
    links = setting.wires.network.neighbours("stage", in_step if in_turns else None)
    samples = counts / plan.degree("context")  # each sends its part of the sequences
    nbytes = stages.sent[:, None] * samples + stages.fixed[:, None]
    uncontended = [each_of(partial(message, links[stage % ranks]), row) for stage, row in enumerate(nbytes)]
    return np.array(uncontended).reshape(nbytes.shape)


def _last_message(setting: Setting, replica: PipelineReplica, place: int) -> Array:
    """Return (tiers,): seconds of the gradient that a place on the stage axis sends back after its last backward."""
    by_tier = np.zeros(len(TIERS))
    if place > 0:
        uncontended = _uncontended_s(setting, np.array([replica.samples[-1][0]]))
        by_tier[int(setting.wires.network.across_hosts("stage")[place - 1])] = uncontended[place - 1, 0]
    return by_tier


def stage_seconds(setting: Setting, one: Passed, host_group: int) -> Array:
    """Return (kinds of action, stages): seconds of a microbatch's forward, its backward, and the two halves of
    backward.
    """
    stages, plan, count = setting.stages, setting.plan, setting.stages.count
    ahead = np.bincount(stages.stage, weights=one.forward_s + one.waits.forward_s, minlength=count)
    back = np.bincount(stages.stage, weights=one.backward_s + one.waits.backward_s, minlength=count)
    added = accumulation_s(setting.workers[host_group], setting.gradients(host_group))
    m = plan.batch.num_microbatches
    back = back + (m - 1) / m * np.bincount(stages.stage, weights=added, minlength=count)
    ahead = ahead + np.where(np.arange(count) < plan.degree("stage"), followed_s(setting, host_group), 0.0)
    if any(rule.recompute for rule in plan.layout):  # with recompute, backward is not divided into halves
        return np.array([ahead, back, back, np.zeros(count)])
    return np.array([ahead, back, back / 2, back / 2])


def followed_s(setting: Setting, host_group: int) -> float:
    """Return the seconds in which a rank on a CPU traces the model on shapes, to find what its stages do with a
    microbatch.
    """
    units, calls = setting.stages.followed
    if setting.host_groups[host_group].device.kind != "cpu":
        return 0.0
    worker = setting.workers[host_group]
    bare = cost_constants.FOLLOWED_UNIT * units + cost_constants.FOLLOWED_CALL * calls
    return bare * worker.kernel_overhead_s * worker.slowdown


def ties_s(setting: Setting) -> float:
    """Return the seconds of reducing the gradients of parameters that are tied across stages, after the pipeline."""
    if not setting.stages.ties:
        return 0.0
    columns, weight = setting.wires.columns, setting.wires.division.weight
    links = setting.wires.network.neighbours("stage")
    latency = max(link.latency_s for link in links)
    nbytes = float(sum(columns.gradients[owner] * weight[owner] for _, owner in setting.stages.ties))
    return 2 * latency * len(setting.stages.ties) + max(link.carry(nbytes, nbytes) for link in links)


def _update_s(setting: Setting, host_group: int, own: Flags) -> tuple[float, float]:
    """Return the seconds of memory traffic and of operator calls of one optimizer update of the modules `own`.

    On CUDA, one multi-tensor kernel updates many tensors. With a shard axis, a rank updates its part of every
    tensor.
    """
    columns, plan, worker, kind = (
        setting.wires.columns,
        setting.plan,
        setting.workers[host_group],
        setting.host_groups[host_group].device.kind,
    )
    gradients, states = setting.gradients(host_group), columns.optimizer * setting.parts[host_group].weight
    trained = own & (columns.gradients > 0)
    on_cpu = kind == "cpu" or is_offloaded(plan, kind)
    nbytes = update_nbytes(setting.model, gradients[trained], states[trained], on_cpu=on_cpu)
    traffic = float(nbytes.sum()) / plan.degree("shard")
    per_tensor = update_calls(setting.model, on_cpu=kind == "cpu")
    tensors = cost_constants.TENSORS_PER_MODULE * int(trained.sum())
    groups = -(-tensors // cost_constants.FUSED_TENSORS) if kind == "cuda" else tensors
    bandwidth = worker.bandwidth_bytes_per_s
    if is_offloaded(plan, kind):
        traffic += float(gradients[trained].sum()) / plan.degree("shard")  # read once more: are all finite?
        bandwidth = update_bytes_per_s(setting.host_groups[host_group])
    call_s = max(worker.kernel_overhead_s, worker.launch_s)
    traffic_s, calls_s = worker.slowdown * traffic / bandwidth, worker.slowdown * per_tensor * groups * call_s
    if plan.sharding.on_disk:
        state = float(states[trained].sum()) / plan.degree("shard")
        traffic_s = update_with_disk_s(traffic_s + calls_s, state, setting.host_groups[host_group]) - calls_s
    return traffic_s, calls_s


def workers_of(model: ModelSpec, plan: Plan, host_groups: tuple[HostGroup, ...]) -> tuple[Worker, ...]:
    """Return the speed of a rank of each host group.

    Raises:
        PlanError: a device has no rate for the precision.
    """
    return tuple(
        worker_at(host_group, model.dtype, plan.precision, channels_last=model.channels_last)
        for host_group in host_groups
    )
