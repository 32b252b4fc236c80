"""Why ranks hang, in words: who waits where, who is missing, and what that rank does instead. A pure function."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tutti.config.safe_text import plain_text
from tutti.event_record import RankEvent, ranks_of_group
from tutti.launch.rank_views import LoaderWorker, ObservedRank, continue_command
from tutti.process_stacks import describe_place, places_of_dump, short_path

VerdictKind = Literal["missing", "mismatch", "stuck", "none"]
"""missing: some ranks did not come to what others wait in. mismatch: ranks wait in different collectives, or in one
with different tensors. stuck: all are in the same one. none: nobody waits."""

_MOST_PLACES = 300

_ROOTS = "src or dst"
"""In what a broadcast, a scatter, a reduction or a gather differs that names another rank."""

_STATISTICS = "statistics over "
"""How the name of the data begins that batch norms exchange while they train."""

_RENDEZVOUS = "the rendezvous"
"""The operation in which ranks meet. A rank waits in it as a whole, as there are no collectives yet."""

_WHOLE = frozenset(
    {"all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "reduce_scatter_single"}
    | {"all_gather_into_tensor", "reduce_scatter_tensor"}
    | {"shared-memory exchange", "shared-memory all-reduce"}
)
"""Collectives in which all ranks have tensors of one shape and dtype."""

_CALL = "call the same collectives, in the same order, on every rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What a rank waits in.

    Attributes:
        rank: the rank.
        event: the collective; None where only the kind of data is known, as of messages.
        about: which data it waits for.
        since_s: Unix time of its beginning.
        operation: the method of the Job in which it waits; empty outside of them.
        line, module: where the script and the model are in it; empty if that is not known.
    """

    rank: int
    event: RankEvent | None
    about: str
    since_s: float
    operation: str
    line: str
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """Why ranks hang.

    Attributes:
        kind: see `VerdictKind`.
        message: the sentence; empty for "none".
        waiting: the ranks that wait for others.
        missing: the ranks that they wait for.
        ranks: what each rank does, or did last, in words.
        hosts: of each rank that has a record.
    """

    kind: VerdictKind
    message: str
    waiting: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    ranks: Mapping[int, str]
    hosts: Mapping[int, str] = field(default_factory=dict)


def judge(views: Sequence[ObservedRank], now_s: float) -> HangVerdict:
    """Say why ranks hang, if they do.

    Args:
        views: of all ranks that can be seen.
        now_s: Unix time.
    """
    waits = {view.rank: wait for view in views if (wait := wait_of(view)) is not None}
    lines = {view.rank: describe(view, waits.get(view.rank), now_s) for view in views}
    hosts = {view.rank: view.record.state.host for view in views if view.record is not None}
    if not waits:
        return HangVerdict(kind="none", message="", ranks=lines)
    members = {view.rank: view for view in views}
    numbers = {view.record.state.pid: view.rank for view in views if view.record is not None}
    found = _mismatch(waits, members, numbers) or _different(waits, members, now_s)
    if found:
        return HangVerdict(kind="mismatch", message=found, waiting=tuple(waits), ranks=lines, hosts=hosts)
    missing = _missing(waits, members, numbers)
    if missing:
        return HangVerdict(
            kind="missing",
            message=_missing_words(waits, missing, members, now_s),
            waiting=tuple(rank for rank in waits if rank not in missing),
            missing=missing,
            ranks=lines,
            hosts=hosts,
        )
    words = _stuck_words(waits, members, now_s, caught_error(views))
    return HangVerdict(kind="stuck", message=words, waiting=tuple(waits), ranks=lines, hosts=hosts)


def mismatch_of(views: Sequence[ObservedRank], rank: int) -> str:
    """Return the sentence for a collective of a rank in which others take part differently; empty if there is none.

    Args:
        views: of all ranks that can be seen.
        rank: one that native code has ended in a collective, which it may have started only.
    """
    members = {view.rank: view for view in views}
    numbers = {view.record.state.pid: view.rank for view in views if view.record is not None}
    pending = [e for e in _events(members[rank]) if e.kind == "collective" and (e.ended_s is None or e.failed)]
    for event in reversed(pending):
        wait = Wait(rank=rank, event=event, about="", since_s=event.begun_s, operation="", line=event.line, module="")
        if found := _mismatch({rank: wait}, members, numbers):
            return found
    return ""


