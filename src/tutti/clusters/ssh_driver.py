"""The job of a run over ssh: a process of the submitting machine that holds a connection to each host.

It passes stops on, writes what the hosts print and what is new in their run folders, and ends everything when a host is
lost. When it is killed, its connections close, and the hosts end by themselves. Its state is a file of this user's,
which outlives it. See `tutti.clusters.ssh_node` for the other side.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from tutti.clusters.driver_job import CANCEL, first_error, give_signs_of_life, own_state, save_state
from tutti.clusters.node_run import BEAT_S, LOST_GRACE_S, LOST_S
from tutti.clusters.ssh_node import FRAME
from tutti.config.run_folder import RunFolder
from tutti.config.safe_text import plain_text
from tutti.errors import RESUMABLE

FAILED_S = 10.0
"""Seconds that the other hosts have to notice by themselves that one has failed, before they are told to end."""

STOP_S = 60.0
"""Seconds beyond the grace that hosts have to end after a stop."""

RETRY_S = 5.0
"""Seconds between attempts to reach a host that was lost, where the run goes on after failures."""

START_S = 90.0
"""Seconds that a host has to start its part; those of a connection that is being made count."""

FAILOVER_S = LOST_GRACE_S + 4.0
"""Seconds between the loss of node 0 and its failover: its ranks may still write a checkpoint."""

_CANCEL_S = 15.0
_LEAVE_S = 3.0

_SENT_BACK = ("fetch", "ranks", "temporary", "checkpoints", "known", "had")
"""Fields of a host's request about the files that it sends back."""

_NODE = b"from tutti.clusters.ssh_node import main; main()"


def node_arguments(
    options: Mapping[str, Any], number: int, ranks: Sequence[int | None], least: int | None, where: str
) -> list[str]:
    """Return the arguments of `tutti run` on a host.

    Args:
        options: of this host: "folder", "resume" (the checkpoint or run to resume from, or ""), and "words", the rest.
        number: of the node.
        ranks: of each node; None leaves it to the plan.
        least: fewest nodes; None if all are needed.
        where: HOST:PORT where nodes meet.
    """
    arguments = ["run", "--on", "local", "--folder", options["folder"]]
    arguments += ["--resume", options["resume"]] if options["resume"] else []
    if None not in ranks:
        arguments += ["--nproc", ",".join(map(str, ranks if least is None else ranks[:1]))]
    if len(ranks) > 1:
        nodes = str(len(ranks)) if least is None else f"{least}:{len(ranks)}"
        arguments += ["--nnodes", nodes, "--node-rank", str(number), "--rendezvous", where, "--one-screen"]
    return [*arguments, *options["words"]]


