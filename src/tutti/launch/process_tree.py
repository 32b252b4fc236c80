"""The processes below a process, and their end: none outlives the run that started it, in whatever session it is.

Linux only; elsewhere nothing is found, and process groups must do.
"""

import contextlib
import ctypes
import fcntl
import os
import secrets
import signal
import time
from collections.abc import Iterable
from pathlib import Path

TOKEN_VARIABLE = "TUTTI_LAUNCH"
"""The environment variable that marks the ranks of one launch, and so every program that they start."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def new_token() -> str:
    """Return a value for `TOKEN_VARIABLE` that no other launch has."""
    return secrets.token_hex(16)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends: also while it is stopped, or computes without the GIL."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_pipe(descriptor: int) -> None:
    """Let the kernel kill this process, with its group if it leads one, once the other end of a pipe is closed.

    Args:
        descriptor: the end to read from, of a pipe to which nobody writes.
    """
    group = os.getpgrp()
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, -group if group == os.getpid() else os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | fcntl.FASYNC)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(pids: Iterable[int]) -> set[int]:
    """Return the processes that `pids` have started, at any depth, without themselves."""
    children: dict[int, list[int]] = {}
    for pid in _all_processes():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in parentheses, may hold anything; the state and the parent follow it.
            parent = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    left = list(pids)
    while left:
        new = set(children.get(left.pop(), ())) - found
        found |= new
        left += new
    return found


def with_token(token: str) -> set[int]:
    """Return the processes of this user that were started with this value of `TOKEN_VARIABLE`."""
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    found = set()
    for pid in _all_processes():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found - {os.getpid()}


def _all_processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes; those that have ended meanwhile are left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int | None) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    if pid is None:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def is_same(pid: int, since: float | None) -> bool:
    """Return whether a process still is the one that was started at `since`, as `started_at` has returned it."""
    now = started_at(pid)
    return now is not None and since is not None and abs(now - since) < 0.5


def started_at(pid: int) -> float | None:
    """Return the Unix time at which a living process was started, to a tick of the clock; None if there is none."""
    if not is_alive(pid):
        return None
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
