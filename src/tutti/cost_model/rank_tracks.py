"""The predicted step as a timeline: what every rank does when, and what memory it holds.

The times add up to those of `predict`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

import tutti.cost_model.pipeline_cost as pipeline_cost
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Activity, Bar, Omission, Prediction, Timeline, Track
from tutti.cost_model.pipeline_cost import ActionOrder, PipelineReplica, Played, by_share_and_stage, replicas_by_share
from tutti.cost_model.step_time import Held, Slowest, Step, loss_s, memories, predict, slowest_of, wait_s, worked_out
from tutti.cost_model.step_timeline import (
    RankWork,
    Setting,
    actions_of,
    added_s,
    passes_of,
    replica_work,
    ties_s,
)
from tutti.cost_model.worker_speed import Array

MOST_DRAWN = 24
"""Number of microbatches that are drawn of a longer step without stages. Half of them are its first, half its last."""

MOST_BARS = 400
"""Approximate number of bars of a track without stages: exchanges are merged until they take 1 / MOST_BARS of the
step.
"""

_KINDS: tuple[Activity, ...] = ("forward", "backward", "backward", "weights")

Parts = list[Bar]


def timeline(model: ModelSpec, cluster: ClusterSpec, plan: Plan, *, most_tracks: int = 16) -> Timeline:
    """Lay out over time what `predict` adds up.

    Ranks that do the same share one track. Exchanges within a pass are drawn where they happen, and short ones
    are merged; with stages, they are drawn at the end of each action. The middle of a long step is left out.

    Args:
        most_tracks: maximum number of tracks. If there are more, an evenly spaced selection is kept.

    Raises:
        PlanError: as in `predict`.
    """
    prediction = predict(model, cluster, plan)
    step = worked_out(model, cluster, plan)
    works = [work for replica in step.replicas for work in replica_work(step.setting, replica)]
    slowest = slowest_of(step.setting, works)
    drawing = _Drawing(
        step=step,
        slowest=slowest,
        prediction=prediction,
        held=memories(step.setting, step.replicas, slowest.syncs),
        ranks=_ranks(step, plan),
    )
    all_tracks = [(work, passes) for replica in step.replicas for work, passes in drawing.replica(replica)]
    all_tracks.sort(key=lambda track: track[0].stage)
    # of more tracks than fit, an evenly spaced selection with the first and the last
    places = sorted({round(at * (len(all_tracks) - 1) / max(1, most_tracks - 1)) for at in range(most_tracks)})
    shown = [all_tracks[place] for place in places]
    left = _left_out([passes for _, passes in shown])
    return Timeline(
        step_time_s=prediction.step_time_s,
        world_size=plan.world_size,
        num_microbatches=plan.batch.num_microbatches,
        tracks=tuple(drawing.track(work, passes, left) for work, passes in shown),
        tracks_left_out=len(all_tracks) - len(shown),
        left_out=left,
    )


def _ranks(step: Step, plan: Plan) -> dict[tuple[PipelineReplica, int], list[int]]:
    """Return the ranks of each pipeline replica by place on the stage axis."""
    replicas = replicas_by_share(plan, step.setting.wires.network.host_groups, step.samples)
    where = by_share_and_stage(plan, np.arange(plan.world_size, dtype=np.intp))
    ranks_of: dict[tuple[int, int], list[int]] = {}
    for share, replica in enumerate(replicas):
        for stage in range(where.shape[1]):
            ranks_of.setdefault((id(replica), stage), []).extend(where[share, stage].tolist())
    replica_of = {id(replica): replica for replica in replicas}
    return {(replica_of[replica], stage): sorted(ranks) for (replica, stage), ranks in ranks_of.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """A track up to the end of its last backward.

    Attributes:
        bars: what the rank does.
        idle: seconds of exposed communication and of bubbles among the microbatches that are drawn.
        calm: start and end of the interval that need not be drawn; None where everything is drawn.
        microbatches: number of microbatches that `calm` leaves out.
        data_s: seconds until the batch is loaded.
    """

    bars: Parts
    idle: dict[Activity, float]
    calm: tuple[float, float] | None = None
    microbatches: int = 0
    data_s: float = 0.0

    def after(self, data_s: float) -> "_Passes":
        """Return the same passes after a wait of `data_s` seconds for data."""
        waits: Parts = []
        _add(waits, 0.0, "data", data_s, "waiting for the batch")
        return replace(
            self,
            bars=[*waits, *(replace(bar, start_s=bar.start_s + data_s, end_s=bar.end_s + data_s) for bar in self.bars)],
            calm=None if self.calm is None else (self.calm[0] + data_s, self.calm[1] + data_s),
            data_s=data_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """A prediction together with everything that its tracks are drawn from.

    Attributes:
        slowest: the rank that ends last, and the gradient reductions of each stage.
        held: memory of the ranks, as in `step_time.memories`.
        ranks: the ranks of each replica by place on the stage axis.
    """

    step: Step
    slowest: Slowest
    prediction: Prediction
    held: dict[tuple[int, tuple[int, int], int], Held]
    ranks: dict[tuple[PipelineReplica, int], list[int]]

    @property
    def setting(self) -> Setting:
        return self.step.setting

    def replica(self, replica: PipelineReplica) -> Iterator[tuple[RankWork, _Passes]]:
        """Yield the work and the passes of each place on the stage axis."""
        works = replica_work(self.setting, replica)
        passes_by_stage = _staged(self.setting, replica) if len(works) > 1 else [_single_stage(self.setting, works[0])]
        for work, passes in zip(works, passes_by_stage, strict=True):
            exposed_s = self.slowest.syncs[work.stage].exchange.exposed_s
            data_s = wait_s(self.setting, work, exposed_s)
            yield work, passes.after(data_s) if data_s > 0 else passes

    def track(self, work: RankWork, passes: _Passes, left: Omission | None) -> Track:
        """Return the track of one place of a replica: its passes, the end of its step, and its memory."""
        sync, bars = self.slowest.syncs[work.stage].exchange, list(passes.bars)
        end_s, ties = self.prediction.step_time_s.value, self._ties_s()
        now = passes_end = bars[-1].end_s if bars else 0.0
        ends: tuple[tuple[Activity, float, str], ...] = (
            ("communication", ties, "gradients of tied parameters"),
            ("communication", sync.exposed_s, "gradients, once a step"),
            ("communication", self._loss_s(), "all-reduce of the loss"),
            ("optimizer", work.optimizer_s, "update"),
            ("other", self.prediction.phases["other"], "fixed cost of a step"),
        )
        for doing, lasts_s, what in ends:
            now = _add(bars, now, doing, lasts_s, what)
        _add(bars, now, "waiting", end_s - now, "")
        hidden_s = sync.total_s - sync.exposed_s
        hidden = (
            [Bar(doing="hidden", start_s=max(0.0, passes_end - hidden_s), end_s=passes_end)] if hidden_s > 0 else []
        )
        ranks = self.ranks[work.replica, work.stage]
        fullest = [
            self.held[work.stage, work.replica.samples[-1], host_group]
            for host_group in work.replica.host_groups[work.stage]
        ]
        memory, host_group, when = min(fullest, key=lambda entry: entry[1].memory_nbytes - entry[0].total)
        return Track(
            ranks=ranks_in_words(ranks),
            count=len(ranks),
            stage=work.stage,
            bars=tuple(_clipped(bars, left)),
            hidden=tuple(_clipped(hidden, left)),
            seconds=self._seconds(work, passes),
            memory=memory,
            memory_limit_nbytes=host_group.memory_nbytes,
            full_when=when,
        )

    def _ties_s(self) -> float:
        return ties_s(self.setting) if self.setting.plan.degree("stage") > 1 else 0.0

    def _loss_s(self) -> float:
        return loss_s(self.setting)

    def _seconds(self, work: RankWork, passes: _Passes) -> dict[Activity, float]:
        """Return the seconds of the whole step by activity.

        Microbatches that are not drawn are assumed to divide their waits into messages and bubbles as the drawn
        ones do.
        """
        sync, ties = self.slowest.syncs[work.stage].exchange, self._ties_s()
        lasts = {doing: sum(bar.lasts_s for bar in passes.bars if bar.doing == doing) for doing in _KINDS}
        weight_share = lasts["weights"] / (lasts["weights"] + lasts["backward"] or 1.0)
        waits, idle = max(0.0, work.waits_s - ties), sum(passes.idle.values())
        sent = waits * passes.idle.get("communication", 0.0) / idle if idle > 0 else 0.0
        by_activity: dict[Activity, float] = {
            "data": passes.data_s,
            "forward": work.forward_s,
            "backward": work.backward_s * (1 - weight_share),
            "weights": work.backward_s * weight_share,
            "optimizer": work.optimizer_s,
            "communication": sent + ties + sync.exposed_s + self._loss_s(),
            "bubble": waits - sent,
            "other": self.prediction.phases["other"],
        }
        by_activity["waiting"] = max(0.0, self.prediction.step_time_s.value - sum(by_activity.values()))
        by_activity["hidden"] = sync.total_s - sync.exposed_s
        least = 1e-9 * self.prediction.step_time_s.value  # less than that is rounding
        return {doing: lasts_s for doing, lasts_s in by_activity.items() if lasts_s > least}


def _single_stage(setting: Setting, work: RankWork) -> _Passes:
    """Return the passes of a rank without stages: one microbatch after another."""
    known, counts = passes_of(setting, work.replica), work.replica.microbatches
    added = added_s(setting, work.host_group, setting.own(0))
    lasts = {count: known[work.host_group, count].total_s for count in dict.fromkeys(counts)}
    ends = MOST_DRAWN // 2 if len(counts) > MOST_DRAWN else len(counts)
    grain = work.total_s / MOST_BARS
    bars: Parts = []
    now, since = 0.0, 0.0
    for index, count in enumerate(counts):
        if ends <= index < len(counts) - ends:
            since = since or now
            now += lasts[count] + added
            continue
        cost, name = known[work.host_group, count], f"microbatch {index + 1} of {len(counts)}"
        now = _pass(bars, now, "forward", (cost.forward_s, cost.waits.forward_s), grain, name)
        now = _add(bars, now, "backward", added if index else 0.0, name)
        now = _pass(bars, now, "backward", (cost.backward_s[::-1], cost.waits.backward_s[::-1]), grain, name)
    idle: dict[Activity, float] = {"communication": work.waits_s}
    if ends == len(counts):
        return _Passes(bars=bars, idle=idle)
    resumed = next(bar.start_s for bar in bars if bar.start_s >= since > 0)
    return _Passes(bars=bars, idle=idle, calm=(since, resumed), microbatches=len(counts) - 2 * ends)


def _add(bars: Parts, now: float, doing: Activity, lasts_s: float, what: str) -> float:
    """Append a bar, or extend the last one if it continues it; return the end of the bar."""
    if lasts_s <= 0:
        return now
    last = bars[-1] if bars else None
    if last is not None and last.doing == doing and last.what == what and last.end_s == now:
        bars[-1] = replace(last, end_s=now + lasts_s)
    else:
        bars.append(Bar(doing=doing, start_s=now, end_s=now + lasts_s, what=what))
    return now + lasts_s


def _pass(bars: Parts, now: float, doing: Activity, by_module: tuple[Array, Array], grain: float, what: str) -> float:
    """Append a pass over the modules; return its end.

    The modules' work is drawn first, then the exchanges that they wait for. Both are merged until the exchanges
    last at least `grain` seconds.
    """
    work_s = wait_s = 0.0
    for work, wait in zip(by_module[0].tolist(), by_module[1].tolist(), strict=True):
        work_s, wait_s = work_s + work, wait_s + wait
        if wait_s >= grain:
            now = _add(bars, now, doing, work_s, what)
            now = _add(bars, now, "communication", wait_s, what)
            work_s = wait_s = 0.0
    now = _add(bars, now, doing, work_s, what)
    return _add(bars, now, "communication", wait_s, what)


def _staged(setting: Setting, replica: PipelineReplica) -> list[_Passes]:
    """Return the passes of each place on the stage axis.

    For long runs only the first and the last microbatches are simulated. What begins in the second half of the
    simulated time is moved later, so that it ends with the step.
    """
    plan, known = setting.plan, passes_of(setting, replica)
    ranks = plan.degree("stage")
    whole = actions_of(setting, replica, known)
    (ended, _), count = whole.ends(plan), whole.seconds.shape[2]
    drawn = min(count, max(2 * ranks, MOST_DRAWN))
    picked = np.r_[0 : drawn // 2, count - (drawn - drawn // 2) : count]
    order = pipeline_cost.order_of(plan.pipeline.schedule, ranks, plan.pipeline.stages_per_rank, drawn)
    drawn_actions = whole.of(picked)
    played = drawn_actions.played(order)
    free = played.free
    middle = max(free) / 2 if drawn < count else float("inf")
    actions = _Actions(
        order=order,
        played=played,
        waits=drawn_actions.waits[order.kind, order.stage, order.microbatch].tolist(),
        names=[f"microbatch {index + 1} of {count}" for index in picked],
        stages_named=plan.pipeline.stages_per_rank > 1,
    )
    passes_by_rank = []
    for rank in range(ranks):
        late = max(0.0, ended[rank] - free[rank])
        bars, idle = actions.of(rank, middle, late)
        calm = (middle, middle + late) if drawn < count else None
        passes_by_rank.append(_Passes(bars=bars, idle=idle, calm=calm, microbatches=count - drawn))
    return passes_by_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class _Actions:
    """A simulated schedule.

    Attributes:
        waits: seconds of exchanges within each action.
        names: labels of the microbatches.
        stages_named: whether labels name the stage as well.
    """

    order: ActionOrder
    played: Played
    waits: list[float]
    names: list[str]
    stages_named: bool

    def of(self, rank: int, middle: float, late: float) -> tuple[Parts, dict[Activity, float]]:
        """Return the bars of a rank, and its idle seconds by activity.

        Bars that begin after `middle` are moved by `late` seconds, which do not count as idle.
        """
        bars: Parts = []
        idle: dict[Activity, float] = {"communication": 0.0, "bubble": 0.0}
        now, before = 0.0, 0.0
        for at in (index for index, owner in enumerate(self.order.rank) if owner == rank):
            begins, ends = self.played.began[at], self.played.ended[at]
            lasts, waits = ends - begins, min(self.waits[at], ends - begins)
            gap = max(0.0, begins - before)
            after = self.order.after[at]
            sent = min(gap, begins - self.played.ended[after]) if after >= 0 else 0.0  # in transit, or in a queue
            moved = begins + late if begins >= middle else begins
            _add(bars, now, "bubble", moved - sent - now if gap > 0 or moved > begins else 0.0, "")
            _add(bars, moved - sent, "communication", sent, "message between stages")
            name = self.names[int(self.order.microbatch[at])]
            if self.stages_named:
                name += f", stage {int(self.order.stage[at])}"
            now = _add(bars, moved, _KINDS[int(self.order.kind[at])], lasts - waits, name)
            now = _add(bars, now, "communication", waits, name)
            idle["communication"] += sent + waits
            idle["bubble"] += gap - sent
            before = ends
        return bars, idle


def _left_out(tracks: list[_Passes]) -> Omission | None:
    """Return the interval that no track draws; None where some track draws everything."""
    calm = [interval.calm for interval in tracks if interval.calm is not None]
    if not calm or len(calm) < len(tracks):
        return None
    start, end = min(interval[0] for interval in calm), max(interval[1] for interval in calm)
    return Omission(start_s=start, end_s=end, microbatches=tracks[0].microbatches) if end > start else None


def _clipped(bars: Parts, left: Omission | None) -> Iterator[Bar]:
    """Yield the bars without the part that is left out."""
    for bar in bars:
        if left is None or bar.end_s <= left.start_s or bar.start_s >= left.end_s:
            yield bar
            continue
        if bar.start_s < left.start_s:
            yield replace(bar, end_s=left.start_s)
        if bar.end_s > left.end_s:
            yield replace(bar, start_s=left.end_s)


def ranks_in_words(ranks: list[int]) -> str:
    """Format a sorted list of ranks: rank 3; ranks 0-7; ranks 0, 4, 8, 12; ranks 0, 4, 8 ... 1020."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:4])) if len(ranks) <= 4 else ", ".join(map(str, ranks[:3]))
    return f"ranks {shown}" if len(ranks) <= 4 else f"ranks {shown} ... {ranks[-1]}"
