"""What mpirun starts on each node: `tutti run`, for the driver on the submitting machine.

The driver's side is `tutti.clusters.mpi_driver`. mpirun passes lines of JSON to the input of all nodes: the task, then
commands and signs of life. It merges what nodes print, in which the driver finds its own lines by a mark that nobody
else knows. mpirun may cut a line in two, so each has a checksum, and is sent again until it is answered.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tutti.clusters.node_run import BEAT_S, Commands, HostRun, watch
from tutti.config.version import VERSION
from tutti.config.vocabulary import RENDEZVOUS_PORTS
from tutti.environment import mpi_place
from tutti.job_secret import mac, same
from tutti.launch.launch_environment import variables
from tutti.launch.network import split_address
from tutti.network_interfaces import addresses_of, outside_addresses

_OF_MPI = (
    *("OMPI_COMM_WORLD_", "OMPI_MCA_ess_", "OMPI_MCA_orte_", "OMPI_MCA_pmix", "OMPI_MCA_initial_", "PMIX_", "PMI_"),
    *("OMPI_UNIVERSE_", "OMPI_APP_CTX_", "OMPI_FIRST_RANKS", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "HYDI_", "PRTE_"),
)
"""How variables begin that mpirun has for this process alone: a rank that starts MPI must not be taken for it."""

_REACH_S = 3.0
_PURPOSE = "mpi rendezvous"


def line_of(mark: str, node: int, kind: str, fields: dict[str, Any]) -> bytes:
    """Return a line for the driver."""
    text = f"{node} {kind} {json.dumps(fields, separators=(',', ':'))}"
    return f"{mark} {zlib.crc32(text.encode()):08x} {text}\n".encode()


def read_line(text: bytes) -> tuple[int, str, dict[str, Any]] | None:
    """Return node, kind and fields of a line without its mark; None if it was cut."""
    check, _, rest = text.strip().partition(b" ")
    if check != f"{zlib.crc32(rest):08x}".encode():
        return None
    node, kind, fields = rest.decode().split(" ", 2)
    return int(node), kind, json.loads(fields)


class MergedOutput:
    """What this node prints, in whole lines, and the lines for the driver.

    Args:
        mark: begins the lines for the driver.
        node: this node's number.
        prefix: begins each line that is printed.
    """

    def __init__(self, mark: str, node: int, prefix: str) -> None:
        self._mark, self._node, self._prefix = mark, node, prefix.encode()
        self._lock, self._rest = threading.Lock(), b""

    def say(self, data: bytes) -> None:
        """Print what the run has printed."""
        with self._lock:
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))

    def end(self) -> None:
        """Print the last line, which has no end."""
        if self._rest:
            self.say(b"\n")

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a line to the driver."""
        with self._lock:
            self._write(line_of(self._mark, self._node, kind, fields))

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data:
                data = data[os.write(1, data) :]


class Doorway:
    """A port of node 0 that proves to who connects that it is this job's, until the run begins there.

    Args:
        secret: of the job.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._server = _listening()
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, name="tutti doorway", daemon=True).start()

    def close(self) -> None:
        """Give the port back."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = self._server.accept()
                with contextlib.suppress(OSError), visitor:
                    visitor.settimeout(_REACH_S)
                    visitor.sendall(mac(self._secret, _PURPOSE, visitor.recv(64)))


def _listening() -> socket.socket:
    for port in secrets.SystemRandom().sample(RENDEZVOUS_PORTS, 50):
        server = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        with contextlib.suppress(OSError):
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if server.family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.bind(("", port))
            server.listen(64)
            return server
        server.close()
    return socket.create_server(("", 0))


def _own_names(*names: str) -> list[str]:
    """Return under which names and addresses other nodes may reach this one; loopback, which they seldom are, last."""
    found = []
    for name in names:
        with contextlib.suppress(OSError):
            if name and not addresses_of(name)[0].startswith(("127.", "::1")):
                found.append(name)
    return list(dict.fromkeys([*found, *outside_addresses(), "127.0.0.1"]))


def reaches(address: str, secret: bytes) -> bool:
    """Return whether node 0 of this job answers at an address."""
    nonce = secrets.token_hex(16).encode()
    try:
        with socket.create_connection(split_address(address), timeout=_REACH_S) as connection:
            connection.sendall(nonce)
            answer = b""
            while len(answer) < 32 and (part := connection.recv(32 - len(answer))):
                answer += part
    except OSError:
        return False
    return same(answer, mac(secret, _PURPOSE, nonce))


class SeveralRuns:
    """Several tasks of one command on this node, watched as one."""

    def __init__(self, runs: Sequence[HostRun]) -> None:
        self._runs = runs

    def code(self) -> int | None:
        """Return the worst exit code; None while one runs."""
        codes = [run.code() for run in self._runs]
        known = [code for code in codes if code is not None]
        return max(known, key=abs) if len(known) == len(codes) else None

    def stop(self) -> None:
        """Let all of them end."""
        for run in self._runs:
            run.stop()

    def kill(self) -> None:
        """End everything that they have started."""
        for run in self._runs:
            run.kill()

    def hear_the_rest(self) -> None:
        """Read what they have printed last."""
        for run in self._runs:
            run.hear_the_rest()


