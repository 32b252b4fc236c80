"""`tutti run` on a node, for a driver that sends commands and signs of life."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol

from tutti.launch import process_tree

BEAT_S = 1.0
"""Seconds between two signs of life."""

LOST_S = 15.0
"""Seconds without a sign of life after which the other side is lost."""

LOST_GRACE_S = 8.0
"""Seconds that ranks then have to write a checkpoint."""


class Commands:
    """The commands of the other side, and whether it still lives."""

    def __init__(self, source: BinaryIO) -> None:
        self._heard, self._ended = time.monotonic(), False
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(source,), name="tutti commands", daemon=True).start()

    def next(self) -> str:
        """Return the next command; an empty text if there is none."""
        return str(self.message().get("command", ""))

    def message(self) -> dict[str, Any]:
        """Return the next command with what belongs to it; empty if there is none."""
        with contextlib.suppress(queue.Empty):
            return self._commands.get_nowait()
        return {}

    def add(self, message: dict[str, Any]) -> None:
        """Add a command of this side's own; a handler of signals may."""
        self._commands.put(message)

    @property
    def lost(self) -> bool:
        """Whether the other side is lost."""
        return self._ended or time.monotonic() - self._heard > LOST_S

    def _read(self, source: BinaryIO) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := source.readline():
                self._heard = time.monotonic()
                message = json.loads(line)
                if message.get("command"):
                    self._commands.put(message)
        self._ended = True


class HostRun:
    """`tutti run` on this host.

    Args:
        arguments: of `tutti`.
        directory: where it runs.
        environment: all of its variables.
        say: takes what it prints.
    """

    def __init__(
        self, arguments: Sequence[str], directory: str, environment: dict[str, str], say: Callable[[bytes], None]
    ) -> None:
        process_tree.adopt_orphans()
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tutti.cli.main", *arguments],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=process_tree.end_with_parent,
        )
        self._reader = threading.Thread(target=self._read, args=(say,), name="tutti output", daemon=True)
        self._reader.start()

    def code(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Let the ranks write a checkpoint and end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End everything that it has started."""
        for _ in range(3):  # what a process starts while it is being killed is an orphan, which is found next
            process_tree.kill_all(process_tree.descendants([os.getpid()]))
            time.sleep(0.05)
        self._process.wait()

    def hear_the_rest(self) -> None:
        """Read what it has printed last, but do not wait for a process that holds its output open."""
        self._reader.join(1.0)

    def _read(self, say: Callable[[bytes], None]) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(self._process.stdout.fileno(), 1 << 16):
                say(data)


class Watched(Protocol):
    """What `watch` watches: a `HostRun`, or several as one."""

    def code(self) -> int | None:
        """Return the exit code; None while it runs."""
        ...

    def stop(self) -> None:
        """Let the ranks write a checkpoint and end."""
        ...

    def kill(self) -> None:
        """End everything."""
        ...


def watch(run: Watched, commands: Commands, beat: Callable[[], None]) -> int:
    """Watch the run to its end, and return its exit code.

    Args:
        run: what to watch.
        commands: of the other side; without signs of life the ranks write a checkpoint and are ended a little later.
        beat: called every second.
    """
    deadline, swept = float("inf"), 0.0
    while (code := run.code()) is None:
        now = time.monotonic()
        command = commands.next()
        if command == "stop":
            run.stop()
        if command == "cancel" or now > deadline:
            run.kill()
            continue
        if (command == "end" or commands.lost) and deadline == float("inf"):
            run.stop()
            deadline = now + LOST_GRACE_S
        if now > swept + BEAT_S:
            swept = now
            beat()
        time.sleep(0.1)
    return code