def wait_of(view: ObservedRank) -> Wait | None:
    """Return what a rank waits in, or waited in when it ended; None if it does not wait for other ranks."""
    if view.record is None:
        return None
    state, events = view.record.state, view.record.events
    pending = [event for event in events if event.kind == "collective" and (event.ended_s is None or event.failed)]
    blocking = [event for event in pending if event.blocking]
    event = blocking[-1] if blocking else None
    if event is not None and event.failed and event.number + 3 < state.newest:
        event = None  # the script has caught the error and gone on
    since = state.waits_since_s
    if since is not None and any(each.kind != "collective" and each.begun_s > since for each in events):
        since = None  # the script has caught the error of that wait and gone on
    operation = _operation(events)
    if event is None and since is None and operation is not None and operation.name == _RENDEZVOUS:
        since = operation.begun_s
    if event is None and since is None:
        return None
    if event is None:
        begun = [each for each in pending if each.ended_s is None]
        event = next((each for each in begun if each.about == state.waits_for), begun[0] if begun else None)
    since_s = since or (event.begun_s if event is not None else 0.0)
    line, module = (event.line, event.module) if event is not None else ("", "")
    if view.stack is not None:
        line, module = view.stack.line or line, view.stack.module or module
    if not line and operation is not None:
        line, module = operation.line, operation.module
    return Wait(
        rank=view.rank,
        event=event,
        about=state.waits_for or (event.about if event is not None else ""),
        since_s=since_s,
        operation=operation.name if operation is not None else "",
        line=line,
        module=module,
    )


def operation_of(view: ObservedRank) -> str:
    """Return the name of the operation that a rank is in; empty if it is in none."""
    found = _operation(_events(view))
    return found.name if found is not None and found.ended_s is None else ""


def _operation(events: Iterable[RankEvent]) -> RankEvent | None:
    """Return the operation that a rank is in, or in which it has failed last."""
    return next((e for e in reversed(list(events)) if e.kind == "operation" and (e.ended_s is None or e.failed)), None)


def _mismatch(waits: Mapping[int, Wait], members: Mapping[int, ObservedRank], numbers: Mapping[int, int]) -> str:
    """Return the sentence for ranks that take part in one collective differently; empty if there are none."""
    for wait in waits.values():
        event = wait.event
        if event is None or not event.group or ">" in event.group:
            continue
        for other in ranks_of_group(event.group, numbers):
            theirs = _same_number(members.get(other), event)
            if other == wait.rank or theirs is None:
                continue
            (one, first), (two, second) = sorted([(wait.rank, event), (other, theirs)])
            places = [
                f" at {_line(each.line)}" if each.of_script else _at(waits[rank]) if rank in waits else ""
                for rank, each in ((one, first), (two, second))
            ]
            if first.of_script != second.of_script:  # tutti has begun the other
                return (
                    f"ranks {one} and {two} meet in different collectives: rank {one} in {_tensor(first)}{places[0]}, "
                    f"rank {two} in {_tensor(second)}{places[1]}; {_CALL}"
                )
            if difference := _difference(first, second):
                return (
                    f"ranks {one} and {two} take part in collective {event.sequence} of {_group(event.group, numbers)} "
                    f"with different {difference}: rank {one} with {_tensor(first)}{places[0]}, rank {two} with "
                    f"{_tensor(second)}{places[1]}; {_remedy_of(difference)}"
                )
    return ""


def _same_number(view: ObservedRank | None, event: RankEvent) -> RankEvent | None:
    if view is None or view.record is None:
        return None
    return next((e for e in view.record.events if (e.group, e.sequence) == (event.group, event.sequence)), None)


def _difference(one: RankEvent, two: RankEvent) -> str:
    """Return in what two ranks' parts of one collective differ; empty if they fit."""
    if one.name != two.name:
        return "operations"
    if one.of_script and one.about != two.about:
        return _ROOTS
    if one.name not in _WHOLE:
        return ""
    if one.dtype != two.dtype:
        return "dtypes"
    flat = "shared-memory" in one.name or "gather" in one.name
    return "" if one.shape == two.shape or (flat and one.nbytes == two.nbytes) else "shapes"


