"""Names ranks that are slower than the others before they meet, with the cause as each rank knows it of itself.

If asked, the shares of the batch follow: `change_shares` takes what the `Rebalancer` has found.
"""

import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tutti.data.batches import share_of
from tutti.parallel.mesh import Mesh
from tutti.trainer.guard.findings import warn
from tutti.trainer.own_times import OwnTimesWindow
from tutti.trainer.rebalance import Rebalancer
from tutti.trainer.run_state import Run
from tutti.trainer.step_message import describe_ranks

_LARGE_PART = 0.4
"""The part of a rank's excess that a cause must explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRankFacts:
    """What a rank knows of itself in a window."""

    host: str
    window: OwnTimesWindow


def note_own_times(run: Run, columns: Sequence[float], step: int) -> None:
    """Add the own times of all ranks; name those that are slow, and find the shares of the batch that suit them.

    Collective where slow ranks are not those before, or shares may change.

    Args:
        run: the run.
        columns: the number of each rank in the losses' message.
        step: number of the step that they are of, from 1.
    """
    own_times, rebalancer = run.loop.own_times, run.loop.rebalancer
    window = own_times.add(columns, step)
    if window is None:
        return
    groups = _peers(run)
    if rebalancer is not None:
        _say_effect(run, rebalancer, window)
        window = rebalancer.at_whole_shares(window, groups, run.parallel.mesh.rank, _samples_at_once(run))
    slow = [rank for rank in range(len(columns)) if window.excess_s(rank, groups[rank])]
    for rank in sorted(own_times.slow.keys() - {*slow}):
        run.output.screen.say(f"rank {rank} is no slower than the others since step {window.first}")
        del own_times.slow[rank]
    new = [rank for rank in slow if rank not in own_times.slow]
    causes: dict[int, tuple[str, str]] = {}
    if new or (slow and rebalancer is not None):
        causes = _name(run, window, groups, slow, new)
    if rebalancer is not None:
        kinds = {rank: kind for rank, (kind, _) in causes.items()}
        samples = _samples_at_once(run)
        for rank in rebalancer.judge(window, groups, kinds, samples):
            other = f"no other division of {samples} samples makes steps a tenth faster"
            warn(run, f"rank {rank} keeps its present share of the batch: {other}")


def _name(
    run: Run, window: OwnTimesWindow, groups: Sequence[Sequence[int]], slow: Sequence[int], new: Sequence[int]
) -> dict[int, tuple[str, str]]:
    """Return the cause of each slow rank, and warn of those that are new. Collective."""
    facts: list[SlowRankFacts] = run.loop.watch.gather(
        "slow ranks", SlowRankFacts(host=socket.gethostname(), window=window)
    )
    causes = {}
    for rank in slow:
        others = [other for other in groups[rank] if other != rank and other not in slow] or [
            other for other in groups[rank] if other != rank
        ]
        causes[rank] = find_cause(facts[rank].window, [facts[other].window for other in others], rank, others)
        if rank in new:
            run.loop.own_times.slow[rank] = causes[rank][0]
            warn(run, _sentence(rank, facts[rank], others, *causes[rank]))
    return causes


def _samples_at_once(run: Run) -> int:
    """Samples of a microbatch over all ranks; where the batch counts tokens, of the last batch."""
    loader, batch = run.state.loader, run.parallel.plan.batch
    samples = loader.stated_size if batch.unit == "samples" else len(loader.indices)
    return samples // batch.num_microbatches


def change_shares(run: Run) -> None:
    """Give the ranks the shares of the batch that the last window asks for, from the next batch on.

    All ranks do so between the same two batches. What loader workers have read ahead is read again with the new shares.
    """
    rebalancer, loader = run.loop.rebalancer, run.state.loader
    if rebalancer is None or rebalancer.pending is None:
        return
    change, rebalancer.pending = rebalancer.pending, None
    before, step = run.parallel.plan, run.state.progress.step + 1
    plan = run.parallel.plan = loader.plan = replace(before, shares=change.shares)
    run.loop.own_times.restart()
    rebalancer.changed = (step, change.step_s)
    size = loader.stated_size if plan.batch.unit == "samples" else len(loader.indices)
    for index, group in enumerate(rebalancer.groups):
        slow = next((rank for rank in group if rank in change.times), None)
        had, has = (sum(part.count for part in share_of(size, index, each).parts) for each in (before, plan))
        if had == has or (slow is None and index not in change.raised):
            continue
        what = f"{describe_ranks(group)} {'gets' if len(group) == 1 else 'get'} {has} of {size} samples of a batch"
        why = "no longer slow" if change.shares == rebalancer.stated else "less slow than before"
        why = change.why.get(index, why)
        if slow is not None:
            why = f"rank {slow} takes {change.times[slow]:.2g} times as long as others: {change.kinds[slow]}"
        _say_shares(run, f"{what} instead of {had} from step {step} on; {why}")


def _say_effect(run: Run, rebalancer: Rebalancer, window: OwnTimesWindow) -> None:
    """After the first window with other shares: say what they have changed."""
    if rebalancer.changed is None:
        return
    (step, before_s), rebalancer.changed = rebalancer.changed, None
    now_s, before = window.step_s, f"{1e3 * before_s:.3g} ms before"
    _say_shares(run, f"with the shares of the batch since step {step}, a step takes {1e3 * now_s:.3g} ms; {before}")


def _say_shares(run: Run, sentence: str) -> None:
    """Say what becomes of the shares of the batch, in the terminal and in the run's metrics."""
    run.output.screen.say(sentence)
    shares = list(run.parallel.plan.shares)
    elapsed_s = run.loop.clock.elapsed_s()
    run.output.log.row("shares", elapsed_s, step=run.state.progress.step, shares=shares, sentence=sentence)


