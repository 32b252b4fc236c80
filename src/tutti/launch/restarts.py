"""What follows the failure of a rank: a new generation from the newest checkpoint, with fewer ranks if asked, or none.

A restart helps against what comes from outside: a process that was killed, a network that was cut. What the run does by
itself it would do again, so a failure that repeats in the same step ends the run.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tutti.config import serialization
from tutti.config.last_batch import read_last_batch
from tutti.config.mesh_axes import parse_mesh
from tutti.config.plan import BatchPlan, Plan
from tutti.config.run_folder import TAIL_NBYTES, RunFolder, last_rows
from tutti.config.sync_notation import parse_sync
from tutti.config.vocabulary import AxisName
from tutti.errors import LaunchError, TuttiError
from tutti.launch.failure import LOST_NODE, Failure, sentence
from tutti.launch.launcher import LaunchSpec, RankError
from tutti.launch.memory_folder import newest_step
from tutti.launch.regroup import shrink_plan
from tutti.launch.slots import checked_slots
from tutti.launch.supervisor import Outcome, Restart
from tutti.launch.survival import RECOVER, Survivors, Waiting
from tutti.surviving_rank import LeftBehind

OnFailure = Literal["replace", "shrink"]

Recover = Literal["memory", "checkpoint"]

LONGEST_DELAY_S = 32.0

_FROM_MEMORY = "from memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often, and with how many ranks, a run goes on after a failure.

    Attributes:
        max_restarts: how often the ranks may be started again.
        min_ranks: fewest ranks to go on with; None to go on with all of them.
        on_failure: whether a rank that failed is replaced, or left out.
        least_nodes: fewest nodes to go on with; None if their number is fixed.
        least_nproc: fewest ranks of a node; None if their number is fixed.
    """

    max_restarts: int = 0
    min_ranks: int | None = None
    on_failure: OnFailure = "replace"
    least_nodes: int | None = None
    least_nproc: int | None = None

    @property
    def least(self) -> int | None:
        """Fewest ranks to go on with; None if no rank may be left out."""
        return self.min_ranks or (1 if self.on_failure == "shrink" else None)

    @property
    def elastic(self) -> bool:
        """Whether the run takes as many nodes and ranks as there are, and goes on when they change."""
        return self.least_nodes is not None or self.least_nproc is not None

    @property
    def goes_on(self) -> bool:
        """Whether the run may go on after anything at all."""
        return self.max_restarts > 0 or self.elastic


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a generation failed: the last completed step, or None before training began."""

    step: int | None
    completed: bool  # whether the generation completed a step of its own

    @property
    def words(self) -> str:
        return "before training began" if self.step is None else f"in step {self.step + 1}"


class Restarts:
    """Decides what follows each failure of one run. See `tutti.launch.supervisor.Recovery`.

    Args:
        policy: how often, and with how many ranks, the run goes on.
        spec: what is started.
        fewer: returns what to start without the ranks that have failed; None: the same with fewer ranks on this node.
        memory_step: returns the step of the newest checkpoint in the memory of the nodes, None for none.
    """

    def __init__(
        self,
        policy: RestartPolicy,
        spec: LaunchSpec,
        fewer: Callable[[Failure], LaunchSpec] | None = None,
        memory_step: Callable[[LaunchSpec], int | None] = newest_step,
    ) -> None:
        self._policy = policy
        self._fewer, self._memory_step = fewer, memory_step
        self._folder = RunFolder(spec.folder)
        self._earlier = self._folder.checkpoint_times()
        self._records = _Records(self._folder)
        self._used = 0
        self._idle = -1  # failures in a row without a completed step; the first of a run is not counted
        self._last: tuple[LaunchSpec, Failure, _Place] | None = None
        self._survivors: Survivors | None = None

    def may_restart(self, error: RankError) -> bool:
        """Return whether a restart may follow this failure of a rank."""
        return self._used < self._policy.max_restarts and error.kind != "user"

    def begin(self, spec: LaunchSpec) -> LaunchSpec | Outcome:
        """Return the first generation: what was asked for."""
        return spec

    def leaves(self) -> bool:
        """Return that a signal ends the run."""
        return False

    def called_off(self) -> Literal["", "end", "pause"]:
        """Return that no other node asks for anything."""
        return ""

    def after(
        self, spec: LaunchSpec, outcome: Outcome, written: Callable[[int], LeftBehind | None] = lambda rank: None
    ) -> Restart | Outcome:
        """Return the next generation, or how the run ends; see `tutti.launch.supervisor.Recovery`."""
        if outcome.failure is None:
            return outcome
        following = self._following(spec, outcome.failure, outcome.waiting, written)
        return replace(outcome, given_up=following) if isinstance(following, str) else following

    def grown(self, spec: LaunchSpec) -> Restart:
        """Return the next generation, which has more ranks: those of a node that has come. It is not counted."""
        self._records.place(spec)
        following, source = self._continued(spec)
        message = f"{_count(following)} {'go' if following.world_size > 1 else 'goes'} on {source}"
        return Restart(spec=following, delay_s=0.0, message=message, grown=True)

    def _following(
        self,
        spec: LaunchSpec,
        failure: Failure,
        waiting: Mapping[int, Waiting],
        written: Callable[[int], LeftBehind | None],
    ) -> Restart | str:
        """Return the next generation, or why there is none; "" if none was asked for."""
        counted = not (self._policy.elastic and failure.error == LOST_NODE)  # a node may leave an elastic run
        if counted and not self._policy.max_restarts:
            return ""
        place = self._records.place(spec)
        if self._cannot_run_again(failure, place):
            return self._with_new_processes(spec, failure, place)
        if failure.kind == "user":
            return ""
        repeated = counted and self._repeats(spec, failure, place)
        self._last = spec, failure, place
        if counted and self._used >= self._policy.max_restarts:
            times = "once" if self._used == 1 else f"{self._used} times"
            return f"the ranks had been started again {times}, and --max-restarts allows no more"
        least = self._policy.least
        starting = repeated and place.step is None and least is not None
        if repeated and not starting:
            return (
                f"it failed {place.words}, and had failed there in the same way before, so it was not started again"
                f"{self._batch_of(failure)}"
            )
        following, lost = spec, [rank for rank in spec.ranks if rank not in waiting]
        if starting or self._policy.elastic or self._policy.on_failure == "shrink":
            try:
                left = spec.world_size - len(failure.ranks)
                following = self._fewer(failure) if self._fewer is not None else smaller(spec, left, least or 1)
            except (TuttiError, OSError) as error:  # also a plan that cannot be read or written
                return f"it cannot go on with fewer ranks: {error}"
        self._used += counted
        self._idle = 0 if place.completed or not counted else self._idle + 1
        delay_s = 0.0 if self._idle < 1 else min(2.0 ** (self._idle - 1), LONGEST_DELAY_S)
        following, source = self._continued(following)
        survivors, refusal = _survivors(spec, following, waiting, {rank: written(rank) for rank in lost})
        if survivors is not None:
            ended = survivors.ranks[survivors.holder]
            source = f"after step {survivors.step} from the memory of rank {ended}"
        elif waiting and not source.startswith(_FROM_MEMORY):
            source = f"{source} (not from memory: {refusal})"
        message = self._message(spec, following, failure, place, source, delay_s, counted)
        self._survivors = survivors
        return Restart(spec=following, delay_s=delay_s, message=message, survivors=survivors)

    def _cannot_run_again(self, failure: Failure, place: _Place) -> bool:
        """Whether the script itself has failed in a process that ran it again, before it completed a step."""
        again = self._survivors is not None and bool(set(failure.ranks) & set(self._survivors.ranks))
        return again and not place.completed and failure.kind in ("user", "run", "exception")

    def _with_new_processes(self, spec: LaunchSpec, failure: Failure, place: _Place) -> Restart:
        """Go on from a checkpoint, and never from memory any more. This restart is not the script's fault."""
        self._survivors = None
        variables = {name: value for name, value in spec.environment.items() if name != RECOVER}
        following, source = self._continued(replace(spec, environment=variables))
        failed = sentence(spec, replace(failure, traceback=""))
        message = (
            f"{failed} ({place.words}), when it ran the script again in the same process\n"
            f"all {spec.world_size} ranks go on {source}, in new processes from here on, as with --recover checkpoint"
        )
        return Restart(spec=following, delay_s=0.0, message=message)

    def _batch_of(self, failure: Failure) -> str:
        """Name the batch that the rank had, which may be what makes it fail."""
        batch = read_last_batch(self._folder.rank(failure.first))
        return "" if batch is None else f"; the last batch that rank {failure.first} asked for had {batch.words}"

    def _repeats(self, spec: LaunchSpec, failure: Failure, place: _Place) -> bool:
        if self._last is None:
            return False
        before, earlier, where = self._last
        same_rank = before.world_size != spec.world_size or bool(set(earlier.ranks) & set(failure.ranks))
        same_failure = (earlier.error, earlier.message) == (failure.error, failure.message)
        return same_rank and same_failure and where.step == place.step

    def _continued(self, spec: LaunchSpec) -> tuple[LaunchSpec, str]:
        """Return the spec with what the ranks continue from, and that in words."""
        now = self._folder.checkpoint_times()
        own = [name for name, written in now.items() if self._earlier.get(name) != written]
        step = self._memory_step(spec)
        in_memory = step is not None and (not own or step >= int(max(own).partition("-")[2]))
        here = f"{_FROM_MEMORY} (step {step})"
        if not own:
            resumed = spec.environment.get("TUTTI_RESUME")
            words = f"from {resumed}" if resumed else "from the beginning, as there is no checkpoint yet"
            return spec, here if in_memory else words
        newest = max(own)
        # A run that was resumed from an older checkpoint of its folder does not go on from one it had left behind.
        source = self._folder.path if newest == max(now) else self._folder.checkpoints / newest
        variables = {"TUTTI_RESUME": str(source), "TUTTI_RESTARTED": "1"}
        return replace(spec, environment=spec.environment | variables), here if in_memory else f"from {newest}"

    def _message(
        self,
        spec: LaunchSpec,
        following: LaunchSpec,
        failure: Failure,
        place: _Place,
        source: str,
        delay_s: float,
        counted: bool,
    ) -> str:
        failed = sentence(spec, replace(failure, traceback=""))
        ranks = _count(following)
        go = "go" if following.world_size > 1 else "goes"
        waits = f" in {delay_s:g} s" if delay_s else ""
        number = f"restart {self._used} of {self._policy.max_restarts}{waits}: " if counted else ""
        return f"{failed} ({place.words})\n{number}{ranks} {go} on {source}"