def _remedy_of(difference: str) -> str:
    if difference == "operations":
        return _CALL
    if difference == _ROOTS:
        return "name the same src or dst on every rank"
    return f"give tensors of the same shape and dtype on every rank ({difference} that depend on the data need padding)"


def _different(waits: Mapping[int, Wait], members: Mapping[int, ObservedRank], now_s: float) -> str:
    """Return the sentence for ranks of which each waits in a collective that the other has not begun."""
    events = {rank: wait for rank, wait in waits.items() if wait.event is not None and wait.event.group}
    for one, first in events.items():
        for two, second in events.items():
            if two <= one or first.event is None or second.event is None:
                continue
            if _same_number(members[one], second.event) or _same_number(members[two], first.event):
                continue  # the one has done, or does, what the other waits for
            if _takes_part(one, second.event) and _takes_part(two, first.event):
                return (
                    f"rank {one} waits in {_words(first)} while rank {two} waits in {_words(second)}, for "
                    f"{now_s - max(first.since_s, second.since_s):.0f} s; {_CALL}{_mode_hint(first, second)}"
                )
    return ""


def _mode_hint(first: Wait, second: Wait) -> str:
    """Return a clause on batch norms that exchange statistics on one rank only, in the same step; empty otherwise."""
    exchanging = [wait.about.startswith(_STATISTICS) for wait in (first, second)]
    if first.operation != second.operation or exchanging[0] == exchanging[1]:
        return ""
    other = second.rank if exchanging[0] else first.rank
    return f"; batch norms of rank {other} exchange no statistics: look whether its model is in evaluation mode"


def _takes_part(rank: int, event: RankEvent) -> bool:
    ranks = event.group.partition("#")[0]
    return ranks.startswith("pid") or str(rank) in re.split("[,>]", ranks)


def _missing(
    waits: Mapping[int, Wait], members: Mapping[int, ObservedRank], numbers: Mapping[int, int]
) -> tuple[int, ...]:
    """Return the ranks that have not come to a collective in which others wait."""
    found: set[int] = set()
    for wait in waits.values():
        event = wait.event
        if event is None or not event.group:
            found |= members.keys() - waits.keys()
            continue
        for rank in ranks_of_group(event.group, numbers):
            view = members.get(rank)
            if rank == wait.rank or view is None:
                continue
            newest = max((e.sequence for e in _events(view) if e.group == event.group), default=0)
            if newest < event.sequence and rank not in waits:
                found.add(rank)
    if not found:  # they wait for one that waits for nobody, over others
        found = {rank for rank in members.keys() - waits.keys() if not _ended_in_order(members[rank])}
    return tuple(sorted(found))


def _events(view: ObservedRank) -> tuple[RankEvent, ...]:
    return view.record.events if view.record is not None else ()


def _ended_in_order(view: ObservedRank) -> bool:
    return view.record is not None and view.record.state.ended


def _missing_words(
    waits: Mapping[int, Wait], missing: Sequence[int], members: Mapping[int, ObservedRank], now_s: float
) -> str:
    waiting = [wait for rank, wait in sorted(waits.items()) if rank not in missing]
    first = waiting[0]
    same = [wait.rank for wait in waiting if _words(wait) == _words(first)]
    verb = "waits" if len(same) == 1 else "wait"
    absent = "; ".join(f"{_ranks([rank])} has not come: it {does(members[rank], now_s)}" for rank in missing)
    remedies = dict.fromkeys(remedy(members[rank]) for rank in missing)
    return (
        f"{_ranks(same)} {verb} for {now_s - first.since_s:.0f} s in {_words(first)}; {absent}; {'; '.join(remedies)}"
    )


def caught_error(views: Sequence[ObservedRank]) -> str:
    """Return the sentence for a collective of the script whose error the script has caught; empty if there is none."""
    for view in views:
        failed = [e for e in _events(view) if e.kind == "collective" and e.of_script and e.failed]
        newest = view.record.state.newest if view.record is not None else 0
        if failed and failed[-1].number < newest:
            return (
                f"rank {view.rank}'s {_collective(failed[-1])} at {_line(failed[-1].line)} had failed before, and the "
                "script went on: it must not catch that error, because the connections of its group are closed then"
            )
    return ""


