"""A thread of each rank that tells where the rank waits: in the flight record, and to whoever asks.

Asking is a file in the rank's folder, so it works from another process and from other hosts that share the folder. A
rank that holds the interpreter's lock cannot answer; a signal then makes it write its stack without that lock.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tutti.event_record import ACTIVE, EventRecorder, begin_unseen

ASK, ANSWER, DUMP = "why.ask", "why.json", "why.txt"
"""Files of a rank's folder: who touches the first gets the second. The third has what the signal wrote."""

SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None
"""Makes a rank write its stacks at once; scripts use no signals of real time."""

PERIOD_S = 0.25
"""Seconds between two looks of the thread."""

WAITING_NS = 1_000_000_000
"""How long a wait lasts, in ns, before its line is looked up."""

_MOST_FRAMES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """A call: the file, the line in it, and the function."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """The calls that a thread is in, from the innermost."""

    name: str
    frames: tuple[StackFrame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackAnswer:
    """What a rank answers.

    Attributes:
        asked: the time in ns at which ASK was touched.
        line: where the script is, as "file:line"; empty if none of its code is on the stack.
        module: the module of the model whose forward or hook runs; empty outside of one.
        threads: the stacks, that of the main thread first.
    """

    asked: int
    line: str
    module: str
    threads: tuple[ThreadStack, ...]


def watch_stacks(folder: Path) -> None:
    """Start the thread, if this process has none; it answers in this folder from now on."""
    _WATCH.folder = folder
    if SIGNAL is not None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            _WATCH.dump = (folder / DUMP).open("w", encoding="utf-8")
            faulthandler.register(SIGNAL, file=_WATCH.dump, all_threads=True)
    if _WATCH.thread is None:
        _WATCH.thread = threading.Thread(target=_watch, name="tutti-stack-watch", daemon=True)
        _WATCH.thread.start()


def watched_folder() -> Path | None:
    """Return the folder of this process' rank, in which it answers; None if it is no rank of a launch."""
    return _WATCH.folder


@dataclass(slots=True)
class _Watch:
    """The thread of this process, the folder in which it answers, and the file that the signal writes into."""

    folder: Path | None = None
    thread: threading.Thread | None = None
    dump: Any = None


_WATCH = _Watch()


def _no_thread_in_child() -> None:
    _WATCH.thread = None


os.register_at_fork(after_in_child=_no_thread_in_child)


def _watch() -> None:
    """Look at the record and for questions. Runs in the thread."""
    answered, newest, placed, ready = 0, -1, -1, False
    unseen, since_ns = _UnseenCollective(), time.monotonic_ns()
    while True:
        time.sleep(PERIOD_S)
        recorder, folder = ACTIVE.recorder, _WATCH.folder
        if recorder is not None:
            number = recorder.newest
            if number != newest:
                newest, since_ns = number, time.monotonic_ns()
                if unseen.event:
                    unseen.look(recorder)
            elif number != placed and _waits(recorder):
                recorder.place(*where(_main_frame()))
                placed = number
            elif time.monotonic_ns() - since_ns > WAITING_NS:
                unseen.look(recorder)
        if folder is not None:
            with contextlib.suppress(OSError):
                asked = (folder / ASK).stat().st_mtime_ns
                if asked != answered and ready:
                    answered = asked
                    _answer(folder, asked)
        ready = True


@dataclass(slots=True)
class _UnseenCollective:
    """A collective that only torch's own record has, such as a functional one or one of compiled code; noted here.

    Attributes:
        event: its event in the rank's record; 0 if there is none.
        number: in torch's record.
        over_ns: since when torch no longer has it, in monotonic ns; 0 while it has. It may have failed, which ends the
            process: then the event stays as it is.
    """

    event: int = 0
    number: int = 0
    over_ns: int = 0

    def look(self, recorder: EventRecorder) -> None:
        """Note one that has lasted for `WAITING_NS` if nothing else is known to be waited for; end it in its time."""
        if ACTIVE.in_torch is None or (self.event == 0 and recorder.pending(blocking=True)):
            return
        begun = {each.number: each for each in ACTIVE.in_torch()}
        if self.event == 0:
            until_s = time.time() - WAITING_NS / 1e9
            if (first := next((each for each in begun.values() if each.begun_s <= until_s), None)) is not None:
                self.event, self.number, self.over_ns = begin_unseen(recorder, first), first.number, 0
        elif self.number not in begun:
            self.over_ns = self.over_ns or time.monotonic_ns()
            if recorder.newest > self.event or time.monotonic_ns() - self.over_ns > 2 * WAITING_NS:
                recorder.end(self.event)
                self.event = 0


def _waits(recorder: EventRecorder) -> bool:
    """Return whether something pending is older than `WAITING_NS`."""
    return bool(recorder.pending(until_ns=time.monotonic_ns() - WAITING_NS))


def _answer(folder: Path, asked: int) -> None:
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    order = sorted(frames, key=lambda ident: ident != main)
    threads = [
        {"name": names.get(ident, f"thread {ident}"), "frames": _frames(frames[ident])}
        for ident in order
        if ident != threading.get_ident()
    ]
    line, module = where(frames.get(main or 0))
    partial = folder / f"{ANSWER}.partial"
    document = {"asked": asked, "line": line, "module": module, "threads": threads}
    partial.write_text(json.dumps(document), encoding="utf-8")
    partial.replace(folder / ANSWER)


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _frames(frame: FrameType | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        code = frame.f_code
        found.append({"file": code.co_filename, "line": frame.f_lineno, "function": code.co_qualname})
        frame = frame.f_back
    return found


def where(frame: FrameType | None) -> tuple[str, str]:
    """Return where the script is, as "file:line", and the name of the model's module that runs; "" if none does.

    Args:
        frame: the innermost of a thread.
    """
    line = module = ""
    while frame is not None and not (line and module):
        file = frame.f_code.co_filename
        if not line and is_of_script(file):
            line = f"{file}:{frame.f_lineno}"
        if not module and ACTIVE.module_name is not None and "self" in frame.f_code.co_varnames[:1]:
            with contextlib.suppress(Exception):  # an object of the script's may not like to be looked at
                module = ACTIVE.module_name(frame.f_locals.get("self"))
        frame = frame.f_back
    return line, module


_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_PYTHON = f"{Path(os.__file__).parent}{os.sep}"


def is_of_script(file: str) -> bool:
    """Return whether a file is the script's own: none of Python's, of an installed package, or of tutti's."""
    if file.startswith((_PACKAGE, _PYTHON, "<")) or "site-packages" in file or "dist-packages" in file:
        return False
    return not file.endswith(("/runpy.py", "/bin/tutti"))
