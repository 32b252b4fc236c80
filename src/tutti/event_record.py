"""The flight record: what a rank did last, in a small file that outlives it and is readable while the rank hangs.

The file is mapped into memory: a header, a ring of events of fixed size, and the texts that they name. Writing an
event is one `struct.pack_into`, so the record is always on. The kernel keeps the pages of a killed process, so nothing
is flushed.
"""

import contextlib
import itertools
import math
import mmap
import os
import socket
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any, Literal

from tutti.errors import EventRecordError

FILE_NAME = "flight.bin"
"""Name of the record in a rank's folder."""

CAPACITY = 1024
"""Events that a record holds."""

EventKind = Literal["operation", "collective", "loader", "wait"]

_KINDS: tuple[EventKind, ...] = ("operation", "collective", "loader", "wait")

_MAGIC = b"TUTTIFR\1"

_FIXED = struct.Struct("<8sIIIIIIQq64s")
"""Magic, capacity, bytes of texts, rank, world size, process, reserved, start of the process in ticks, Unix time less
monotonic time in ns, host; a CRC-32 of all of them follows."""

_CRC = struct.Struct("<I")

_STATE_AT = 128
_STATE = struct.Struct("<QIIqqqqHBxI")
"""Newest event, bytes of texts, steps, their slowest and latest in ns, end of the latest, start of the wait in
progress, text of what is waited for, whether the rank has ended in order, number of the latest step."""

_HEADER_NBYTES = 256

_EVENT = struct.Struct("<QqqHHHHHHHBBIQ5I8x")
"""Number, begin and end in monotonic ns (end 0: pending), texts (kind, name, group, dtype, about, line, module), flags,
dims, number in the group, bytes, shape."""

_TEXTS_NBYTES = 1 << 16
_MOST_TEXT = 300
_MOST_DIMS = 5

_ENDED_AT, _FIXED_AT, _ABOUT_AT, _LINE_AT, _FLAGS_AT, _DIMS_AT, _SEQUENCE_AT, _SHAPE_AT = 16, 24, 32, 34, 38, 39, 40, 52

_MOST_WORKS = 64
"""New work handles that are remembered; a channel says at once which data they carry."""

_NEAR = 64
"""Newest events among which those are looked for that are pending."""

_MOST_FIXED = 4096
"""How many different events are remembered as bytes, ready to be copied."""

_BLOCKING, _FAILED, _IN_THREAD, _OF_SCRIPT = 1, 2, 4, 8

SHORTEST_WAIT_NS = 20_000
"""Shorter waits of the main thread for a communication that it had started are not recorded."""

_TIMES, _DIMS = struct.Struct("<Qqq"), tuple(struct.Struct(f"<{dims}I") for dims in range(6))
_I64, _U16X2, _U64, _U8 = struct.Struct("<q"), struct.Struct("<HH"), struct.Struct("<Q"), struct.Struct("<B")
_U16 = struct.Struct("<H")
_TEXTS_USED_AT, _STEPS_AT, _WAIT_AT, _CLOSED_AT = _STATE_AT + 8, _STATE_AT + 12, _STATE_AT + 40, _STATE_AT + 50
_STEP_AT = _STATE_AT + 52
_STEPS = struct.Struct("<Iqqq")
_WAIT = struct.Struct("<qH")
_U32 = struct.Struct("<I")