def _stuck_words(waits: Mapping[int, Wait], members: Mapping[int, ObservedRank], now_s: float, caught: str) -> str:
    first = next(iter(waits.values()))
    hosts = {view.record.state.host for view in members.values() if view.record is not None}
    between = f" between hosts {', '.join(sorted(hosts))}" if len(hosts) > 1 else ""
    remedy = f"look at the network{between}: links, firewall, and `tutti doctor`"
    if len(hosts) == 1:  # or several of one name, such as containers
        remedy += "; on one host, in the ranks' stderr.log for an earlier collective that failed or had other arguments"
    verb = "waits" if len(waits) == 1 else "wait"
    if caught:
        return f"{_ranks(sorted(waits))} {verb} for {now_s - first.since_s:.0f} s in {_words(first)}; {caught}"
    return (
        f"{_ranks(sorted(waits))} {verb} for {now_s - first.since_s:.0f} s in {_words(first)}, to which all have come, "
        f"but no data arrives; {remedy}"
    )


def does(view: ObservedRank, now_s: float) -> str:
    """Say what a rank that others wait for does, as a clause without a subject."""
    process, stack = view.process, view.stack
    if view.record is None:
        return "has no flight record, so it has not begun" if not view.damage else f"cannot be seen ({view.damage})"
    last = last_operation(view)
    after = f", after {last}" if last else ""
    if process is None and not view.elsewhere and view.failed:
        return f"waited too long{describe_place(view.failed)}{after}"
    if process is None and not view.elsewhere:
        return f"has ended{'' if _ended_in_order(view) else ' without a word'}{after}"
    if process is not None and process.letter in "Tt":
        by = "a debugger" if process.letter == "t" else "a signal (SIGSTOP)"
        return f"is stopped by {by}, process {process.pid}{_place(view)}{after}"
    loader = _pending(view, "loader")
    if process is not None and process.letter == "D":
        where = f" in the kernel's {process.place}" if process.place else ""
        return f"waits for a disk or another device{where}{_place(view)}{after}"
    if stack is None and process is not None and not view.elsewhere:
        return f"holds the interpreter's lock in native code{_place_of_holder(view)}{after}"
    if loader is not None:
        at = _place(view) if view.worker is None else _place_of_worker(view.worker)
        return f"waits {now_s - loader.begun_s:.0f} s for its data loader's next batch{at}{after}"
    doing = "is"
    if process is not None and process.letter == "R":
        doing = "computes"
    operation = _operation(_events(view))
    within = f" in {operation.name}" if operation is not None else ""
    return f"{doing}{within}{_place(view)}{after}"


def remedy(view: ObservedRank) -> str:
    """Say what helps against what a rank does that others wait for."""
    process = view.process
    if view.record is not None and process is None and not (view.elsewhere or view.failed):
        return "every rank must take the same number of steps: end the loop by job.should_stop(condition)"
    if process is not None and process.letter in "Tt":
        there = f" on host {view.record.state.host}" if view.elsewhere and view.record is not None else ""
        return f"let it go on with `{continue_command(process.pid)}`{there}, or end the run"
    if process is not None and process.letter == "D":
        return "look at the disk or file system that it uses"
    if _pending(view, "loader") is not None:
        if view.worker is not None and view.worker.letter in "Tt":
            return f"let it go on with `{continue_command(view.worker.pid)}`, or end the run"
        return "correct what the data set waits for there, or give the loader more workers"
    if process is not None and process.letter == "R":
        return "raise --timeout if that takes so long, do it on all ranks, or before training"
    return "correct what it waits for there, or do it on every rank"


def _place_of_worker(worker: LoaderWorker) -> str:
    state = "is stopped by a signal (SIGSTOP)" if worker.letter in "Tt" else f"is{describe_place(worker.frames)}"
    return f"; worker process {worker.pid} {state}"


