"""What a job on Ray runs on each of its nodes: `tutti run`, started and watched by an actor.

The actor ends with the job's driver, and the kernel then ends `tutti run` and its ranks. Started as a program, this
module becomes a command that ends so. Its other side is `tutti.clusters.ray_driver`.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tutti.clusters.local_files import SentFiles
from tutti.errors import RESUMABLE
from tutti.launch import process_tree

MARK = "ray.json"
"""File of the run folder that names the job that runs in it, and by which nodes know that they see this folder."""

NEEDS = ("tutti", "torch", "numpy", "pydantic", "click", "rich", "psutil", "safetensors", "filelock", "xxhash")
"""Packages without which `tutti run` does not start."""

_PORTS = range(20000, 32768)  # no system gives them to outgoing connections
_MOST_NBYTES = 1 << 20

_LOOK = (
    "import importlib.util, json, sys; print(json.dumps([list(sys.version_info[:2]), "
    "[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]]))"
)

_START = 'read -r TUTTI_SECRET; export TUTTI_SECRET; {threads}\n{setup}\nexec "$@" < /dev/null'
"""Shell lines before `tutti run`: the secret comes over a pipe, so that it is on no command line and in no file."""


class NodeAgent:
    """The actor of one node."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._lock = threading.Condition()
        self._output, self._begin = b"", 0
        self._told, self._cancelled = False, False
        self._files: SentFiles | None = None
        process_tree.adopt_orphans()

    def look(self, task: dict[str, Any], *, first: bool) -> dict[str, Any]:
        """Say what this node has.

        Args:
            task: what the driver runs; see `tutti.clusters.ray_task.task_of`.
            first: this is node 0, which makes the run folder where it lies in the cluster.

        Returns:
            Its name, a free port, whether the run has begun in the folder, and in words what is wrong, if anything.
        """
        folder, bare = Path(task["folder"]), task["kind"] == "command"
        unseen = "" if bare else _without_folder(task, folder, first=first)
        problem = _without_directory(task) or unseen or _without_packages(task)
        return {
            "host": socket.gethostname(),
            "port": free_port(),
            "begun": not bare and (folder / "run.json").exists(),
            "problem": problem,
        }

    def start(self, task: dict[str, Any], arguments: Sequence[str], secret: str) -> None:
        """Start `tutti` with these arguments.

        Args:
            task: what the driver runs.
            arguments: of `tutti`.
            secret: proves ranks to each other.
        """
        threads = task["threads"]
        about = f"export OMP_NUM_THREADS={int(threads)}" if threads else "unset OMP_NUM_THREADS"
        script = _START.format(
            threads="" if task["keeps_threads"] else about, setup="\n".join(["set -e", *task["setup"]])
        )
        python, self._files = task["python"] or sys.executable, SentFiles(task.get("files", ""))
        become = [sys.executable, "-m", "tutti.clusters.ray_node", str(os.getpid())]
        self._process = subprocess.Popen(
            [
                *become,
                "sh",
                "-c",
                script,
                "sh",
                python,
                "-u",
                "-m",
                "tutti.cli.main",
                *self._files.in_command(arguments),
            ],
            cwd=task["directory"] or None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(f"{secret}\n".encode())
        self._process.stdin.close()
        self._reader = threading.Thread(target=self._read, name="tutti output", daemon=True)
        self._reader.start()

    def poll(self, seen: int, command: str, wait_s: float) -> dict[str, Any]:
        """Return what has been printed, and the exit code once there is one.

        Args:
            seen: number of bytes of the output that the driver has.
            command: "stop" lets the ranks write a checkpoint, "kill" ends them at once; empty for nothing.
            wait_s: longest wait for something new.
        """
        process = self._process
        assert process is not None
        if command == "stop" and process.poll() is None:
            self._told = True
            process.send_signal(signal.SIGTERM)
        if command == "kill":
            self._kill(process)
        with self._lock:
            self._output, self._begin = self._output[max(0, seen - self._begin) :], max(seen, self._begin)
            deadline = time.monotonic() + wait_s
            while not self._output and process.poll() is None and (left := deadline - time.monotonic()) > 0:
                self._lock.wait(min(left, 0.1))
        code = process.poll()
        if code is not None and self._reader is not None:
            self._reader.join(1.0)  # but do not wait for a process that holds the output open
        with self._lock:
            data, more = self._output[:_MOST_NBYTES], len(self._output) > _MOST_NBYTES
        if code is not None and self._files is not None:
            self._files.remove()
        if code == -signal.SIGTERM and self._told:
            code = RESUMABLE  # it had not begun yet
        return {"output": data, "code": None if more else code, "cancelled": self._cancelled}

    def cancel(self) -> None:
        """End everything here at once, because the user says so."""
        self._cancelled = True
        if self._process is not None:
            self._kill(self._process)

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        for _ in range(3):  # what a process starts while it is being killed is an orphan, which is found next
            process_tree.kill_all(process_tree.descendants([os.getpid()]))
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(self._process.stdout.fileno(), 1 << 16):
                with self._lock:
                    self._output += data
                    self._lock.notify_all()


def free_port() -> int:
    """Return a port of this host that nobody listens on; 0 if none is found."""
    for port in random.SystemRandom().sample(_PORTS, 50):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    return 0


def _without_directory(task: dict[str, Any]) -> str:
    """Say that the command cannot run where it should; empty if it can."""
    if not task["directory"] or Path(task["directory"]).is_dir():
        return ""
    return (
        f"it does not see the directory {task['directory']}; let Ray copy this one with --request sync=upload, or name "
        "one that nodes see with --request directory=PATH"
    )


def _without_folder(task: dict[str, Any], folder: Path, *, first: bool) -> str:
    """Say that the run folder is not the one of the other nodes; empty if it is."""
    token = {"job": task["job"]}
    try:
        if first and task["kind"] == "inside":
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MARK).write_text(json.dumps(token), encoding="utf-8")
        if json.loads((folder / MARK).read_text(encoding="utf-8"))["job"] == token["job"]:
            return ""
        reason = "another folder has this name there"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged there"
    if task["kind"] == "seen":
        return (
            f"it does not see the run folder {folder} of the machine that submitted the run ({reason}); name a folder "
            "that all nodes share with --request folder=PATH"
        )
    return (
        f"it cannot use the run folder {folder} ({reason}); name one that all nodes share and may write with --request "
        "folder=PATH"
    )


def _without_packages(task: dict[str, Any]) -> str:
    """Say that the interpreter cannot run tutti; empty if it can."""
    python = task["python"] or sys.executable
    remedy = "install it there, name another interpreter with --request python=PATH, or activate one with setup"
    if task["setup"]:  # it may change which interpreter that is
        return ""
    try:
        done = subprocess.run([python, "-c", _LOOK, *NEEDS], capture_output=True, text=True, timeout=60, check=True)
        version, missing = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"{python} cannot be started there ({error}); {remedy}"
    if version < [3, 11]:
        return f"{python} is Python {version[0]}.{version[1]}, and tutti needs 3.11; {remedy}"
    return f"{python} there lacks {', '.join(missing)}; {remedy}" if missing else ""


def main() -> None:
    """Become the command in the arguments, which ends with the process that has started it, the first of them."""
    process_tree.end_with_parent()
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)  # it has ended already
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers block SIGINT
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