STEP_NAMES = frozenset({"job.step", "job.forward_backward", "job.update"})
"""Operations that are a step, or a part of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvent:
    """Something that a rank did, or does.

    Attributes:
        number: of the event, from 1.
        name: "job.step", "all_reduce", "next batch"; of a wait, the data that the rank waited for.
        begun_s, ended_s: Unix times; the end is None while it lasts.
        group: the ranks that take part, as "0,1#name"; empty for what concerns this rank only.
        sequence: number of the collective in its group, from 1.
        dtype, shape, nbytes: of this rank's tensor. An operation has (epoch, batch) as its shape.
        about: which data it carries, such as "gradients over replicate".
        line: where the script waits in it, as "file:line"; only known of waits of about a second or more.
        module: the module of the model in which it waits.
        blocking: whether the rank waits while it lasts.
        failed: whether it ended by an exception.
        in_thread: whether another thread than the main one has begun it.
        of_script: whether the script has called it by torch.distributed; then its line is always known.
    """

    number: int
    kind: EventKind
    name: str
    begun_s: float
    ended_s: float | None
    group: str = ""
    sequence: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    about: str = ""
    line: str = ""
    module: str = ""
    blocking: bool = False
    failed: bool = False
    in_thread: bool = False
    of_script: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordState:
    """The part of a record that changes with every step, quick to read.

    Attributes:
        newest: number of the newest event.
        steps: how many steps were measured; the first of a process is not.
        slowest_s, latest_s: seconds of the slowest and the latest of them.
        step: number of the latest update.
        step_ended_s: Unix time of its end; None before the first.
        waits_since_s: Unix time since when the rank waits for a communication that it had started; None if it does not.
        waits_for: which data it then waits for.
        ended: whether the rank has ended in order.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    started_ticks: int
    newest: int
    steps: int
    slowest_s: float
    latest_s: float
    step: int
    step_ended_s: float | None
    waits_since_s: float | None
    waits_for: str
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """A record as it was read: its state, and its events in the order of their numbers.

    Attributes:
        clock_offset_s: what was added to the host's monotonic clock, which all its ranks share, to give Unix times.
    """

    state: RecordState
    events: tuple[RankEvent, ...]
    clock_offset_s: float = 0.0


RecordedWait = tuple[int, int]
"""When the main thread began to wait for a communication, in monotonic ns, and the number of the text that says for
which data; zeros where it does not wait."""

_NO_WAIT: RecordedWait = (0, 0)


