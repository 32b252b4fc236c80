"""The job of a run by mpirun: a process of the submitting machine that holds mpirun, and through it the nodes.

It passes stops on, writes what the nodes print, and ends everything when a node is lost. When it is killed, mpirun ends
with it, and the nodes end by themselves. See `tutti.clusters.mpi_node` for the other side.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.clusters.driver_job import CANCEL, first_error, give_signs_of_life, own_state, save_state
from tutti.clusters.mpi_hosts import MpiSettings, explain_mpirun, stated_variables
from tutti.clusters.mpi_node import read_line
from tutti.clusters.node_run import BEAT_S, LOST_S
from tutti.config.safe_text import plain_text
from tutti.config.version import VERSION
from tutti.environment import SECRET_VARIABLE, secret_settings
from tutti.errors import RESUMABLE
from tutti.launch import process_tree
from tutti.launch.launch_environment import variables

START_S = 120.0
"""Seconds that mpirun has to start all nodes."""

MEET_S = 60.0
"""Seconds that nodes then have to find out where they reach node 0."""

FAILED_S = 10.0
"""Seconds that the other nodes have to notice by themselves that one has failed, before they are told to end."""

STOP_S = 60.0
"""Seconds beyond the grace that nodes have to end after a stop."""

_CANCEL_S = 15.0
_END_S = 10.0


@dataclass(slots=True, kw_only=True)
class NodeState:
    """What the driver knows of a node.

    Attributes:
        facts: what it said first; empty before.
        reached: under which addresses it reaches node 0; None before it has said so.
        heard: when it gave the last sign of life, by the monotonic clock.
        code: the exit code of its part; None before its end.
        over_at: when that was.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    reached: list[bool] | None = None
    heard: float = 0.0
    code: int | None = None
    over_at: float = 0.0