def _count(spec: LaunchSpec) -> str:
    return f"{spec.world_size} rank{'s' if spec.world_size > 1 else ''}"


def _survivors(
    spec: LaunchSpec, following: LaunchSpec, waiting: Mapping[int, Waiting], written: Mapping[int, LeftBehind | None]
) -> tuple[Survivors | None, str]:
    """Return the ranks that go on from memory; None, and why as a clause, where the state is not whole there.

    Args:
        spec: what has failed.
        following: the next generation.
        waiting: the ranks that outlive the failure.
        written: for each other rank, the states of random generators that it has left behind.
    """
    able = {rank: said for rank, said in sorted(waiting.items()) if not said.again}
    holders = [rank for rank, said in able.items() if said.step is not None]
    if not holders:
        return None, next((said.again or said.refusal for said in waiting.values()), "no rank is left")
    holder = max(holders, key=lambda rank: (able[rank].step or 0, -rank))
    step = able[holder].step or 0
    replaced = following.world_size == spec.world_size
    lost = [written.get(rank) for rank in spec.ranks if rank not in able] if replaced else []
    behind = any(said.step != step for said in able.values()) or any(left is None or left.step != step for left in lost)
    if behind and any(said is not None and said.drawn for said in (*able.values(), *lost)):
        return None, "the script draws random numbers between steps, and those of a rank are lost"
    if replaced:
        return Survivors(ranks={rank: rank for rank in able}, holder=holder, step=step), ""
    others = [rank for rank in able if rank != holder][: following.world_size - 1]
    ranks = dict(enumerate(sorted([holder, *others])))
    return Survivors(ranks=ranks, holder=next(new for new, old in ranks.items() if old == holder), step=step), ""