class EventRecorder:
    """Writes the record of this process.

    Args:
        path: the file, which is written anew.
        rank: of this process.
        world_size: number of ranks.

    Attributes:
        newest: number of the newest event.
        groups: text and count of collectives of the groups that have had one, by a number of the group's.

    Raises:
        OSError: the file cannot be written, or there is no space for it.
    """

    def __init__(self, path: Path, rank: int, world_size: int, capacity: int = CAPACITY) -> None:
        self.rank = rank
        self._capacity = capacity
        self._texts_at = _HEADER_NBYTES + capacity * _EVENT.size
        size = self._texts_at + _TEXTS_NBYTES
        path.unlink(missing_ok=True)  # a reader of an earlier record keeps its own
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(file, 0, size)  # on a full disk, writing to a hole would be a SIGBUS
            self._map = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._texts: dict[str, int] = {}
        self._used = 0
        self._texts_lock = threading.RLock()
        self._numbers = itertools.count(1)
        self.newest = 0
        self.groups: dict[int, list[int]] = {}
        self._counts: dict[str, list[int]] = {}
        self._works: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._main = threading.get_ident()
        self._fixed: dict[tuple[Any, ...], bytes] = {}
        self._steps, self._slowest, self._skipped = 0, 0, False
        self._wait: RecordedWait = _NO_WAIT
        self._begin_lock = threading.RLock()
        _write_fixed(self._map, capacity, rank, world_size)
        self.text("")

    def text(self, words: str) -> int:
        """Return the number of a text, which is written when it is new; that of the empty text if there is no room."""
        number = self._texts.get(words)
        return self._new_text(words) if number is None else number

    def _new_text(self, words: str) -> int:
        data = words.encode("utf-8", "replace")[:_MOST_TEXT]
        with self._texts_lock:  # threads may meet new texts at once
            if words in self._texts:
                return self._texts[words]
            if self._used + 2 + len(data) > _TEXTS_NBYTES or len(self._texts) >= 1 << 16:
                return 0
            at = self._texts_at + self._used
            self._map[at : at + 2 + len(data)] = _U16.pack(len(data)) + data
            self._used += 2 + len(data)
            _U32.pack_into(self._map, _TEXTS_USED_AT, self._used)
            number = self._texts[words] = len(self._texts)
        return number

    def begin(self, kind: EventKind, name: str, shape: tuple[int, ...] = ()) -> int:
        """Write an event that begins, and return its number.

        Args:
            kind: operation or loader.
            name: of what begins.
            shape: numbers that say which one it is, such as (epoch, batch); at most five.
        """
        number = self._write(self._fixed_event(kind, self.text(name)))
        if shape:
            at = _HEADER_NBYTES + (number - 1) % self._capacity * _EVENT.size
            self._map[at + _DIMS_AT] = len(shape)
            _DIMS[len(shape)].pack_into(self._map, at + _SHAPE_AT, *shape)
        return number

    def _fixed_event(self, kind: EventKind, name: int) -> bytes:
        fixed = self._fixed.get((kind, name))
        if fixed is None:
            texts, flags = (self.text(kind), name, 0, 0), _BLOCKING if kind in ("loader", "wait") else 0
            fixed = self._fixed[kind, name] = _fixed_part(texts, (), 0, flags=flags)
        return fixed

    def _write(self, fixed: bytes, begun_ns: int = 0, ended_ns: int = 0) -> int:
        """Write an event; it begins now where no time is given."""
        with self._begin_lock:  # threads, and handlers of signals, may begin events at once
            number = next(self._numbers)
            at = _HEADER_NBYTES + (number - 1) % self._capacity * _EVENT.size
            times = _TIMES.pack(number, begun_ns or monotonic_ns(), ended_ns)
            self._map[at : at + _EVENT.size] = times + fixed
            if number > self.newest:
                self.newest = number
                _U64.pack_into(self._map, _STATE_AT, number)
        return number

    def end(self, number: int, *, failed: bool = False) -> None:
        """Write that an event has ended."""
        if number + self._capacity > self.newest:  # else its place has another event
            at = _HEADER_NBYTES + (number - 1) % self._capacity * _EVENT.size
            _I64.pack_into(self._map, at + _ENDED_AT, monotonic_ns())
            if failed:
                self._map[at + _FLAGS_AT] |= _FAILED

    def end_with(self, number: int, work: Any) -> None:
        """Write that an event has ended as soon as nobody holds its work handle any more."""

        def gone(reference: Any) -> None:
            self._references.pop(number, None)
            self.end(number)

        try:
            self._references[number] = weakref.ref(work, gone)
        except TypeError:  # nothing tells when it ends
            self.end(number)
        self.know(number, work)

    def know(self, number: int, work: Any) -> None:
        """Remember for `about` which event a work handle belongs to."""
        if len(self._works) >= _MOST_WORKS:
            self._works.clear()
        self._works[id(work)] = number

    def about(self, work: Any, words: str) -> None:
        """Write which data the event of a new work handle carries."""
        number = self._works.pop(id(work), 0)
        if number and number + self._capacity > self.newest:
            at = _HEADER_NBYTES + (number - 1) % self._capacity * _EVENT.size
            _U16.pack_into(self._map, at + _ABOUT_AT, self._texts.get(words) or self.text(words))

    def place(self, line: str, module: str) -> None:
        """Write where the script waits into all events that are pending."""
        numbers = self.text(line), self.text(module)
        for number in self.pending():
            at = _HEADER_NBYTES + (number - 1) % self._capacity * _EVENT.size
            _U16X2.pack_into(self._map, at + _LINE_AT, *numbers)

    def pending(self, *, until_ns: int = 0, blocking: bool = False) -> list[int]:
        """Return which of the newest events have not ended.

        Args:
            until_ns: only those begun by then, in monotonic ns, if given.
            blocking: only those in which the rank waits: collectives, and batches of the loader.
        """
        newest, found = self.newest, []
        for number in range(max(1, newest - min(self._capacity, _NEAR) + 1), newest + 1):
            at = _HEADER_NBYTES + (number - 1) % self._capacity * _EVENT.size
            held, begun, ended = struct.unpack_from("<Qqq", self._map, at)
            waits = not blocking or self._map[at + _FLAGS_AT] & _BLOCKING
            if held == number and not ended and waits and (not until_ns or begun <= until_ns):
                found.append(number)
        return found

    def begin_collective(self, name: str, group: tuple[int, str], tensor: Any, *, blocking: bool) -> int:
        """Write a collective that begins, and return its number.

        Args:
            name: of the function.
            group: a number that is the group's as long as it lives, and its text.
            tensor: this rank's tensor; None where it has none.
            blocking: whether the rank waits meanwhile.
        """
        counted = self.groups.get(group[0])
        if counted is None:
            counted = self.groups[group[0]] = self._counts.setdefault(group[1], [self.text(group[1]), 0])
        counted[1] += 1
        if tensor is None:
            return self._begin_tensor(name, counted, None, (), blocking=blocking)
        return self._begin_tensor(name, counted, tensor.dtype, tensor.shape, blocking=blocking)

    def begin_flat(self, name: str, group: str, dtype: Any, numel: int) -> int:
        """Write an asynchronous collective of `numel` values that begins, and return its number."""
        counted = self._counts.get(group)
        if counted is None:
            counted = self._counts[group] = [self.text(group), 0]
        counted[1] += 1
        return self._begin_tensor(name, counted, dtype, (numel,), blocking=False)

    def _begin_tensor(
        self, name: str, counted: list[int], dtype: Any, shape: tuple[int, ...], *, blocking: bool
    ) -> int:
        flags = (_BLOCKING if blocking else 0) | (0 if threading.get_ident() == self._main else _IN_THREAD)
        key = (name, counted[0], dtype, shape, flags)
        fixed = self._fixed.get(key)
        if fixed is None:
            if len(self._fixed) >= _MOST_FIXED:  # shapes that depend on the data
                self._fixed.clear()
            words = "" if dtype is None else str(dtype).removeprefix("torch.")
            texts = (self.text("collective"), self.text(name), counted[0], self.text(words))
            nbytes = 0 if dtype is None else math.prod(shape) * dtype.itemsize
            fixed = self._fixed[key] = _fixed_part(texts, tuple(shape), nbytes, flags=flags)
        number = self._write(fixed)
        at = _HEADER_NBYTES + (number - 1) % self._capacity * _EVENT.size
        _U32.pack_into(self._map, at + _SEQUENCE_AT, counted[1] & 0xFFFFFFFF)
        return number

    def wait_begins(self, about: str) -> RecordedWait:
        """Write that the main thread waits for a communication; nothing in other threads.

        Returns:
            The wait within which it begins, for `wait_ends`.
        """
        if threading.get_ident() != self._main:
            return _NO_WAIT
        outer = self._wait
        self._wait = time.monotonic_ns(), self._texts.get(about) or self.text(about)
        _WAIT.pack_into(self._map, _WAIT_AT, *self._wait)
        return outer

    def wait_ends(self, outer: RecordedWait, *, failed: bool = False) -> None:
        """Write that a wait has ended, and that the one within which it began goes on.

        It is an event, unless it was very short, or within another. One that failed stays in the record until the next.
        """
        if threading.get_ident() != self._main:
            return
        (since, about), now = self._wait, monotonic_ns()
        if failed:
            self._wait = _NO_WAIT
            return
        self._wait = outer
        _WAIT.pack_into(self._map, _WAIT_AT, *outer)
        if since and outer == _NO_WAIT and now - since >= SHORTEST_WAIT_NS:
            self._write(self._fixed_event("wait", about), since, now)

    def step_ended(self, name: str, seconds: float) -> None:
        """Count the time of an operation that is a step or a part of one.

        Args:
            name: of the operation; others than those of steps are not counted.
            seconds: how long it took.
        """
        if name not in STEP_NAMES:
            return
        if not self._skipped:  # the first step compiles, connects and allocates
            self._skipped = True
            return
        self._steps += 1
        latest = int(seconds * 1e9)
        self._slowest = max(self._slowest, latest)
        _STEPS.pack_into(self._map, _STEPS_AT, self._steps, self._slowest, latest, time.monotonic_ns())

    def updated(self, step: int) -> None:
        """Write the number of the latest update."""
        _U32.pack_into(self._map, _STEP_AT, step & 0xFFFFFFFF)

    def close(self) -> None:
        """Write that the rank has ended in order."""
        _U8.pack_into(self._map, _CLOSED_AT, 1)