class Mpirun:
    """mpirun, its input that all nodes read, and what the nodes have said.

    Args:
        job: what `tutti.clusters.mpi` has prepared.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.settings = MpiSettings.model_validate(job["settings"])
        self.nodes = [NodeState() for _ in range(job["nodes"])]
        self.said = ""
        self._mark = f"tutti-{secrets.token_hex(8)}"
        given = {name: value for name, value in variables().items() if name != SECRET_VARIABLE}
        self._process = subprocess.Popen(
            job["command"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            env=given | stated_variables(self.settings), preexec_fn=process_tree.end_with_parent,
            start_new_session=True,
        )  # fmt: skip
        secret = secret_settings().secret or secrets.token_hex(32)
        task = job["task"] | {"mark": self._mark, "secret": secret, "folder": job["folder"], "token": job["token"]}
        self._write(task | {"prefixed": job["nodes"] > 1, "first": job["first"]})
        self._readers = [
            threading.Thread(target=read, name="tutti mpirun", daemon=True) for read in (self._read, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def command(self, command: str, **fields: Any) -> None:
        """Send a command to all nodes, or with an empty text a sign of life."""
        self._write({"command": command, **fields})

    def ended(self) -> int | None:
        """Return mpirun's exit code when all that it said is read; None while it runs."""
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(2.0)
        return code

    def close(self) -> None:
        """End mpirun, which has nothing to do any more, or ends the nodes."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                break
        self.ended()

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        assert self._process.stdout is not None
        mark = self._mark.encode()
        with contextlib.suppress(OSError, ValueError), os.fdopen(os.dup(self._process.stdout.fileno()), "rb") as stream:
            while line := stream.readline():
                printed, found, rest = line.partition(mark)
                self._show(printed)
                if found and (message := read_line(rest)) is not None:
                    self._take(*message)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(self._process.stderr.fileno(), 1 << 16):
                self.said = (self.said + data.decode("utf-8", "replace"))[-20000:]
                self._show(data)

    @staticmethod
    def _show(data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk ends no run
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()

    def _take(self, number: int, kind: str, fields: dict[str, Any]) -> None:
        if not 0 <= number < len(self.nodes):
            return
        node = self.nodes[number]
        node.heard = time.monotonic()
        if kind == "hello":
            node.facts = fields
        elif kind == "reached":
            node.reached = [bool(reached) for reached in fields["reached"]]
        elif kind == "end" and node.code is None:
            node.over_at, node.code = node.heard, int(fields["code"])


class MpiDriver:
    """Holds mpirun until all nodes have ended, and writes the state of the job.

    Args:
        job: what `tutti.clusters.mpi` has prepared.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._stopped = self._cancelled = False
        self._reason, self._deadline, self.code = "", float("inf"), 2
        self._token = Path(job["folder"]) / job["token"] if job["folder"] else None
        if self._token is not None:
            self._token.touch()
        self._mpirun = Mpirun(job)
        self._nodes = self._mpirun.nodes

    def stop(self, *_: object) -> None:
        """Let the ranks write a checkpoint and end."""
        self._stopped = True

    def cancel(self, *_: object) -> None:
        """End the ranks at once."""
        self._cancelled = True

    def run(self) -> None:
        """Watch the nodes from their start to their end."""
        try:
            problem, rendezvous = self._begin()
            if problem:
                self._mpirun.command("bye")
                self._mpirun.close()
                self._write("failed", 2, problem, began=False)
                return
            self._write("running", None)
            give_signs_of_life()
            self._mpirun.command("go", rendezvous=rendezvous)
            self._watch()
            self._conclude()
        finally:
            if self._token is not None:
                self._token.unlink(missing_ok=True)

    def _begin(self) -> tuple[str, str]:
        """Wait for all nodes; return what is wrong with them, or where they meet."""
        problem = self._wait_for(lambda node: bool(node.facts), START_S)
        problem = problem or self._wrong()
        if problem or len(self._nodes) == 1:
            return problem, ""
        first = self._nodes[0].facts
        if self._job["rendezvous"]:
            return "", self._job["rendezvous"]
        addresses = [f"{host}:{first['port']}" for host in first["addresses"]]
        self._mpirun.command("reach", addresses=addresses)
        problem = self._wait_for(lambda node: node.reached is not None, MEET_S)
        if problem:
            return problem, ""
        for number, address in enumerate(addresses):
            if all((node.reached or [])[number : number + 1] == [True] for node in self._nodes):
                return "", address
        far = [node.facts["host"] for node in self._nodes if not any(node.reached or [])]
        return (
            f"{', '.join(far) or 'the nodes'} cannot reach {first['host']} at {' or '.join(addresses)}; open these "
            "ports between nodes, or name a place where they can meet: --request rendezvous=HOST:PORT"
        ), ""

    def _wait_for(self, ready: Any, timeout_s: float) -> str:
        """Wait until all nodes are ready; return what went wrong."""
        deadline = beaten = time.monotonic()
        deadline += timeout_s
        while not all(ready(node) for node in self._nodes):
            code = self._mpirun.ended()
            if code is None and (self._cancelled or self._stopped):
                return "it was ended before it began"
            if code is not None or time.monotonic() > deadline:
                return explain_mpirun(self._mpirun.settings, len(self._nodes), code, self._mpirun.said)
            if time.monotonic() > beaten + BEAT_S:
                beaten = time.monotonic()
                self._mpirun.command("")
            time.sleep(0.02)
        return ""

    def _wrong(self) -> str:
        """Return what is wrong with the nodes that have started; empty if nothing is."""
        for node in self._nodes:
            facts, folder = node.facts, self._job["folder"]
            if facts["nodes"] != len(self._nodes):
                return f"mpirun has started {facts['nodes']} processes, not one on each of {len(self._nodes)} nodes"
            if not facts["sees"]:
                return (
                    f"{facts['host']} does not see the run folder {folder}; name one that all nodes see with --folder, "
                    "or use --on ssh"
                )
            if not facts["directory"]:
                return (
                    f"{facts['host']} does not see {self._job['task']['directory']}; submit from a directory that all "
                    "nodes see"
                )
            if facts["version"] != VERSION:
                return (
                    f"{facts['host']} has tutti {facts['version']}, and this machine {VERSION}; install the same there"
                )
        return ""

    def _watch(self) -> None:
        beaten, told = 0.0, ""
        while any(node.code is None for node in self._nodes) and self._mpirun.ended() is None:
            now = time.monotonic()
            wanted = "cancel" if self._cancelled else "stop" if self._stopped else ""
            if wanted != told:
                told = wanted
                self._mpirun.command(wanted)
                self._deadline = now + (_CANCEL_S if self._cancelled else self._job["grace_s"] + STOP_S)
                self._write("running", None, "cancelled" if self._cancelled else "stopping with a checkpoint")
            if now > beaten + BEAT_S:
                beaten = now
                self._mpirun.command("")
            self._look(now)
            if now > self._deadline:
                break
            time.sleep(0.05)

    def _look(self, now: float) -> None:
        """Notice nodes that are lost or have failed, and see that the others end, too."""
        if self._reason:
            return
        for node in self._nodes:
            host = node.facts["host"]
            if node.code is None and now - node.heard > LOST_S:
                self._reason = f"{host} is lost: it gave no sign of life for {LOST_S:g} s"
            elif node.code not in (None, 0, RESUMABLE) and now > node.over_at + FAILED_S:
                self._reason = f"`tutti run` has failed on {host}"
            if self._reason:
                print(f"tutti: {self._reason}; the other nodes end", flush=True)
                self._mpirun.command("end")
                self._deadline = now + LOST_S + _CANCEL_S
                return

    def _conclude(self) -> None:
        self._mpirun.command("bye")
        lost = [node.facts["host"] for node in self._nodes if node.code is None]
        self._mpirun.close()
        ended = sorted((node for node in self._nodes if node.code is not None), key=lambda node: node.over_at)
        failed = [node.code for node in ended if node.code not in (0, RESUMABLE)]
        folder = self._job["folder"]
        if self._cancelled:
            state, code, self._reason = "cancelled", 130, ""
        elif lost or failed:
            state, code = "failed", 1 if lost else failed[0] or 1
            words = self._why_lost(lost) if lost else ""
            self._reason = words or (first_error(Path(folder)) if folder else "") or self._reason
        else:
            code = max(node.code or 0 for node in self._nodes)
            state, self._reason = ("failed", "stopped with a checkpoint") if code else ("completed", "")
        self._write(state, code, self._reason)

    def _why_lost(self, hosts: list[str]) -> str:
        """Return why nodes have ended without an exit code."""
        said = " ".join(plain_text(self._mpirun.said).replace("-", " ").split())
        start = said.find("noticed that process")
        if start < 0 and self._reason:
            return self._reason
        words = said[start : start + 200] if start >= 0 else said[-200:]
        return f"the part on {', '.join(hosts)} was ended from outside (mpirun: {words or 'it said nothing'})"

    def _write(self, state: str, code: int | None, reason: str = "", *, began: bool = True) -> None:
        self.code = self.code if code is None else code
        if self._job["folder"]:
            hosts = ",".join(node.facts.get("host", "") for node in self._nodes)
            save_state(own_state(state, reason, hosts, code, began=began))
        elif not began:
            print(f"tutti: {reason}", file=sys.stderr, flush=True)


def main() -> None:
    """Drive the job that comes to the input as one line of JSON, or is in the file that is named."""
    here = len(sys.argv) > 1
    if here:
        file = Path(sys.argv[1])
        job = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
    else:
        job = json.loads(sys.stdin.readline())
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    driver = MpiDriver(job | {"token": f".tutti-{secrets.token_hex(8)}"})
    signal.signal(signal.SIGTERM, driver.stop)
    signal.signal(CANCEL, driver.cancel)
    if here:
        signal.signal(signal.SIGINT, driver.cancel)
    driver.run()
    sys.exit(driver.code if here else 0)


if __name__ == "__main__":
    main()
