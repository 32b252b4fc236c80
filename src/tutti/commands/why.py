"""`tutti.why`: why a run hangs, or what each of its ranks did last."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tutti.commands.values import StrPath, needed_path, path_of
from tutti.config.run_folder import RunFolder
from tutti.errors import ReportError

if TYPE_CHECKING:
    from tutti.launch.hang_verdict import HangVerdict
    from tutti.launch.rank_views import ObservedRank

RECHECK_S = 1.5
"""Seconds between two looks at the records of a living run."""

PATIENCE_S = 5.0
"""A wait that is shorter, or shorter than three of the slowest step, is no hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunExplanation:
    """What a run does, or what it did last.

    Attributes:
        status: whether it hangs, goes on, or has ended.
        message: the verdict, as a sentence.
        kind: of the verdict: missing, mismatch, stuck or none.
        waiting: ranks that wait for others.
        missing: ranks that they wait for.
        step: number of the latest update of any rank.
        ranks: what each rank does or did last, in words.
        stacks: the Python stack of each living rank's main thread, from the innermost call to the script's first.
        damaged: why records could not be read, by rank.
    """

    status: Literal["hangs", "goes on", "ended"]
    message: str
    kind: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    step: int
    ranks: Mapping[int, str]
    stacks: Mapping[int, tuple[str, ...]]
    damaged: Mapping[int, str]


def why(run: StrPath, *, trace: StrPath | None = None) -> RunExplanation:
    """Say why a run hangs: who waits where, and what the missing rank does. It disturbs no rank.

    Args:
        run: the folder of a run that lives or has ended.
        trace: a file for the flight records as a trace, for Perfetto or chrome://tracing.

    Raises:
        ReportError: the folder has no flight record, or the trace cannot be written.
    """
    folder, file = needed_path("run", run), path_of("trace", trace)
    if file is not None:
        write_trace(folder, file)
    return explained(folder)


_TRACKS: Mapping[str, int] = {"operation": 0, "loader": 0, "wait": 0, "collective": 1}
"""Kind of event -> its track: collectives may overlap the others."""