def _write_fixed(target: mmap.mmap, capacity: int, rank: int, world_size: int) -> None:
    """Write the part of a record's header that never changes."""
    offset = time.time_ns() - time.monotonic_ns()
    host = socket.gethostname().encode()[:64]
    own = (rank, world_size, os.getpid(), 0, start_ticks(os.getpid()))
    fixed = _FIXED.pack(_MAGIC, capacity, _TEXTS_NBYTES, *own, offset, host)
    target[: len(fixed)] = fixed
    _CRC.pack_into(target, len(fixed), zlib.crc32(fixed))


def _fixed_part(
    texts: tuple[int, int, int, int], shape: tuple[int, ...], nbytes: int, *, flags: int, sequence: int = 0
) -> bytes:
    """Return what is the same in all events of one kind, which differ in their number in the group.

    Args:
        texts: numbers of kind, name, group and dtype.
        shape: of the tensor; its first dims are written.
        nbytes: of the tensor.
        flags: whether the rank waits meanwhile, and whether another thread than the main one has begun it.
    """
    dims = (*(min(size, 0xFFFFFFFF) for size in shape), 0, 0, 0, 0, 0)[:_MOST_DIMS]
    counted = min(len(shape), _MOST_DIMS)
    return _EVENT.pack(0, 0, 0, *texts, 0, 0, 0, flags, counted, sequence & 0xFFFFFFFF, min(nbytes, 1 << 63), *dims)[
        _FIXED_AT:
    ]


