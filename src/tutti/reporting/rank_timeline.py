"""What each rank did in the last steps of a run, from the flight records: when it computed, waited, and for whom.

All functions but `read_timeline` are pure.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tutti.config.run_folder import RunFolder
from tutti.errors import EventRecordError
from tutti.event_record import FILE_NAME, STEP_NAMES, EventRecord, RankEvent, ranks_of_group, read_record
from tutti.reporting.formatting import duration, listed, plural, prefixed

Activity = Literal["computing", "data", "waiting", "exchanging", "evaluation", "checkpoint", "other", "hidden"]
"""waiting: for a rank that has not begun a collective. exchanging: for the data of one that all have begun, or of which
is not known who came last. hidden: a collective in progress while the rank does something else."""

MOST_ROWS = 16
"""Ranks that are shown."""

MOST_STEPS = 6
MOST_SPANS = 300
"""Spans of all rows together; each takes about 250 bytes of the page."""

WIDTH_PX = 1000
"""Page pixels that the shown time takes: spans closer than one are joined."""

_MOST_NAMED, _MOST_WORDS = 8, 240
"""Ranks of a group that are named one by one, and letters of an event's words."""

_LEAST_SHARE = 0.01
"""Share of the ranks' time from which on a rank is said to have kept others waiting."""

_MOST_UNKNOWN = 0.05
"""Share of the waits up to which it may be unknown who came last without a word about it."""

_SAME_CLOCK_S = 0.05
"""Ranks of one host whose Unix times less their monotonic times differ by less share a clock."""

_CLOCK_SHARE = 0.1
"""Share of a step to which the difference of two hosts' clocks must be known for their rows to be compared."""

