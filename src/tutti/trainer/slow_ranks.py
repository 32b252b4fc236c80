"""Names ranks that are slower than the others before they meet, with the cause as each rank knows it of itself."""

import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tutti.parallel.mesh import Mesh
from tutti.trainer.guard.findings import warn
from tutti.trainer.own_times import OwnTimesWindow
from tutti.trainer.run_state import Run

_LARGE_PART = 0.4
"""The part of a rank's excess that a cause must explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRankFacts:
    """What a rank knows of itself in a window."""

    host: str
    window: OwnTimesWindow


def note_own_times(run: Run, columns: Sequence[float], step: int) -> None:
    """Add the own times of all ranks; name those that are slow. Collective where slow ranks are not those before.

    Args:
        run: the run.
        columns: the number of each rank in the losses' message.
        step: number of the step that they are of, from 1.
    """
    own_times = run.loop.own_times
    window = own_times.add(columns, step)
    if window is None:
        return
    groups = _peers(run)
    excess = {rank: window.excess_s(rank, groups[rank]) for rank in range(len(columns))}
    slow = {rank for rank, seconds in excess.items() if seconds}
    if slow == own_times.slow.keys():
        return
    for rank in sorted(own_times.slow.keys() - slow):
        run.output.screen.say(f"rank {rank} is no slower than the others since step {window.first}")
        del own_times.slow[rank]
    if not slow - own_times.slow.keys():
        return
    facts: list[SlowRankFacts] = run.loop.watch.gather(
        "slow ranks", SlowRankFacts(host=socket.gethostname(), window=window)
    )
    for rank in sorted(slow - own_times.slow.keys()):
        others = [other for other in groups[rank] if other != rank and other not in slow] or [
            other for other in groups[rank] if other != rank
        ]
        kind, cause = find_cause(facts[rank].window, [facts[other].window for other in others], rank, others)
        own_times.slow[rank] = kind
        warn(run, _sentence(rank, facts[rank], others, kind, cause))


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