def begin_unseen(recorder: EventRecorder, seen: RankEvent) -> int:
    """Write a collective that only torch's own record has, as one that the rank waits in; return its number."""
    kind, name, group, dtype = map(recorder.text, ("collective", seen.name, seen.group, seen.dtype))
    flags = _BLOCKING | _IN_THREAD
    fixed = _fixed_part((kind, name, group, dtype), seen.shape, 0, flags=flags, sequence=seen.sequence)
    return recorder._write(fixed, int(1e9 * (seen.begun_s - time.time())) + time.monotonic_ns())


def place_in_script(recorder: EventRecorder, number: int, line: str, about: str = "") -> None:
    """Write that the script itself has begun an event, where, as "file:line", and what else to say of it."""
    at = _HEADER_NBYTES + (number - 1) % recorder._capacity * _EVENT.size
    recorder._map[at + _FLAGS_AT] |= _OF_SCRIPT
    _U16X2.pack_into(recorder._map, at + _ABOUT_AT, recorder.text(about), recorder.text(line))


@dataclass(slots=True)
class _Active:
    """The record of this process.

    Attributes:
        recorder: None where nothing is recorded, as in workers of a data loader.
        module_name: returns the name of a module of the model, or "".
        in_torch: returns the collectives that torch has begun and not completed, by torch's own record (its Flight
            Recorder), with their numbers in it; None where there is no group.
    """

    recorder: EventRecorder | None = None
    module_name: Callable[[Any], str] | None = None
    in_torch: Callable[[], list[RankEvent]] | None = None


ACTIVE = _Active()


def _forget_in_child() -> None:
    if ACTIVE.recorder is not None:
        ACTIVE.recorder.newest = 1 << 62  # ends of events are no longer written
    ACTIVE.recorder = None


os.register_at_fork(after_in_child=_forget_in_child)


def open_record(folder: Path, rank: int, world_size: int) -> str:
    """Record what this process does from now on into the folder of a rank.

    Returns:
        Why nothing is recorded, as a sentence; else the empty text.
    """
    try:
        ACTIVE.recorder = EventRecorder(folder / FILE_NAME, rank, world_size)
    except (OSError, ValueError) as error:
        ACTIVE.recorder = None
        return f"no flight record in {folder}: {error}"
    return ""


class recorded:
    """Record what happens in a block as an event: `with recorded("loader", "next batch"): ...`."""

    __slots__ = ("_kind", "_name", "_number", "_recorder")

    def __init__(self, kind: EventKind, name: str) -> None:
        self._kind, self._name = kind, name

    def __enter__(self) -> None:
        self._recorder = ACTIVE.recorder
        if self._recorder is not None:
            self._number = self._recorder.begin(self._kind, self._name)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._recorder is not None:
            self._recorder.end(self._number, failed=error is not None and not isinstance(error, StopIteration))


def start_ticks(pid: int) -> int:
    """Return when a process was started, in clock ticks since the boot; 0 where that is not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def read_state(path: Path) -> RecordState:
    """Read the state of a record.

    Raises:
        EventRecordError: the file is none, or is damaged.
    """
    with _opened(path) as (data, rest):
        return _state(path, data, rest)[0]


def read_record(path: Path) -> EventRecord:
    """Read a record, also while its rank writes it.

    Raises:
        EventRecordError: the file is none, or is damaged.
    """
    with _opened(path) as (data, rest):
        state, offset, capacity, texts = _state(path, data, rest, with_texts=True)
        body = rest(_HEADER_NBYTES, capacity * _EVENT.size)
    events = []
    for place in range(capacity):
        fields = _EVENT.unpack_from(body, place * _EVENT.size)
        number = fields[0]
        if number and (number - 1) % capacity == place and number <= state.newest + 1:
            events.append(_event(path, fields, offset, texts))
    ordered = tuple(sorted(events, key=lambda event: event.number))
    return EventRecord(state=state, events=ordered, clock_offset_s=offset / 1e9)


_Read = Callable[[int, int], bytes]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[bytes, _Read]]:
    """Give the header of a file, and what reads its other parts."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise EventRecordError(f"{path} cannot be read: {error.strerror}; name a run folder of tutti") from None

    def rest(at: int, nbytes: int) -> bytes:
        data = os.pread(file, nbytes, at)
        if len(data) != nbytes:
            raise _damaged(path, "it is cut short")
        return data

    try:
        yield rest(0, _HEADER_NBYTES), rest
    except OSError as error:
        raise EventRecordError(f"{path} cannot be read: {error.strerror}; name a run folder of tutti") from None
    finally:
        os.close(file)