def write_trace(run: Path, file: Path) -> Path:
    """Write the flight records of a run as a trace for Perfetto or chrome://tracing; return the file.

    Args:
        run: the run folder.
        file: the trace, in the JSON format of Chrome.

    Raises:
        ReportError: there is no record, or the file cannot be written.
    """
    from tutti.launch.rank_views import ranks_in, view_ranks

    folder = RunFolder(run)
    records = {view.rank: view.record for view in view_ranks(folder, ranks_in(folder), ask=False) if view.record}
    if not records:
        raise ReportError(f"no rank of {run} has a flight record; runs before this version have none")
    times = (event.ended_s or event.begun_s for record in records.values() for event in record.events)
    newest_s = max(times, default=0.0)
    entries: list[dict[str, object]] = []
    for rank, record in records.items():
        entries.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for event in record.events:
            ended_s = event.ended_s or max(newest_s, event.begun_s)
            details = {"group": event.group, "sequence": event.sequence, "dtype": event.dtype, "shape": event.shape}
            details |= {"nbytes": event.nbytes, "about": event.about, "line": event.line, "module": event.module}
            details |= {"pending": event.ended_s is None, "failed": event.failed}
            entries.append(
                {
                    "name": event.name,
                    "cat": event.kind,
                    "ph": "X",
                    "ts": event.begun_s * 1e6,
                    "dur": (ended_s - event.begun_s) * 1e6,
                    "pid": rank,
                    "tid": _TRACKS[event.kind],
                    "args": {name: value for name, value in details.items() if value},
                }
            )
    try:
        file.write_text(json.dumps({"traceEvents": entries}), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{file} cannot be written: {error.strerror}; name another file") from None
    return file


def explained(run: Path) -> RunExplanation:
    """Look at the ranks of a run, twice if they live.

    Raises:
        ReportError: the folder has no flight record.
    """
    from tutti.launch.failure import stored_failure
    from tutti.launch.hang_verdict import judge
    from tutti.launch.rank_views import ranks_in, view_ranks

    folder = RunFolder(run)
    ranks = ranks_in(folder)
    if not ranks:
        raise ReportError(f"{run} has no folder of a rank; name the run folder that `tutti run` has printed")
    first = view_ranks(folder, ranks, ask=False)
    if all(view.record is None for view in first):
        damage = next((view.damage for view in first if view.damage), "")
        raise ReportError(damage or f"no rank of {run} has a flight record; runs before this version have none")
    first = _of_newest(first)
    ranks = [view.rank for view in first]
    lives = any(view.process is not None or view.elsewhere for view in first)
    if lives:
        time.sleep(RECHECK_S)
    views = view_ranks(folder, ranks, ask=lives)
    return _explanation(first, views, judge(views, time.time()), stored_failure(folder))


def _of_newest(views: "list[ObservedRank]") -> "list[ObservedRank]":
    """Return the ranks that the run had last, when it lost ranks or was resumed with fewer."""

    def newest(view: "ObservedRank") -> tuple[bool, float]:
        events = view.record.events if view.record is not None else ()
        return view.process is not None, max((event.begun_s for event in events), default=0.0)

    record = max((view for view in views if view.record is not None), key=newest).record
    return [view for view in views if record is None or view.rank < record.state.world_size]


def _explanation(
    first: "list[ObservedRank]", views: "list[ObservedRank]", verdict: "HangVerdict", failure: str
) -> RunExplanation:
    states = [view.record.state for view in views if view.record is not None]
    step = max((state.step for state in states), default=0)
    status, message = _status(first, views, verdict, step, failure)
    return RunExplanation(
        status=status,
        message=message,
        kind=verdict.kind,
        waiting=verdict.waiting,
        missing=verdict.missing,
        step=step,
        ranks=verdict.ranks,
        stacks={view.rank: _stack(view) for view in views if view.stack is not None or view.native},
        damaged={view.rank: view.damage for view in views if view.damage},
    )


def _status(
    first: "list[ObservedRank]", views: "list[ObservedRank]", verdict: "HangVerdict", step: int, failure: str
) -> tuple[Literal["hangs", "goes on", "ended"], str]:
    from tutti.launch.hang_verdict import wait_of

    if not any(view.lives for view in views):
        ended = f"the run has ended after step {step}"
        if failure:
            return "ended", f"{ended}: {failure}"
        # Who was missing is not known any more, because all ranks are gone.
        last = verdict.message if verdict.kind == "mismatch" else verdict.message.partition("; ")[0]
        return "ended", f"{ended}; when it ended, {last}" if last else ended
    states = [view.record.state for view in views if view.record is not None]
    before = [view.record.state.newest for view in first if view.record is not None]
    moved = before != [state.newest for state in states]
    slowest_s = max((state.slowest_s for state in states), default=0.0)
    since = [wait.since_s for view in views if (wait := wait_of(view)) is not None]
    pending = [
        event.begun_s
        for view in views
        if view.record is not None
        for event in view.record.events
        if event.blocking and event.ended_s is None
    ]
    waited_s = time.time() - min([*since, *pending], default=time.time())
    if verdict.message and not moved and waited_s > max(PATIENCE_S, 3 * slowest_s):
        return "hangs", verdict.message
    latest_s = max((state.latest_s for state in states), default=0.0)
    words = f"the run goes on: step {step}" + (f", the last step took {latest_s:.3g} s" if latest_s else "")
    now = f"; for now, {verdict.message}" if verdict.message and waited_s > 1 else ""
    return "goes on", words + now


def _stack(view: "ObservedRank") -> tuple[str, ...]:
    from tutti.process_stacks import frames_of_dump, short_path
    from tutti.stack_watch import is_of_script

    frames = frames_of_dump(view.native)
    if view.stack is not None:
        frames = [*view.stack.threads[0].frames] if view.stack.threads else []
    scripts = [place for place, frame in enumerate(frames, 1) if frame.file[:1] == "/" and is_of_script(frame.file)]
    frames = frames[: max(scripts, default=len(frames))]  # those before the script are the launcher's
    return tuple(f"{short_path(frame.file)}:{frame.line} in {frame.function}" for frame in frames)