class MpiNode:
    """This node's part of a job.

    Args:
        task: what the driver has sent first.
        commands: what it sends later.
    """

    def __init__(self, task: dict[str, Any], commands: Commands) -> None:
        self._task, self._commands = task, commands
        self._node, self._nodes = mpi_place() or (0, 1)
        self._host = socket.gethostname()
        self._secret = str(task["secret"]).encode()
        self._out = MergedOutput(task["mark"], self._node, f"{self._host}: " if task["prefixed"] else "")
        self._door = Doorway(self._secret) if self._node == 0 and self._nodes > 1 else None

    def meet(self) -> str | None:
        """Tell about this node until the driver says where the nodes meet; None if the run does not begin."""
        folder, told = self._task["folder"], 0.0
        facts = {
            "host": self._host,
            "nodes": self._nodes,
            "version": VERSION,
            "sees": not folder or (Path(folder) / self._task["token"]).exists(),
            "directory": os.path.isdir(self._task["directory"]),
            "port": self._door.port if self._door is not None else 0,
            "addresses": _own_names(self._task["first"], self._host) if self._node == 0 else [],
        }
        kind, fields = "hello", facts
        while not self._commands.lost:
            message = self._commands.message()
            if message.get("command") == "reach" and kind == "hello":
                found = [self._node == 0 or reaches(address, self._secret) for address in message["addresses"]]
                kind, fields, told = "reached", {"reached": found}, 0.0
            elif message.get("command") == "go":
                return str(message["rendezvous"])
            elif message.get("command") in ("bye", "cancel", "end", "stop"):
                return None
            elif not message:
                if time.monotonic() > told + BEAT_S:
                    told = time.monotonic()
                    self._out.tell(kind, **fields)
                time.sleep(0.02)
        return None

    def run(self, rendezvous: str) -> None:
        """Run the node's part to its end, and tell the driver its exit code until that has heard it."""
        if self._door is not None:
            self._door.close()
        signal.signal(signal.SIGTERM, lambda *_: self._commands.add({"command": "stop"}))
        try:
            runs = SeveralRuns(self._started(rendezvous))
        except OSError as error:
            self._out.say(f"tutti: `tutti run` cannot be started ({error}); correct the node\n".encode())
            code = 2
        else:
            code = watch(runs, self._commands, lambda: self._out.tell("beat"))
            runs.kill()  # what has outlived it
            runs.hear_the_rest()
        self._out.end()
        self._until_heard(lambda: self._out.tell("end", code=code if code >= 0 else 128 - code))

    def _until_heard(self, tell: Callable[[], None]) -> None:
        told = 0.0
        while not self._commands.lost and self._commands.next() != "bye":
            if time.monotonic() > told + BEAT_S:
                told = time.monotonic()
                tell()
            time.sleep(0.02)

    def _started(self, rendezvous: str) -> list[HostRun]:
        task = self._task
        environment = {name: value for name, value in variables().items() if not name.startswith(_OF_MPI)}
        environment["TUTTI_SECRET"] = str(task["secret"])
        words = list(task["arguments"])
        together = ["--nnodes", str(self._nodes), "--node-rank", str(self._node), "--rendezvous", rendezvous]
        if self._nodes > 1 and words[0] in ("run", "doctor"):
            words += together + (["--one-screen"] if words[0] == "run" else [])
        words += task["last"]
        if not task["tasks"] or words[0] == "doctor":
            return [HostRun(words, task["directory"], environment, self._out.say)]
        host, port = split_address(rendezvous) if self._nodes > 1 else ("127.0.0.1", _free_port())
        runs = []
        for local in range(task["tasks"]):
            ranks = {
                "RANK": self._node * task["tasks"] + local, "WORLD_SIZE": self._nodes * task["tasks"],
                "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": task["tasks"], "MASTER_ADDR": host, "MASTER_PORT": port,
            }  # fmt: skip
            given = environment | {name: str(value) for name, value in ranks.items()}
            runs.append(HostRun(words, task["directory"], given, self._out.say))
        return runs


def _free_port() -> int:
    server = _listening()
    with server:
        return int(server.getsockname()[1])


def main() -> None:
    """Run what the first line of the input says."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    source = sys.stdin.buffer
    line = source.readline()
    if not line:
        sys.exit(1)
    node = MpiNode(json.loads(line), Commands(source))
    rendezvous = node.meet()
    if rendezvous is not None:
        node.run(rendezvous)
    sys.stdout.flush()
    os._exit(0)  # another code would let mpirun kill the other nodes


if __name__ == "__main__":
    main()