def _pending(view: ObservedRank, kind: str) -> RankEvent | None:
    return next((e for e in reversed(_events(view)) if e.kind == kind and e.ended_s is None), None)


def _place(view: ObservedRank) -> str:
    """Return where a rank is, with the line of the script, its text and the innermost call."""
    stack = view.stack
    if stack is None:
        pending = [event for event in _events(view) if event.ended_s is None and event.line]
        return f" at {_line(pending[-1].line)}" if pending else ""
    frames = stack.threads[0].frames if stack.threads else ()
    return describe_place(frames, f" of module {stack.module}" if stack.module else "")


def _place_of_holder(view: ObservedRank) -> str:
    """Return where a rank holds the interpreter's lock, as a clause: in the main thread, or else in another one."""
    frames = places_of_dump(view.native)
    if len(frames) > 1 and view.process is not None and "futex" in view.process.place:
        frames = frames[1:]  # the main thread waits for a lock, as for that of the interpreter
    words = " or ".join(f"{short_path(frame.file)}:{frame.line} in {frame.function}" for frame in frames)
    return plain_text(f": {words}"[:_MOST_PLACES]) if words else ""


def describe(view: ObservedRank, wait: Wait | None, now_s: float) -> str:
    """Say what a rank does now, or did last."""
    if view.record is not None and not view.lives:
        newest = view.record.events[-1] if view.record.events else None
        ago = f", {now_s - (newest.ended_s or newest.begun_s):.0f} s ago" if newest is not None else ""
        waited = f"; it waited in {_words(wait)}" if wait is not None else ""
        how = "ended" if view.record.state.ended else "ended without a word"
        if not (last := last_operation(view)):
            return f"{how} before its first operation{waited}"
        return f"{how} after step {view.record.state.step}; the last was {last}{ago}{waited}"
    if wait is not None:
        return f"waits for {now_s - wait.since_s:.0f} s in {_words(wait)}"
    return does(view, now_s)


def last_operation(view: ObservedRank) -> str:
    """Name the last operation that a rank has ended, with where it was; an empty text if there is none."""
    ended = [event for event in _events(view) if event.kind == "operation" and event.ended_s is not None]
    if not ended:
        return ""
    event = ended[-1]
    place = f" (epoch {event.shape[0]}, batch {event.shape[1]})" if len(event.shape) == 2 else ""
    return f"{event.name}{place}"


def _words(wait: Wait) -> str:
    """Name what a rank waits in."""
    event = wait.event
    if event is None and wait.operation == _RENDEZVOUS:
        return f"{_RENDEZVOUS}{_at(wait)}"
    what = f"a message ({wait.about})" if event is None else _collective(event)
    about = f", {wait.about}" if event is not None and wait.about else ""
    return f"{what}{about}{_within(wait)}{_at(wait)}"


def _collective(event: RankEvent) -> str:
    ranks = event.group.partition("#")[0]
    source, message, target = ranks.partition(">")
    group = f" from rank {source} to rank {target}" if message else f" of ranks {ranks.replace(',', ', ')}"
    group = "" if ranks.startswith("pid") else group
    tensor = f" of {_tensor(replace(event, name=''))}" if event.shape or event.dtype else ""
    return f"{event.name.replace('_', '-')} {event.sequence}{tensor}{group}"


def _within(wait: Wait) -> str:
    inside = f" in module {wait.module}" if wait.module else ""
    return f"{inside}, in {wait.operation}" if wait.operation else inside


def _at(wait: Wait) -> str:
    return f" at {_line(wait.line)}" if wait.line else ""


def _line(line: str) -> str:
    file, _, number = line.rpartition(":")
    return plain_text(f"{short_path(file)}:{number}")


def _tensor(event: RankEvent) -> str:
    named = f"{event.name.replace('_', '-')} of " if event.name else ""
    root = f" {event.about}" if event.of_script and event.name and event.about else ""
    return f"{named}{event.dtype or 'no tensor'} {list(event.shape)}{root}" if event.dtype else f"{named}no tensor"


def _group(group: str, numbers: Mapping[int, int]) -> str:
    return _ranks(ranks_of_group(group, numbers))


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *head, last = map(str, ranks)
    return f"ranks {', '.join(head)} and {last}"