def smaller(spec: LaunchSpec, most: int, least: int, plan: Plan | None = None) -> LaunchSpec:
    """Return what to start with `least` to `most` ranks; a plan for them is written into the run folder.

    Args:
        spec: what was asked for.
        most: number of ranks that there are.
        least: smallest number of ranks to go on with.
        plan: what ranks followed; None: what the spec says, else what they wrote into the run folder.

    Raises:
        LaunchError: the plan does not allow it.
    """
    if not most:
        raise LaunchError("every rank failed, so none is left")
    if most < least:
        raise LaunchError(
            f"{most} rank{'s are' if most != 1 else ' is'} left, and {least} or more are asked for (--min-ranks); "
            "resume the run"
        )
    environment = dict(spec.environment)
    shrunk = shrink_plan(plan or _plan_of(spec), most, least)
    if shrunk.world_size < spec.world_size:
        environment["TUTTI_SHRUNK"] = "1"
    if "shard" not in shrunk.mesh:
        environment.pop("TUTTI_SHARD", None)
    if "TUTTI_PLAN" in environment:
        file = spec.folder / f"plan-{shrunk.world_size}.json"
        environment["TUTTI_PLAN"] = str(serialization.save(shrunk, file))
    elif "TUTTI_MESH" in environment or set(shrunk.mesh) != {"replicate"}:
        environment["TUTTI_MESH"] = ",".join(f"{axis}={degree}" for axis, degree in shrunk.mesh.items())
    return replace(spec, ranks_per_node=(shrunk.world_size,), environment=environment)