def _damaged(path: Path, reason: str) -> EventRecordError:
    return EventRecordError(f"{path} is no whole flight record: {reason}; remove it, the run does not need it")


def _state(
    path: Path, header: bytes, rest: _Read, *, with_texts: bool = False
) -> tuple[RecordState, int, int, list[str]]:
    """Return the state, the offset of its clock in ns, how many events there are, and the texts if asked for."""
    magic, capacity, room, rank, world_size, pid, _, ticks, offset, host = _FIXED.unpack_from(header)
    if magic != _MAGIC:
        raise _damaged(path, "it has another format")
    if _CRC.unpack_from(header, _FIXED.size)[0] != zlib.crc32(header[: _FIXED.size]):
        raise _damaged(path, "its header has another checksum")
    if not 1 <= capacity <= 1 << 20 or room != _TEXTS_NBYTES:
        raise _damaged(path, "its sizes are none that tutti writes")
    newest, used, steps, slowest, latest, ended, since, words, closed, step = _STATE.unpack_from(header, _STATE_AT)
    texts = _texts_of(path, rest(_HEADER_NBYTES + capacity * _EVENT.size, room), used) if with_texts or since else []
    state = RecordState(
        rank=rank,
        world_size=world_size,
        host=host.rstrip(b"\0").decode("utf-8", "replace"),
        pid=pid,
        started_ticks=ticks,
        newest=newest,
        steps=steps,
        slowest_s=slowest / 1e9,
        latest_s=latest / 1e9,
        step=step,
        step_ended_s=(ended + offset) / 1e9 if ended else None,
        waits_since_s=(since + offset) / 1e9 if since else None,
        waits_for=_text(path, texts, words) if since else "",
        ended=bool(closed),
    )
    return state, offset, capacity, texts


def _texts_of(path: Path, data: bytes, used: int) -> list[str]:
    texts, at = [], 0
    if used > len(data):
        raise _damaged(path, "its texts are longer than their place")
    while at < used:
        (length,) = _U16.unpack_from(data, at) if at + 2 <= used else (math.inf,)
        if at + 2 + length > used:
            raise _damaged(path, "a text is cut short")
        texts.append(data[at + 2 : at + 2 + int(length)].decode("utf-8", "replace"))
        at += 2 + int(length)
    return texts


def _text(path: Path, texts: list[str], number: int) -> str:
    if number >= len(texts):
        raise _damaged(path, f"it names text {number} of {len(texts)}")
    return texts[number]


def _event(path: Path, fields: tuple[int, ...], offset: int, texts: list[str]) -> RankEvent:
    number, begun, ended, *named, flags, dims, sequence, nbytes = fields[:14]
    kind, name, group, dtype, about, line, module = (_text(path, texts, each) for each in named)
    if kind not in _KINDS or dims > _MOST_DIMS or (ended and ended < begun):
        raise _damaged(path, f"event {number} contradicts itself")
    return RankEvent(
        number=number,
        kind=next(each for each in _KINDS if each == kind),
        name=name,
        begun_s=(begun + offset) / 1e9,
        ended_s=(ended + offset) / 1e9 if ended else None,
        group=group,
        sequence=sequence,
        dtype=dtype,
        shape=tuple(fields[14 : 14 + dims]),
        nbytes=nbytes,
        about=about,
        line=line,
        module=module,
        blocking=bool(flags & _BLOCKING),
        failed=bool(flags & _FAILED),
        in_thread=bool(flags & _IN_THREAD),
        of_script=bool(flags & _OF_SCRIPT),
    )


def ranks_of_group(group: str, numbers: Mapping[int, int]) -> list[int]:
    """Return the ranks of an event's group, whose text names ranks, processes, or the two ends of a message.

    Args:
        group: the text.
        numbers: process -> its rank.
    """
    text = group.partition("#")[0]
    try:
        if text.startswith("pid "):
            return [numbers[int(pid)] for pid in text[4:].split(",") if int(pid) in numbers]
        return [int(rank) for rank in text.replace(">", ",").split(",") if rank]
    except ValueError:
        return []
