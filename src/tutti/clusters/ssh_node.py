"""What a host runs during a run over ssh: `tutti run`, watched, with its output and its run folder sent back.

The other side is `tutti.clusters.ssh_driver`. It sends lines of JSON: the task, then commands and signs of life. Back
go frames: a line of JSON that says the size of the bytes after it. Without signs of life, or with the input closed, the
ranks are told to write a checkpoint, and are ended a little later.
"""

import contextlib
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tutti.clusters.node_run import Commands, HostRun, watch
from tutti.launch.launch_environment import variables

FRAME = b"tutti-frame "
"""Begins the line before each frame."""

CHUNK_NBYTES = 1 << 20
_MOST_LIVE_NBYTES = 1 << 20
_MOST_QUEUED = 64
_GROWING = (".log", ".jsonl")


class Frames:
    """Sends frames in a thread of its own, so that nothing else waits for a connection that may be dead."""

    def __init__(self, out: BinaryIO) -> None:
        self._out: BinaryIO = out
        self._queue: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
        self._thread = threading.Thread(target=self._write, name="tutti frames", daemon=True)
        self._thread.start()

    def send(self, kind: str, data: bytes = b"", **fields: Any) -> None:
        """Send a frame some time soon."""
        self._queue.put(({"kind": kind, "size": len(data), **fields}, data))

    @property
    def waiting(self) -> int:
        """Number of frames that are not sent yet."""
        return self._queue.unfinished_tasks

    def _write(self) -> None:
        while True:
            fields, data = self._queue.get()
            with contextlib.suppress(OSError, ValueError):
                self._out.write(FRAME + json.dumps(fields).encode() + b"\n" + data)
                self._out.flush()
            self._queue.task_done()


class FolderSender:
    """Sends what is new in the run folder.

    Args:
        folder: the run folder.
        part: "all" of it, "ranks" for their folders only, or "none".
        ranks: those whose folders are sent; None for all.
        frames: takes the files.
        lost: asked while waiting for a slow connection; true gives up.
        known: bytes that the other side has of files that only grow, where this folder began empty.
        had: names of checkpoints that the other side has.
    """

    def __init__(
        self,
        folder: Path,
        part: str,
        ranks: list[int] | None,
        frames: Frames,
        lost: Callable[[], bool],
        known: dict[str, int],
        had: list[str],
    ) -> None:
        self._folder, self._part, self._frames, self._lost = folder, part, frames, lost
        self._known, self._had = known, set(had)
        self._ranks = None if ranks is None else {str(rank) for rank in ranks}
        self._sent: dict[Path, tuple[int, int]] = {}

    def sweep(self, *, final: bool = False) -> None:
        """Send new files, and what has been appended; large files, and those mapped into memory, only at the end."""
        for path in self._files():
            with contextlib.suppress(OSError):
                state = path.stat()
                before = self._sent.get(path, (0, -1))
                if (state.st_size, state.st_mtime_ns) == before:
                    continue
                grows = path.suffix in _GROWING
                if not final and not grows and (state.st_size > _MOST_LIVE_NBYTES or path.suffix == ".bin"):
                    continue
                begin = before[0] if grows and state.st_size >= before[0] else 0
                self._send(path, begin, state.st_size)
                self._sent[path] = (state.st_size, state.st_mtime_ns)

    def checkpoints(self) -> None:
        """Send complete checkpoints that the other side lacks."""
        folders = sorted((self._folder / "checkpoints").glob("step-*/index.json"))
        for folder in (index.parent for index in folders):
            if "." in folder.name or folder.name in self._had:
                continue
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    self._send(path, 0, path.stat().st_size)
            self._frames.send("checkpoint", name=folder.name)

    def _files(self) -> Iterator[Path]:
        if self._part == "none":
            return
        top = self._folder / "ranks" if self._part == "ranks" else self._folder
        for where, folders, names in os.walk(top):
            if Path(where) == self._folder:
                folders[:] = [name for name in folders if name != "checkpoints"]
            elif Path(where) == self._folder / "ranks" and self._ranks is not None:
                folders[:] = [name for name in folders if name in self._ranks]
            yield from (Path(where, name) for name in sorted(names) if not name.startswith("."))

    def _send(self, path: Path, begin: int, end: int) -> None:
        name = path.relative_to(self._folder).as_posix()
        base = self._known.get(name, 0) if path.suffix in _GROWING else 0
        with path.open("rb") as file:
            file.seek(begin)
            position, last = begin, False
            while not last:
                while self._frames.waiting > _MOST_QUEUED:
                    if self._lost():
                        raise ConnectionError("the other side is lost")
                    time.sleep(0.01)
                data = file.read(min(CHUNK_NBYTES, end - position))
                position += len(data)
                last = position >= end or not data
                place = base + position - len(data)
                self._frames.send("file", data, path=name, offset=place, last=last)


def _ran(task: dict[str, Any], commands: Commands, sender: FolderSender, frames: Frames) -> int:
    """Run `tutti run` to its end, and return its exit code."""
    environment = variables() | {"TUTTI_SECRET": task["secret"]}
    if task["python_path"]:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (task["python_path"], before)))
    arguments, folder = task["arguments"], Path(task["folder"])
    if task.get("resume"):  # a failover of node 0
        began = any(folder.glob("checkpoints/step-*/index.json"))
        arguments = [arguments[0], "--resume", str(folder) if began else task["resume"], *arguments[1:]]
    try:
        run = HostRun(arguments, task["directory"], environment, lambda data: frames.send("output", data))
    except OSError as error:
        frames.send("output", f"tutti: `tutti run` cannot be started ({error}); correct the host\n".encode())
        return 2

    def beat() -> None:
        frames.send("beat")
        if frames.waiting < _MOST_QUEUED:
            sender.sweep()

    code = watch(run, commands, beat)
    run.kill()  # what has outlived it
    run.hear_the_rest()
    return code


def main() -> None:
    """Run what the first line of the input says."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    source = sys.stdin.buffer
    task = json.loads(source.readline())
    frames, commands = Frames(sys.stdout.buffer), Commands(source)
    folder = Path(task["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    sender = FolderSender(
        folder, task["fetch"], task["ranks"], frames, lambda: commands.lost, task["known"], task["had"]
    )
    code = _ran(task, commands, sender, frames)
    with contextlib.suppress(ConnectionError):
        sender.sweep(final=True)
        if task["checkpoints"]:
            sender.checkpoints()
    frames.send("end", code=code if code >= 0 else 128 - code)  # killed by a signal
    while frames.waiting and not commands.lost:
        time.sleep(0.02)
    while not commands.lost and commands.next() != "bye":
        time.sleep(0.02)
    if task["temporary"] and not commands.lost:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0 if code == 0 else 1)
