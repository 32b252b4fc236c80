"""Runs the real command line as a process tree of its own, and finds what it leaves behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SCRIPTS = Path(__file__).parent / "scripts"
TUTTI = (sys.executable, "-m", "tutti.cli.main")


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def default_signals() -> None:
    """Let a started command get signals that this process ignores, as under nohup or in the background of a shell."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True, kw_only=True)
class Finished:
    code: int
    out: str
    err: str
    folder: Path

    def error(self, rank: int) -> dict[str, object]:
        return json.loads((self.folder / f"ranks/{rank}/error.json").read_text())


class Running:
    """A started command, and every process that inherited its mark."""

    def __init__(self, command: tuple[str, ...], cwd: Path, environment: dict[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self.cwd = cwd
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the command runs; `close`
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment, "TEST_MARK": self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            preexec_fn=default_signals,
        )

    def finish(self, timeout_s: float = 180) -> tuple[int, str, str]:
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, self.said()

    def said(self) -> str:
        """What has come on standard error so far."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size, 0).decode(errors="replace")

    def says(self, words: str, timeout_s: float = 120) -> bool:
        """Wait until something is on standard error."""
        return wait_until(lambda: words in self.said(), timeout_s)

    def close(self) -> None:
        self._errors.close()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def processes(self) -> list[int]:
        """Living processes of this command's tree, orphaned or not."""
        return [process.pid for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TEST_MARK") == self.mark
        except psutil.Error:
            return False

    def assert_nothing_left(self, timeout_s: float = 10) -> None:
        assert wait_until(lambda: not self.processes(), timeout_s), f"left behind: {self.processes()}"


@contextmanager
def running(*command: str, cwd: Path, environment: dict[str, str] | None = None) -> Iterator[Running]:
    """A command that is ended, with all its processes, when the context is left."""
    run = Running(command, cwd, environment or {})
    try:
        yield run
    finally:
        for pid in run.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()
        run.close()


def tutti_run(
    cwd: Path, *arguments: str, environment: dict[str, str] | None = None, timeout_s: float = 180
) -> Finished:
    """`tutti run` to its end in `cwd`, with its folder at cwd/run; nothing may be left behind."""
    command = (*TUTTI, "run", "--no-predict", "--folder", "run", *arguments)
    with running(*command, cwd=cwd, environment=environment) as run:
        code, out, err = run.finish(timeout_s)
        run.assert_nothing_left()
    return Finished(code=code, out=out, err=err, folder=cwd / "run")


def wait_until(condition: Callable[[], bool], timeout_s: float = 30) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