_MUTUAL = frozenset(
    {"all_reduce", "all_gather", "all_gather_single", "all_gather_into_tensor", "reduce_scatter", "barrier"}
    | {"reduce_scatter_single", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"}
    | {"shared-memory exchange", "shared-memory all-reduce"}
)
"""Collectives that end on no rank before all ranks have begun them."""

_CHECKPOINTS = ("checkpoint", "job.save")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """A part of a row.

    Attributes:
        begun_s, ended_s: seconds from the left edge.
        words: what it is; of joined spans, of the longest.
        count, total_s: how many spans are joined in it, and their seconds.
    """

    activity: Activity
    begun_s: float
    ended_s: float
    words: str
    count: int = 1
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRow:
    """What one rank did in the shown time.

    Attributes:
        spans: those drawn later lie on top.
        waited_s: seconds in which it waited for communication.
        unknown_s: seconds of these of which is not known who came last.
        waited_for: seconds of these that it waited for a rank to begin a collective, by rank.
        waited_in: the same, by what it waited in.
    """

    rank: int
    host: str
    spans: tuple[TimelineSpan, ...]
    waited_s: float
    unknown_s: float
    waited_for: Mapping[int, float]
    waited_in: Mapping[tuple[int, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """The last steps of a run, rank by rank.

    Attributes:
        steps: number and begin of each shown step, in seconds from the left edge.
        seconds: the shown time.
        rows: of the shown ranks; empty if there is nothing to show.
        sentence: who waited for whom.
        clock: which clock the times are of.
        note: what is left out or could not be read; empty if nothing was.
    """

    steps: tuple[tuple[int, float], ...] = ()
    seconds: float = 0.0
    rows: tuple[TimelineRow, ...] = ()
    sentence: str = ""
    clock: str = ""
    note: str = ""


def read_timeline(folder: Path, ranks: Iterable[int]) -> RankTimeline:
    """Read the flight records of a run's ranks; without any, the timeline is empty and its note may say why."""
    records, damages = {}, []
    for rank in ranks:
        path = RunFolder(folder).rank(rank) / FILE_NAME
        try:
            records[rank] = read_record(path)
        except EventRecordError as error:
            damages += [f"rank {rank}: {error}"] if path.exists() else []
    note = f"Flight records could not be read: {damages[0]}." if damages else ""
    note += f" The same holds for {plural(len(damages) - 1, 'more rank')}." if len(damages) > 1 else ""
    timeline = timeline_of(records)
    return replace(timeline, note=" ".join(part for part in (note, timeline.note) if part))


def timeline_of(records: Mapping[int, EventRecord]) -> RankTimeline:
    """Return the timeline of the last steps that the records of some ranks hold."""
    records = _of_one_launch(records)
    clock = _align(records)
    ending_s = max((_newest_s(record) + clock.shifts[rank] for rank, record in records.items()), default=0.0)
    histories = {rank: _history(record, clock.shifts[rank], ending_s) for rank, record in records.items()}
    if not any(history.steps for history in histories.values()):
        return RankTimeline(note="The flight records hold no step." if records else "")
    numbers = {history.record.state.pid: rank for rank, history in histories.items()}
    setting = _Setting(histories=histories, clock=clock, numbers=numbers)
    timeline = RankTimeline()
    for count in range(MOST_STEPS, 0, -1):
        timeline = _shown(setting, count)
        if sum(len(row.spans) for row in timeline.rows) <= MOST_SPANS:
            break
    return timeline


def _of_one_launch(records: Mapping[int, EventRecord]) -> dict[int, EventRecord]:
    """Leave out ranks that a later launch of the run, with fewer ranks, no longer had."""
    filled = {rank: record for rank, record in sorted(records.items()) if record.events}
    newest = max(filled.values(), key=lambda record: record.events[-1].begun_s, default=None)
    size = newest.state.world_size if newest is not None else 0
    return {rank: record for rank, record in filled.items() if record.state.world_size == size and rank < size}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clock:
    """How the ranks' times are brought onto one clock.

    Attributes:
        shifts: seconds to add to each rank's Unix times.
        hosts: a number of each rank's clock; times of ranks with different numbers cannot be compared.
        words: which clock it is.
    """

    shifts: Mapping[int, float]
    hosts: Mapping[int, int]
    words: str


def _align(records: Mapping[int, EventRecord]) -> _Clock:
    """Bring all times onto one clock: the monotonic one of a host, and between hosts by their collectives."""
    machines: list[list[int]] = []
    for rank, record in records.items():
        for machine in machines:
            first = records[machine[0]]
            near = abs(first.clock_offset_s - record.clock_offset_s) < _SAME_CLOCK_S
            if first.state.host == record.state.host and near:
                machine.append(rank)
                break
        else:
            machines.append([rank])
    shifts: dict[int, float] = {}
    for machine in machines:
        shifts |= {rank: records[machine[0]].clock_offset_s - records[rank].clock_offset_s for rank in machine}
    hosts = {rank: number for number, machine in enumerate(machines) for rank in machine}
    if len(machines) < 2:
        words = "All ranks ran on one host and share its monotonic clock." if len(records) > 1 else ""
        return _Clock(shifts=shifts, hosts=hosts, words=words)
    sentences = [f"Times are of rank {machines[0][0]}'s host."]
    for machine in machines[1:]:
        names = f"ranks {listed([str(rank) for rank in machine])}" if len(machine) > 1 else f"rank {machine[0]}"
        least, most = _bounds(records, shifts, machines[0], machine)
        step_s = max((records[rank].state.latest_s for rank in machine), default=0.0)
        if least <= most and (most - least) / 2 <= _CLOCK_SHARE * step_s:
            shifts |= {rank: shifts[rank] + (least + most) / 2 for rank in machine}
            hosts |= dict.fromkeys(machine, 0)
            sentences.append(
                f"The clock of {names} (host {records[machine[0]].state.host}) is set by the collectives that both "
                f"took part in: {(least + most) * 500:+.3g} ms to its Unix time, known to "
                f"±{(most - least) * 500:.2g} ms."
            )
        else:
            begin = _last_step_s(records, shifts, machines[0]) - _last_step_s(records, shifts, machine)
            shifts |= {rank: shifts[rank] + begin for rank in machine}
            sentences.append(
                f"The clock of {names} (host {records[machine[0]].state.host}) cannot be compared with it, because too "
                "few collectives of both are recorded: these rows begin with the same step, and no wait is "
                "attributed across."
            )
    return _Clock(shifts=shifts, hosts=hosts, words=" ".join(sentences))


def _bounds(
    records: Mapping[int, EventRecord], shifts: Mapping[int, float], one: Sequence[int], two: Sequence[int]
) -> tuple[float, float]:
    """Return the least and the most that may be added to the times of `two`.

    No mutual collective ends on a rank before every rank has begun it.
    """
    sides = []
    for machine in (one, two):
        begun: dict[tuple[str, int], float] = {}
        ended: dict[tuple[str, int], float] = {}
        for rank in machine:
            for event in records[rank].events:
                if event.name in _MUTUAL and event.group and event.ended_s is not None and not event.failed:
                    key = (event.group, event.sequence)
                    begun[key] = max(begun.get(key, -math.inf), event.begun_s + shifts[rank])
                    ended[key] = min(ended.get(key, math.inf), event.ended_s + shifts[rank])
        sides.append((begun, ended))
    (begun_one, ended_one), (begun_two, ended_two) = sides
    common = begun_one.keys() & begun_two.keys()
    least = max((begun_one[key] - ended_two[key] for key in common), default=-math.inf)
    most = min((ended_one[key] - begun_two[key] for key in common), default=math.inf)
    return least, most


def _last_step_s(records: Mapping[int, EventRecord], shifts: Mapping[int, float], machine: Sequence[int]) -> float:
    """Return the begin of the last step of a machine's first rank."""
    record, shift = records[machine[0]], shifts[machine[0]]
    steps = _history(record, shift, _newest_s(record) + shift).steps
    return steps[max(steps)][0] if steps else record.events[-1].begun_s + shift


def _newest_s(record: EventRecord) -> float:
    return max(event.ended_s or event.begun_s for event in record.events)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """An event in shifted times; one that has not ended ends with the newest event of any rank."""

    event: RankEvent
    begun_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _History:
    """The events of one rank.

    Attributes:
        events: in the order of their begins.
        steps: begin and end of each step, by its number.
        calls: begin of each collective, by its group and number in it.
    """

    record: EventRecord
    events: tuple[_Timed, ...]
    steps: Mapping[int, tuple[float, float]]
    calls: Mapping[tuple[str, int], float]
    waits: tuple[_Timed, ...]


def _history(record: EventRecord, shift: float, ending_s: float) -> _History:
    state, events = record.state, list(record.events)
    if state.waits_since_s is not None:
        begun_s, about = state.waits_since_s, state.waits_for
        events.append(RankEvent(number=0, kind="wait", name=about, begun_s=begun_s, ended_s=None, blocking=True))
    timed = [
        _Timed(
            event=event,
            begun_s=event.begun_s + shift,
            ended_s=max(ending_s, event.begun_s + shift) if event.ended_s is None else event.ended_s + shift,
        )
        for event in events
    ]
    timed.sort(key=lambda each: (each.begun_s, -each.ended_s))
    calls = {(each.event.group, each.event.sequence): each.begun_s for each in timed if each.event.kind == "collective"}
    return _History(
        record=record, events=tuple(timed), steps=_steps(timed, state.step), calls=calls, waits=tuple(_waits(timed))
    )


def _steps(events: Sequence[_Timed], newest: int) -> dict[int, tuple[float, float]]:
    """Return begin and end of each step, by its number; a step begins when the rank asks for its batch."""
    found: list[tuple[float, float, bool]] = []
    begun_s: float | None = None
    asks = False
    for each in events:
        name, kind = each.event.name, each.event.kind
        if kind == "operation" and name not in STEP_NAMES:
            begun_s = None
        elif kind == "loader":  # of two in a row, the first found the end of an epoch
            begun_s = each.begun_s if begun_s is None or asks else begun_s
        elif begun_s is None and kind == "operation":
            begun_s = each.begun_s
        asks = kind == "loader"
        if name in ("job.step", "job.update"):
            counted = each.event.ended_s is not None and not each.event.failed
            found.append((each.begun_s if begun_s is None else begun_s, each.ended_s, counted))
            begun_s = None
    first = newest - sum(counted for *_, counted in found) + 1
    return {first + index: (begun, ended) for index, (begun, ended, _) in enumerate(found)}


def _waits(events: Sequence[_Timed]) -> Iterable[_Timed]:
    """Yield the times in which the main thread waited, one after another: of nested ones only the outer."""
    until = -math.inf
    for each in events:
        event = each.event
        if event.kind in ("wait", "collective") and event.blocking and not event.in_thread and each.ended_s > until:
            yield replace(each, begun_s=max(each.begun_s, until))
            until = each.ended_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """All ranks' histories on one clock.

    Attributes:
        numbers: rank of each process.
    """

    histories: Mapping[int, _History]
    clock: _Clock
    numbers: Mapping[int, int]


def _shown(setting: _Setting, count: int) -> RankTimeline:
    """Return the timeline of the last `count` steps, or of as many as are recorded."""
    stepping = {rank: history.steps for rank, history in setting.histories.items() if history.steps}
    last = max(max(steps) for steps in stepping.values())
    recorded = [min(steps) for steps in stepping.values() if last in steps]
    first = max(last - count + 1, *recorded)
    begun_s = {
        number: min(steps[number][0] for steps in stepping.values() if number in steps)
        for number in range(first, last + 1)
        if any(number in steps for steps in stepping.values())
    }
    left = min(begun_s.values())
    right = max(steps[last][1] for steps in stepping.values() if last in steps)
    rows = [_rank_row(setting, rank, left, right) for rank in setting.histories]
    chosen = sorted(sorted(rows, key=lambda row: row.waited_s)[:MOST_ROWS], key=lambda row: row.rank)
    joined = _joined(chosen, right - left, MOST_SPANS if count == 1 else None)
    note = (
        f"Of {len(rows)} ranks, the {MOST_ROWS} are shown that waited least, so those that the others waited for."
        if len(rows) > MOST_ROWS
        else ""
    )
    return RankTimeline(
        steps=tuple((number, begun - left) for number, begun in sorted(begun_s.items())),
        seconds=max(right - left, 1e-6),
        rows=joined,
        sentence=_sentence(rows, right - left, len(begun_s)),
        clock=setting.clock.words,
        note=note,
    )


def _rank_row(setting: _Setting, rank: int, left: float, right: float) -> TimelineRow:
    """Return what a rank did between two times, with every span by itself."""
    history = setting.histories[rank]
    below: list[TimelineSpan] = []

    def add(spans: list[TimelineSpan], activity: Activity, begun: float, ended: float, words: str) -> float:
        begun, ended = max(begun, left), min(ended, right)
        if ended > begun:
            span = TimelineSpan(
                activity=activity, begun_s=begun - left, ended_s=ended - left, words=words, total_s=ended - begun
            )
            spans.append(span)
        return max(0.0, ended - begun)

    for each in history.events:
        if each.ended_s > left and each.begun_s < right and (activity := _activity(each, history.waits)) is not None:
            add(below, activity, each.begun_s, each.ended_s, _describe(each.event, setting.numbers))
    above: list[TimelineSpan] = []
    waited = unknown = 0.0
    waited_for: dict[int, float] = defaultdict(float)
    waited_in: dict[tuple[int, str], float] = defaultdict(float)
    for wait in history.waits:
        if wait.ended_s <= left or wait.begun_s >= right:
            continue
        call = _collective_of(wait, history.events)
        words = _describe(wait.event if call is None else call, setting.numbers)
        latest = None if call is None else _latest(setting, rank, call, wait)
        split = wait.begun_s if latest is None else min(wait.ended_s, max(wait.begun_s, latest[1]))
        if latest is not None:
            absent_s = add(above, "waiting", wait.begun_s, split, f"for rank {latest[0]} to begin {words}")
            waited_for[latest[0]] += absent_s
            waited_in[latest[0], call.about or call.name.replace("_", "-") if call is not None else ""] += absent_s
            waited += absent_s
        rest_s = add(above, "exchanging", split, wait.ended_s, f"in {words}")
        waited += rest_s
        unknown += rest_s if latest is None else 0.0
    return TimelineRow(
        rank=rank,
        host=history.record.state.host,
        spans=(*below, *above),
        waited_s=waited,
        unknown_s=unknown,
        waited_for=dict(waited_for),
        waited_in=dict(waited_in),
    )


def _activity(each: _Timed, waits: Sequence[_Timed]) -> Activity | None:
    """Return what an event that is no wait shows of a rank; None for what is shown as a wait."""
    event = each.event
    if event.kind == "loader":
        return "data"
    if event.kind == "operation":
        if event.name in STEP_NAMES:
            return "computing"
        return "evaluation" if event.name == "job.evaluate" else "checkpoint" if event.name in _CHECKPOINTS else "other"
    if event.kind == "wait" or (event.blocking and not event.in_thread):
        return None
    waited = sum(max(0.0, min(each.ended_s, wait.ended_s) - max(each.begun_s, wait.begun_s)) for wait in waits)
    return "hidden" if waited < 0.9 * (each.ended_s - each.begun_s) else None


def _collective_of(wait: _Timed, events: Sequence[_Timed]) -> RankEvent | None:
    """Return the collective in which a rank waited: of its data, that which ended nearest to the wait's end."""
    if wait.event.kind == "collective":
        return wait.event
    held = [
        each
        for each in events
        if each.event.kind == "collective"
        and each.begun_s <= wait.ended_s
        and each.ended_s >= wait.begun_s
        # one without words about its data belongs to the wait only if it began in it
        and (each.event.about == wait.event.name or (not each.event.about and each.begun_s >= wait.begun_s))
    ]
    nearest = min(held, key=lambda each: (not each.event.about, abs(each.ended_s - wait.ended_s)), default=None)
    return None if nearest is None else nearest.event


def _latest(setting: _Setting, rank: int, call: RankEvent, wait: _Timed) -> tuple[int, float] | None:
    """Return which of the other ranks was the last to begin a collective, and when; None if that is not known.

    One that never began it, though its record reaches so far, began at the end of the wait.
    """
    members = ranks_of_group(call.group, setting.numbers)
    others = [other for other in members if other != rank]
    if rank not in members or (len(members) > 2 and call.name not in _MUTUAL):
        return None
    begun: dict[int, float] = {}
    for other in others:
        history = setting.histories.get(other)
        if history is None or setting.clock.hosts[other] != setting.clock.hosts[rank]:
            return None
        begun_s = history.calls.get((call.group, call.sequence))
        if begun_s is None and history.events[0].begun_s > wait.begun_s:
            return None  # the ring has lost it
        begun[other] = wait.ended_s if begun_s is None else begun_s
    latest = max(begun, key=lambda other: begun[other], default=None)
    return None if latest is None else (latest, begun[latest])


def _describe(event: RankEvent, numbers: Mapping[int, int]) -> str:
    """Describe an event in the record's words."""
    parts = [event.name.replace("_", "-") if event.kind == "collective" else event.name]
    if event.kind == "collective":
        ranks = ranks_of_group(event.group, numbers)
        tensor = f"{prefixed(event.nbytes, 'B')} of {event.dtype} {list(event.shape)}" if event.dtype else ""
        between = f"ranks {listed([str(rank) for rank in ranks])}" if ranks else ""
        between = f"{len(ranks)} ranks" if len(ranks) > _MOST_NAMED else between
        parts = [f"{parts[0]} {event.sequence}", tensor, event.about, between]
    elif event.kind == "operation" and len(event.shape) == 2:
        parts.append(f"epoch {event.shape[0]}, batch {event.shape[1]}")
    parts += [f"module {event.module}" if event.module else "", f"at {event.line}" if event.line else ""]
    parts += ["not ended" if event.ended_s is None else "failed" if event.failed else ""]
    return ", ".join(part for part in parts if part)[:_MOST_WORDS]


def _joined(rows: Sequence[TimelineRow], seconds: float, most: int | None) -> tuple[TimelineRow, ...]:
    """Join short spans of one activity that lie side by side; the more, the fewer spans there may be."""
    nearest_s = seconds / WIDTH_PX
    while True:
        result = tuple(replace(row, spans=_join(row.spans, nearest_s)) for row in rows)
        if most is None or sum(len(row.spans) for row in result) <= most or nearest_s > seconds:
            return result
        nearest_s *= 2


def _join(spans: Sequence[TimelineSpan], nearest_s: float) -> tuple[TimelineSpan, ...]:
    result: list[TimelineSpan] = []
    newest: dict[Activity, int] = {}
    for span in spans:
        at = newest.get(span.activity)
        last = None if at is None else result[at]
        if at is not None and last is not None and span.begun_s - last.ended_s < nearest_s:
            short = min(span.ended_s - span.begun_s, last.ended_s - last.begun_s) < 2 * nearest_s
            if short and span.activity != "computing":
                result[at] = _both(last, span)
                continue
        newest[span.activity] = len(result)
        result.append(span)
    return tuple(result)


def _both(one: TimelineSpan, two: TimelineSpan) -> TimelineSpan:
    longer = max(one, two, key=lambda span: span.ended_s - span.begun_s)
    return replace(
        one,
        ended_s=max(one.ended_s, two.ended_s),
        words=longer.words,
        count=one.count + two.count,
        total_s=one.total_s + two.total_s,
    )


def _sentence(rows: Sequence[TimelineRow], seconds: float, steps: int) -> str:
    """Say which rank the others waited for most, of all ranks, and for how long."""
    within = f"the last {plural(steps, 'step')} ({duration(seconds)})"
    if len(rows) < 2:
        return f"{within[:1].upper()}{within[1:]} of the only rank, which waits for no other."
    whole, waited = seconds * len(rows), sum(row.waited_s for row in rows)
    caused: dict[int, float] = defaultdict(float)
    where: dict[tuple[int, str], float] = defaultdict(float)
    for row in rows:
        for rank, part in row.waited_for.items():
            caused[rank] += part
        for key, part in row.waited_in.items():
            where[key] += part
    words = f"In {within}, {len(rows)} ranks waited {duration(waited)} for communication, "
    words += f"{waited / whole:.0%} of their time."
    unknown = sum(row.unknown_s for row in rows)
    order = sorted(caused, key=lambda rank: -caused[rank])
    is_known = unknown <= _MOST_UNKNOWN * waited
    if is_known and (not order or caused[order[0]] < _LEAST_SHARE * whole):
        words += f" No rank kept the others waiting for it for {_LEAST_SHARE:.0%} of that time or more."
    elif order:
        top = order[0]
        mostly = max((key for key in where if key[0] == top), key=lambda key: where[key])[1]
        together = " together" if len(rows) > 2 else ""
        words += f" They waited longest for rank {top} to begin a collective: {duration(caused[top])}{together}"
        words += f", mostly in {mostly}" if mostly else ""
        if len(order) > 1 and caused[order[1]] > 0.5 * caused[top]:
            words += f"; for rank {order[1]}, {duration(caused[order[1]])}"
        words += "."
    if not is_known:
        words += f" For {duration(unknown)} of the waits it is not known who came last."
    return words.replace("%", " %")