class HostLink:
    """The connection to one host.

    Args:
        task: the ssh command, and what the host is to do.
        secret: proves ranks to each other; sent over the connection only.
        results: takes what comes back.
    """

    def __init__(self, task: dict[str, Any], secret: str, results: "Results") -> None:
        self.name, self.task, self._secret, self._results = str(task["name"]), task, secret, results
        self.code: int | None = None
        self.lost, self.over_at, self.begun = "", 0.0, False
        self.connect()

    def connect(self) -> None:
        """Start the host's part."""
        self.code, self.lost, self._said = None, "", ""
        self._heard, self.begun = time.monotonic() + START_S - LOST_S, False
        self._process = subprocess.Popen(
            self.task["command"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        place = self.task["request"]["python_path"]
        boot = b"sys.path.insert(0, %b); " % repr(place).encode() + _NODE if place else _NODE
        boot = b"import sys; " + boot
        task = {**self.task["request"], "secret": self._secret}
        script = self.task["script"].encode()
        self._write(b"%b%d\n%b%b\n" % (script, len(boot), boot, json.dumps(task).encode()))
        for read in (self._read, self._read_errors):
            threading.Thread(target=read, args=(self._process,), name=f"tutti {self.name}", daemon=True).start()

    def command(self, command: str) -> None:
        """Send a command, or with an empty text a sign of life."""
        self._write(json.dumps({"command": command}).encode() + b"\n")

    def look(self) -> None:
        """Notice that the host is lost."""
        if self.code is None and not self.lost and time.monotonic() - self._heard > LOST_S:
            words = f"it gave no sign of life for {LOST_S:g} s" if self.begun else "it did not start"
            self._lose(f"{words}: it is down, or the network to it is cut")

    @property
    def over(self) -> bool:
        """Whether the host's part has ended, one way or the other."""
        return self.code is not None or bool(self.lost)

    def close(self) -> None:
        """End the connection; a host that has ended is left the time to clean up."""
        if self.code is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_S)
        self._process.kill()
        self._process.wait()

    def _lose(self, reason: str) -> None:
        self.lost, self.over_at = reason, time.monotonic()
        self._process.kill()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(data)

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        with contextlib.suppress(OSError, ValueError), os.fdopen(os.dup(process.stdout.fileno()), "rb") as stream:
            while line := stream.readline():
                self._heard = time.monotonic()
                if not line.startswith(FRAME):  # what a shell prints when it starts
                    self._said += line.decode("utf-8", "replace")[:1000]
                    continue
                frame = json.loads(line.removeprefix(FRAME))
                data = b""
                while len(data) < frame["size"] and (part := stream.read(frame["size"] - len(data))):
                    data += part
                    self._heard = time.monotonic()
                self._take(frame, data)
        code = process.wait()
        if self.code is None and not self.lost and process is self._process:
            time.sleep(0.2)  # what ssh has said comes through another pipe
            said = " ".join(plain_text(self._said).split())[-300:]
            self._lose(f"the connection ended ({said or f'ssh exit code {code}'})")

    def _read_errors(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(process.stderr.fileno(), 1 << 16):
                self._said = (self._said + data.decode("utf-8", "replace"))[-2000:]
                self._results.say(self.name, data)

    def _take(self, frame: dict[str, Any], data: bytes) -> None:
        self.begun = True
        if frame["kind"] == "output":
            self._results.say(self.name, data)
        elif frame["kind"] == "file":
            self._results.put(str(frame["path"]), int(frame["offset"]), data, last=bool(frame["last"]))
        elif frame["kind"] == "checkpoint":
            self._results.publish(str(frame["name"]))
        elif frame["kind"] == "end":
            self.code, self.over_at = int(frame["code"]), time.monotonic()
            self.command("bye")


class Results:
    """What comes back from the hosts: the log, and the files of the run folder.

    Args:
        folder: the run folder on this machine.
        several: whether there are several hosts, so that each line of the log names its own.
        names: what hosts call the run folder, and what it is called here.
    """

    def __init__(self, folder: Path, *, several: bool, names: Mapping[str, str] | None = None) -> None:
        self._names = names or {}
        self._folder, self._several = folder, several
        self._lock, self._lines = threading.Lock(), dict[str, bytes]()
        self._failed = False

    def say(self, name: str, data: bytes) -> None:
        """Write output of a host into the log, line by line."""
        with self._lock:
            *lines, self._lines[name] = (self._lines.get(name, b"") + data).split(b"\n")
            prefix = f"{name}: ".encode() if self._several else b""
            self._print(b"".join(prefix + self._translated(line) + b"\n" for line in lines))

    def _translated(self, line: bytes) -> bytes:
        for there, here in self._names.items():
            line = line.replace(there.encode(), here.encode())
        return line

    def note(self, words: str) -> None:
        """Write a sentence of the driver's own into the log."""
        with self._lock:
            self._print(f"tutti: {words}\n".encode())

    def _print(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk ends no run
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()

    def put(self, name: str, offset: int, data: bytes, *, last: bool) -> None:
        """Write a part of a file; a whole one appears at once."""
        parts = PurePosixPath(name).parts
        if not parts or PurePosixPath(name).is_absolute() or ".." in parts or parts[0].startswith("."):
            return
        if parts[0] == "checkpoints" and len(parts) > 2:  # it gets its name when it is whole
            parts = (parts[0], f"{parts[1]}.fetched", *parts[2:])
        path = self._folder.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if offset == 0 and last:
                partial = path.with_name(f".{path.name}.partial")
                partial.write_bytes(data)
                partial.replace(path)
                return
            with path.open("r+b" if path.exists() else "w+b") as file:
                if offset == 0:
                    file.truncate()
                file.seek(offset)
                file.write(data)
        except OSError as error:
            if not self._failed:
                self._failed = True
                self.note(
                    f"{path} cannot be written ({error.strerror}); free space here: what is missing stays on the hosts"
                )

    def publish(self, name: str) -> None:
        """Give a checkpoint its name: it is whole."""
        path = self._folder / "checkpoints" / PurePosixPath(name).name
        fetched = path.with_name(f"{path.name}.fetched")
        if fetched.is_dir() and not path.exists() and not self._failed:
            fetched.rename(path)


class Driver:
    """Holds the connections until all hosts have ended, and writes the state of the job.

    Args:
        job: what `tutti.clusters.ssh` has prepared.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._job, self._folder = job, Path(job["folder"])
        self._nodes = ",".join(task["name"] for task in job["hosts"])
        self._results = Results(self._folder, several=len(job["hosts"]) > 1, names=job["names"])
        self._stopped = self._cancelled = False
        self._reason, self._deadline, self._failovers = "", float("inf"), 0
        self._write("running", None)
        give_signs_of_life()
        secret = secrets.token_hex(32)
        self._links = [HostLink(task, secret, self._results) for task in job["hosts"]]

    def stop(self, *_: object) -> None:
        """Let the ranks write a checkpoint and end."""
        self._stopped = True

    def cancel(self, *_: object) -> None:
        """End the ranks at once."""
        self._cancelled = True

    def run(self) -> None:
        """Watch the hosts to their end."""
        beaten, told = 0.0, ""
        while not self._ended(now := time.monotonic()):
            wanted = "cancel" if self._cancelled else "stop" if self._stopped else ""
            if wanted != told:
                told = wanted
                self._tell(wanted)
                self._deadline = now + (_CANCEL_S if self._cancelled else self._job["grace_s"] + STOP_S)
                self._write("running", None, "cancelled" if self._cancelled else "stopping with a checkpoint")
            if now > beaten + BEAT_S:
                beaten = now
                self._tell("")
            self._look(now)
            if now > self._deadline:
                break
            time.sleep(0.05)
        self._conclude()

    def _ended(self, now: float) -> bool:
        if not all(link.over or (self._links[0].over and not link.begun) for link in self._links):
            return False
        successor = self._successor()
        if successor is not None and now > self._links[0].over_at + FAILOVER_S:
            self._fail_over(successor)
        return successor is None

    def _successor(self) -> HostLink | None:
        """Return the host that is to be node 0 instead of the one that was lost; None if the run ends."""
        first, others = self._links[0], self._links[1:]
        if not (self._job["failover"] and first.lost) or self._stopped or self._cancelled:
            return None
        if any(link.code == 0 for link in others) or self._failovers > len(others):
            return None
        return next((link for link in others if link.code is not None and link.task["rendezvous"]), None)

    def _fail_over(self, successor: HostLink) -> None:
        """Start all hosts again, with another one as node 0, from the newest checkpoint."""
        lost = self._links[0]
        self._failovers += 1
        self._results.note(f"{successor.name} is node 0 now, in place of {lost.name}")
        ours, theirs = successor.task["request"], lost.task["request"]
        ours.update({name: theirs[name] for name in _SENT_BACK}, had=sorted(RunFolder(self._folder).checkpoint_times()))
        theirs.update(fetch="none", temporary=False, checkpoints=False)
        self._links = [successor, *(link for link in self._links if link is not successor)]
        ranks = [link.task["ranks"] for link in self._links]
        for number, link in enumerate(self._links):
            options = {**link.task["options"], "resume": ""}  # the host looks for the newest checkpoint
            arguments = node_arguments(options, number, ranks, self._job["least_nodes"], successor.task["rendezvous"])
            link.task["request"] |= {
                "arguments": arguments,
                "resume": link.task["options"]["resume"] or options["folder"],
            }
            link.close()
            link.connect()
        self._reason, self._deadline = "", float("inf")

    def _tell(self, command: str) -> None:
        for link in self._links:
            if not link.over:
                link.command(command)

    def _look(self, now: float) -> None:
        """Notice hosts that are lost or have failed, and see that the others end, too."""
        for link in self._links:
            link.look()
        spares = self._job["restarts"]  # node 0's `tutti run` decides how the run goes on without other hosts
        retries = spares and not (self._stopped or self._cancelled or self._links[0].over)
        for number, link in enumerate(self._links):
            if number and spares:
                if link.lost and retries and now > link.over_at + RETRY_S:
                    self._results.note(f"{link.name} was lost ({link.lost}); trying to reach it again")
                    link.connect()
            elif link.lost:
                self._end_others(f"{link.name} is lost: {link.lost}")
            elif link.code not in (None, 0, RESUMABLE) and now > link.over_at + FAILED_S:
                self._end_others(f"`tutti run` has failed on {link.name}")

    def _end_others(self, reason: str) -> None:
        """Let the other hosts end, once."""
        if self._reason or all(link.over for link in self._links):
            return
        self._reason = reason
        self._results.note(f"{reason}; the other hosts end")
        self._tell("end")
        self._deadline = min(self._deadline, time.monotonic() + LOST_S + _CANCEL_S)

    def _conclude(self) -> None:
        for link in self._links:
            if not link.over:
                link.lost = "it did not end in time"
        deciding = self._links[:1] if self._job["restarts"] else self._links
        ended = sorted(deciding, key=lambda link: link.over_at)
        lost = next((f"{link.name} is lost: {link.lost}" for link in ended if link.lost), "")
        failed = [link.code for link in ended if link.code not in (None, 0, RESUMABLE)]
        if self._cancelled:
            state, code, self._reason = "cancelled", 130, ""
        elif lost or failed:
            state, code = "failed", 1 if lost else failed[0]
            self._reason = lost or first_error(self._folder) or self._reason
        else:
            code = max(link.code or 0 for link in deciding)
            state, self._reason = ("failed", "stopped with a checkpoint") if code else ("completed", "")
        self._write(state, code, self._reason)
        for link in self._links:
            link.close()

    def _write(self, state: str, code: int | None, reason: str = "") -> None:
        save_state(own_state(state, reason, self._nodes, code, places=self._job["places"]))


def main() -> None:
    """Drive the job that comes to the input, as one line of JSON."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = Driver(json.loads(sys.stdin.readline()))
    signal.signal(signal.SIGTERM, driver.stop)
    signal.signal(CANCEL, driver.cancel)
    driver.run()


if __name__ == "__main__":
    main()