def _peers(run: Run) -> list[list[int]]:
    """For each rank, the ranks that compute the same modules: those of its stage."""
    plan, size = run.parallel.plan, run.parallel.world.world_size
    stages = [Mesh(plan.mesh, rank).index("stage") if "stage" in plan.mesh else 0 for rank in range(size)]
    return [[other for other in range(size) if stages[other] == stages[rank]] for rank in range(size)]


def _sentence(rank: int, facts: SlowRankFacts, others: Sequence[int], kind: str, cause: str) -> str:
    window = facts.window
    own_s = (window.data_s[rank] + window.own_s[rank]) / window.steps
    usual_s = statistics.median(window.data_s[o] + window.own_s[o] for o in others) / window.steps
    return (
        f"rank {rank} on host {facts.host} is slow in steps {window.first} to {window.last}: {1e3 * own_s:.3g} ms of "
        f"its own a step, other ranks {1e3 * usual_s:.3g} ms; {kind}: {cause}"
    )


def find_cause(
    window: OwnTimesWindow, others: Sequence[OwnTimesWindow], rank: int, other_ranks: Sequence[int]
) -> tuple[str, str]:
    """Return the kind of cause that makes a rank slow, and what was seen.

    Args:
        window: as the slow rank has it.
        others: as other ranks have it.
        rank: the slow rank.
        other_ranks: the others' numbers.
    """

    def more(value: Callable[[OwnTimesWindow], float]) -> float:
        return value(window) - statistics.median(map(value, others))

    data_s = window.data_s[rank] - statistics.median(window.data_s[other] for other in other_ranks)
    own_s = window.own_s[rank] - statistics.median(window.own_s[other] for other in other_ranks)
    excess_s, load = data_s + own_s, window.load
    waited_s, processor_s = more(lambda each: each.load["waited_s"]), more(lambda each: each.load["processor_s"])
    memory_s = more(lambda each: each.load["memory_s"])
    if window.longest_s >= 0.7 * excess_s and window.longest_s > 0.3:
        return "a pause", (
            f"it stood still once, for {window.longest_s:.2g} s; it was stopped (SIGSTOP, a debugger), its machine was "
            "suspended, or one sample or call took so long"
        )
    if load["throttled_s"] >= _LARGE_PART * excess_s:
        return "throttling", (
            f"the CPU limit of its cgroup (container) stopped it for {load['throttled_s']:.2g} s; raise the limit, or "
            "use fewer threads and workers"
        )
    if memory_s >= _LARGE_PART * excess_s or (more(lambda each: each.load["faults"]) > 100 * window.steps):
        return "memory pressure", (
            f"its host waited {memory_s:.2g} s for memory, with {load['faults']:.0f} major page faults; free memory "
            "there, or use fewer loader workers"
        )
    if more(lambda each: each.load["stolen_s"]) >= _LARGE_PART * excess_s:
        return "throttling", f"a hypervisor took its cores for {load['stolen_s']:.2g} s; ask for cores of its own"
    if waited_s >= _LARGE_PART * excess_s and waited_s > 2 * processor_s:  # who computes more also waits more
        return "other processes on its cores", (
            f"it waited {waited_s:.2g} s for a core more than other ranks; end what else runs there (top), or bind "
            "ranks to cores of their own (--bind-cores)"
        )
    if data_s >= own_s:
        return "data", (
            f"it waited {1e3 * data_s / window.steps:.3g} ms a step longer for its samples; give the loader more "
            "workers, or look at that host's storage"
        )
    if processor_s + max(waited_s, 0.0) >= _LARGE_PART * excess_s:
        times = f"it used {processor_s:.2g} s of processor time more than other ranks"
        usual_hz = statistics.median(each.load["clock_hz"] for each in others)
        if 0 < load["clock_hz"] < 0.8 * usual_hz:
            return "throttling", f"{times}; its cores run at {load['clock_hz'] / 1e9:.2g} GHz, not {usual_hz / 1e9:.2g}"
        return "compute", f"{times}: it computes more than they do, or its cores are slower"
    return "waiting", "it neither computed nor waited for a core or for samples: its script sleeps, or waits for I/O"