def fitting(spec: LaunchSpec, policy: RestartPolicy) -> LaunchSpec:
    """Return what to start on one node: a rank in each slot, if their number may change.

    Args:
        spec: what was asked for, with the most ranks.
        policy: with how many ranks the run goes on.

    Raises:
        LaunchError: there are too few slots, or the plan does not allow it.
    """
    if policy.least_nproc is None or spec.nodes > 1:
        return spec
    most, least = spec.world_size, policy.least or 1
    slots = checked_slots(least, most, share_device="TUTTI_SHARE_DEVICE" in spec.environment)
    return spec if slots == most else smaller(spec, slots, least)


def full_plan(spec: LaunchSpec) -> Plan | None:
    """Return the plan of all ranks that follows from the one in the run folder, which may be of fewer; None without it.

    Of a smaller plan, replicas are added as far as there are ranks for them.

    Args:
        spec: what was asked for.
    """
    if spec.environment.keys() & {"TUTTI_PLAN", "TUTTI_MESH"}:
        return None  # what was asked for says it
    try:
        plan = serialization.load(Plan, RunFolder(spec.folder).plan)
    except TuttiError:
        return None
    if plan.world_size == spec.world_size:
        return plan
    others = plan.world_size // plan.mesh.get("replicate", 1)
    replicas: dict[AxisName, int] = {"replicate": spec.world_size // others}
    return replace(plan, mesh=replicas | {axis: n for axis, n in plan.mesh.items() if axis != "replicate"})


def _plan_of(spec: LaunchSpec) -> Plan:
    """Return the plan that ranks follow: the one they were given, else the one that they wrote into the run folder."""
    variables = spec.environment
    if "TUTTI_PLAN" in variables:
        plan = serialization.load(Plan, Path(variables["TUTTI_PLAN"]))
    else:
        mesh = parse_mesh(variables.get("TUTTI_MESH") or f"replicate={spec.world_size}")
        plan = Plan(batch=BatchPlan(global_batch_size=1), mesh=mesh)
        with contextlib.suppress(TuttiError):  # the ranks may have failed before they wrote one
            written = serialization.load(Plan, RunFolder(spec.folder).plan)
            plan = written if written.world_size == spec.world_size else plan
    sync = variables.get("TUTTI_SYNC")
    return replace(plan, sync=parse_sync(sync)) if sync else plan


class _Records:
    """Reads the steps that the ranks have recorded in the current generation."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._seen: dict[Path, int] = {}
        for file in [folder.metrics, *folder.path.glob("ranks/*/metrics.jsonl")]:
            self._seen[file] = _size(file)

    def place(self, spec: LaunchSpec) -> _Place:
        """Return where the generation was, and begin the next one."""
        begun: int | None = None
        steps: list[int] = []
        for file in [self._folder.metrics, *(self._folder.rank(rank) / "metrics.jsonl" for rank in spec.ranks)]:
            begin, end = self._seen.get(file, 0), _size(file)
            self._seen[file] = end
            ends = sorted({min(end, begin + TAIL_NBYTES), end})  # the first rows, and the last
            for row in (row for last in ends for row in last_rows(file, begin, last)):
                if row.get("kind") == "start":
                    begun = _whole(row.get("resumed_at_step"))
                elif row.get("kind") == "step" and (step := _whole(row.get("step"))) is not None:
                    steps.append(step)
        if steps:
            return _Place(max(steps), completed=True)
        return _Place(begun, completed=False)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
