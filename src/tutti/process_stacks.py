"""Where processes are that cannot answer for themselves: stacks that a signal makes them write, as calls and in words.

Workers of a data loader are forked from their rank, so they write at the same signal, into the same file.
"""

import contextlib
import linecache
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from tutti.config.safe_text import plain_text
from tutti.stack_watch import DUMP, SIGNAL, StackFrame, is_of_script

_DUMP_S = 0.3
"""Seconds that a process has to write its stacks."""

_LOOK_S = 0.02

_MOST_DUMP = 1 << 16
"""Bytes of a dump that are read; the main thread comes last in it."""

_MOST_LINE = 80

_CALLS = (
    re.compile(r"File \"(?P<file>[^\"]+)\", line (?P<line>\d+),? in (?P<function>.+)"),  # of faulthandler, a traceback
    re.compile(r"(?P<function>[^()]+) \((?P<file>[^()]+):(?P<line>\d+)\)"),  # of py-spy
)


def dumped_stacks(folder: Path, pid: int) -> str:
    """Return the stacks that a process writes at the signal; empty if it does not handle the signal, or is stopped.

    Args:
        folder: of the rank that the process is, or was forked from.
        pid: the process.
    """
    if SIGNAL is None or is_stopped(pid) or not _catches(pid, SIGNAL):
        return ""
    with contextlib.suppress(OSError):
        before = size = (folder / DUMP).stat().st_size
        os.kill(pid, SIGNAL)
        until = time.monotonic() + _DUMP_S
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            earlier, size = size, (folder / DUMP).stat().st_size
            if before < size == earlier:  # it has written all
                break
        with (folder / DUMP).open("rb") as dump:
            dump.seek(before)
            return dump.read(_MOST_DUMP).decode("utf-8", "replace")
    return ""


def _catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal, which would end it otherwise."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        return bool(int(status.partition("\nSigCgt:")[2].split()[0], 16) >> (number - 1) & 1)
    return False


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or a debugger."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    return False


def frames_of_dump(dump: str) -> list[StackFrame]:
    """Return the calls of the main thread in what faulthandler or py-spy has written, from the innermost."""
    return _threads(dump)[0]


def frames_of_traceback(trace: str) -> list[StackFrame]:
    """Return the calls in the text of a traceback, from the innermost of the script's."""
    frames = _calls(trace)[::-1]
    return frames[next((number for number, frame in enumerate(frames) if _is_of_script(frame)), len(frames)) :]


def places_of_dump(dump: str) -> list[StackFrame]:
    """Return the innermost calls in a dump: of the main thread, and of others whose innermost call is the script's.

    A thread that holds the interpreter's lock in native code is one of them. py-spy says which, then only that one is
    returned.
    """
    main, *others = _threads(dump)
    if (holder := re.search(r"^Thread \d+ \(\w+\+gil\).*(?:\n .*)*", dump, flags=re.MULTILINE)) is not None:
        main, others = _calls(holder[0]), []
    return [*main[:1], *(frames[0] for frames in others if frames and _is_of_script(frames[0]))]


def _threads(dump: str) -> list[list[StackFrame]]:
    """Return the calls of each thread in a dump, those of the main thread first."""
    parts = re.split(r"^(?=Thread |Current thread )", dump, flags=re.MULTILINE)
    main = next((number for number, part in enumerate(parts) if "MainThread" in part.partition("\n")[0]), -1)
    parts.insert(0, parts.pop(main))
    return [_calls(part) for part in parts]


def _is_of_script(frame: StackFrame) -> bool:
    return frame.file.startswith(os.sep) and is_of_script(frame.file)  # py-spy shortens paths of Python's library


def _calls(lines: str) -> list[StackFrame]:
    found = [call for line in lines.splitlines() for kind in _CALLS if (call := kind.fullmatch(line.strip()))]
    return [StackFrame(file=call["file"], line=int(call["line"]), function=call["function"]) for call in found]


def frames_of_worker(folder: Path, pid: int) -> list[StackFrame]:
    """Return the calls in which a data loader's worker reads samples, from the innermost; none if it reads none.

    Args:
        folder: of the rank whose loader it is.
        pid: the worker.
    """
    frames = frames_of_dump(dumped_stacks(folder, pid))
    # A forked process has the calls of its parent below its own.
    inside = next((number for number, frame in enumerate(frames) if frame.function == "_worker_loop"), 0)
    return frames[:inside] if any(map(_is_of_script, frames[:inside])) else []


def describe_place(frames: Sequence[StackFrame], inside: str = "") -> str:
    """Say where a process is, as a clause: the line of the script with its text, and the innermost call.

    Args:
        frames: its calls, from the innermost.
        inside: where in the model it is, as a clause.
    """
    innermost = frames[0] if frames else None
    script = next((frame for frame in frames if is_of_script(frame.file)), None)
    if script is None:
        return f" in {innermost.function} ({short_path(innermost.file)}:{innermost.line}){inside}" if innermost else ""
    within = f", in {innermost.function}" if innermost is not None and innermost is not script else ""
    place = f"{short_path(script.file)}:{script.line} in {script.function}"
    return f" at {plain_text(place)}{_source(script)}{within}{inside}"


def _source(frame: StackFrame) -> str:
    text = linecache.getline(frame.file, frame.line).strip()
    return f" (`{plain_text(text[:_MOST_LINE])}`)" if text else ""


def short_path(file: str) -> str:
    """Return a path relative to the current directory, if it is inside it."""
    path = Path(file)
    return os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else file
