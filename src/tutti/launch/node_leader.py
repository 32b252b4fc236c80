"""Decides for all nodes of a run what they start next, where ranks may be started again. Runs in node 0's `tutti run`.

Each node starts and watches its own ranks, and reports how a generation ended there. As soon as one node's ranks fail,
or a node is lost, the others end theirs; when all have reported, the next generation is the same for all. A node that
comes again while the run goes on with fewer ranks lets the others pause with a checkpoint, and takes part from there.
"""

import contextlib
import math
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tutti.config import serialization
from tutti.config.plan import Plan
from tutti.config.run_folder import RunFolder
from tutti.config.safe_text import plain_text
from tutti.errors import RESUMABLE, LaunchError, SpecError, TuttiError
from tutti.job_secret import find_secret, mac
from tutti.launch.failure import LOST_NODE, Failure
from tutti.launch.launcher import LaunchSpec
from tutti.launch.network import split_address
from tutti.launch.node_link import LOST_S, Message, NodeLink, admit
from tutti.launch.restarts import RestartPolicy, Restarts, full_plan, smaller
from tutti.launch.supervisor import TIME_LIMIT_CODE, Outcome, Restart
from tutti.network_interfaces import EVERYWHERE, here_address

TOKEN_FILE = ".nodes"
"""The file in the run folder by which nodes see that they share it."""

REPORT_S = 60.0
"""Seconds that a node has to end its ranks and to report, once another node's have failed."""

_LOOK_S = 0.2

_MOST_UNPROVED = 64
"""Connections that may be about to prove the secret at once."""

_LEFT_S = LOST_S + 2
"""Seconds that a node waits for the place of one that may be lost, before it is refused."""

_RESUMING = {"TUTTI_RESUME", "TUTTI_RESTARTED"}

_Events = queue.Queue[tuple[NodeLink, Message | None]]


@dataclass(slots=True)
class _Node:
    """A node that is connected.

    Attributes:
        number: the number that it was started with.
        capacity: how many ranks it may have.
        told: whether it knows why the next generation follows.
        is_new: whether nobody has looked yet for ranks that it may get.
        report: how the current generation ended there; None while it runs.
    """

    number: int
    link: NodeLink
    host: str
    capacity: int
    told: bool = False
    is_new: bool = True
    report: Message | None = None


@dataclass(slots=True)
class _Placed:
    """A generation, and the nodes that its ranks are on.

    Attributes:
        counts: ranks of each node that has some, by the number of the node, ascending.
        until: when nodes that were told to end must have reported; infinite before.
        called_off: whether nodes were told to end or to pause.
        pausing: whether they were told to pause, so that a node that has come can take part.
        lost: its nodes that were lost meanwhile.
    """

    spec: LaunchSpec
    counts: dict[int, int]
    until: float = math.inf
    called_off: bool = False
    pausing: bool = False
    lost: dict[int, _Node] = field(default_factory=dict)

    def ranks_of(self, number: int) -> tuple[int, ...]:
        """Return the ranks of a node."""
        first = sum(count for node, count in self.counts.items() if node < number)
        return tuple(range(first, first + self.counts[number]))


class _Door:
    """Listens at the rendezvous, and lets nodes in that know the secret and were started by the same command.

    Args:
        spec: what node 0 was asked to start.
        policy: how often, and with how many ranks, the run goes on.
        events: takes the links of nodes, and what they say of themselves.
    """

    def __init__(self, spec: LaunchSpec, policy: RestartPolicy, events: "_Events") -> None:
        host, port = split_address(spec.rendezvous or "")
        self._spec, self._policy, self._events, self._secret = spec, policy, events, find_secret()
        self.address = (here_address(host, spans_hosts=True), port)
        self._closed, self._unproved = threading.Event(), threading.BoundedSemaphore(_MOST_UNPROVED)
        family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        try:
            self._listener = socket.create_server(self.address, family=family, backlog=1024)
        except OSError as error:
            raise LaunchError(
                f"node 0 cannot wait for the other nodes at {host}:{port} ({error.strerror or error}); choose another "
                "port with --rendezvous HOST:PORT"
            ) from None
        threading.Thread(target=self._listen, name="tutti node door", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # as for lack of descriptors, which strangers may take for a while
                self._closed.wait(_LOOK_S)
                continue
            if not self._unproved.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), name="tutti node hello", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            admitted = admit(connection, self._secret)
        finally:
            self._unproved.release()
        if admitted is None:
            return
        link, hello = admitted
        if refusal := self._refusal(hello):
            link.send({"refusal": refusal})
            link.close()
        else:
            self._events.put((link, {"kind": "hello", **hello}))

    def _refusal(self, hello: Message) -> str:
        """Say why a node may not take part; an empty string if it may."""
        number = hello.get("node")
        who = f"node {number} on {hello.get('host')}"
        if not isinstance(number, int) or not 0 <= number < self._spec.nodes:
            return f"{who} has no place among {self._spec.nodes} nodes; give all nodes the same --nnodes"
        for name, value in describe(self._spec, self._policy, self._secret).items():
            if hello.get(name) != value:
                differs = f"with {name} {hello.get(name)}, and node 0 with {value}"
                differs = "with other arguments of the script than node 0" if name == "arguments" else differs
                return f"{who} was started {differs}; give all nodes the same command, except for --node-rank"
        return ""


class NodeLeader:
    """Node 0's part; see the module.

    Args:
        spec: what node 0 was asked to start; all its ranks count as one node here.
        policy: how often, and with how many ranks, the run goes on.
        grace_s: seconds that ranks have to write a checkpoint when they pause.
        stop_at_s: Unix time at which the run ends; None: no limit.

    Raises:
        LaunchError: the port of the rendezvous cannot be opened, or there is no secret.
    """

    def __init__(self, spec: LaunchSpec, policy: RestartPolicy, grace_s: float, stop_at_s: float | None = None) -> None:
        self._spec, self._policy, self._grace_s, self._token = spec, policy, grace_s, secrets.token_hex(16)
        self._stop_at_s = math.inf if stop_at_s is None else stop_at_s
        self._plan: Plan | None = None  # of all ranks, once it is known
        self._stopped: Message | None = None  # how a node was stopped, which ends the run
        self._queued: list[tuple[float, NodeLink, Message]] = []  # until when they wait for a place that is taken
        self._port: int | None = None  # where the ranks of the next generation meet; 0: it is asked for
        self._all = replace(spec, ranks_per_node=(spec.world_size,), node_rank=0, rendezvous=None)
        self._nodes: dict[int, _Node] = {}
        self._restarts = Restarts(
            policy, self._all, fewer=self._fewer, memory_step=lambda _: _memory_step(self._nodes.values())
        )
        self._coming: list[_Node] = []  # those that have not seen the run folder yet
        self._events: _Events = queue.Queue()
        self._placed: _Placed | None = None
        self._next: Restart | None = Restart(spec=self._all, delay_s=0.0, message="")
        self._failed: Failure | None = None  # what the next generation follows
        self._begun, self._deadline = False, time.monotonic() + spec.timeout_s
        self._ended = threading.Event()
        self._door = _Door(spec, policy, self._events)
        (spec.folder / TOKEN_FILE).write_text(self._token)
        self._thread = threading.Thread(target=self._lead, name="tutti node leader", daemon=True)
        self._thread.start()

    @property
    def reachable(self) -> tuple[str, int]:
        """The address under which node 0 itself reaches this object."""
        host, port = self._door.address
        return ("127.0.0.1" if host == EVERYWHERE else host), port

    def close(self) -> None:
        """Stop: nodes that are still connected lose node 0, and end."""
        self._ended.set()
        self._thread.join(5)
        self._door.close()
        for link in [*(node.link for node in (*self._nodes.values(), *self._coming)), *(q[1] for q in self._queued)]:
            link.close()
        (self._spec.folder / TOKEN_FILE).unlink(missing_ok=True)

    def _lead(self) -> None:
        try:
            while not self._ended.is_set():
                with contextlib.suppress(queue.Empty):
                    self._take(*self._events.get(timeout=_LOOK_S))
                    while True:
                        self._take(*self._events.get_nowait())
                self._go_on()
        finally:
            if not self._ended.is_set():  # an error of its own: nodes that lose node 0 end
                for node in self._nodes.values():
                    node.link.close()

    # What nodes say.

    def _take(self, link: NodeLink, message: Message | None) -> None:
        kind = None if message is None else message.get("kind")
        if message is not None and kind == "hello":
            self._welcome(link, message)
            return
        node = next((one for one in [*self._nodes.values(), *self._coming] if one.link is link), None)
        if node is None:
            return
        if node in self._coming:
            self._coming.remove(node)
            if kind == "ready" and node.number not in self._nodes:
                self._nodes[node.number] = node
            else:
                link.close()
        elif message is None:
            self._lose(node)
        elif kind == "port":
            self._port = int(message["port"])
        elif kind == "report":
            node.report = message
        if message is not None and (kind == "leave" or message.get("status") == "stopped"):
            self._stopped = {"resumable": False, **message, "status": "stopped"}
            node.report = self._stopped

    def _welcome(self, link: NodeLink, hello: Message) -> None:
        link.start(lambda one, said: self._events.put((one, said)))
        self._queued.append((time.monotonic() + _LEFT_S, link, hello))

    def _let_in(self) -> None:
        """Let in nodes whose place is free; refuse them where it stays taken by a node that lives."""
        for until, link, hello in [*self._queued]:
            number, host = int(hello["node"]), plain_text(str(hello["host"]))
            taken = self._nodes.get(number)
            if taken is not None and time.monotonic() < until:
                continue
            self._queued.remove((until, link, hello))
            if taken is None:
                self._coming.append(_Node(number, link, host, self._spec.ranks_per_node[number]))
                link.send({"kind": "welcome", "folder": str(self._spec.folder), "token": self._token})
            else:
                refusal = f"node {number} on {host} cannot take part, as node {number} runs on {taken.host} already"
                link.send({"refusal": f"{refusal}; end that one, or correct --node-rank"})
                link.close()

    def _lose(self, node: _Node) -> None:
        del self._nodes[node.number]
        node.link.close()
        self._port = None  # it may have been asked for one
        generation = self._placed
        if generation is not None and node.number in generation.counts.keys() - generation.lost.keys():
            generation.lost[node.number] = node

    # What follows.

    def _go_on(self) -> None:
        self._let_in()
        if self._next is not None:
            self._gather(self._next)
            return
        generation = self._placed
        assert generation is not None
        running = self._running(generation)
        failed = bool(generation.lost) or any((node.report or {}).get("status") == "failed" for node in running)
        if self._stopped is not None and generation.until == math.inf:  # the ranks agree to stop, unless they hang
            generation.until = time.monotonic() + REPORT_S + self._grace_s
        elif self._stopped is None and failed and (not generation.called_off or generation.pausing):
            self._call_off(generation, "end", "")
        elif generation.until == math.inf and all(node.report is None for node in running):
            if come := self._come_for(generation):
                self._call_off(generation, "pause", f"{come} has come: the ranks pause to go on with more")
        elif time.monotonic() > generation.until:
            late = [node for node in running if node.report is None]
            if generation.called_off:
                for node in late:
                    self._lose(node)
            else:
                self._call_off(generation, "end", "")
        if all(node.report is not None for node in self._running(generation)):
            self._decide(generation)

    def _running(self, generation: _Placed) -> list[_Node]:
        """Return the nodes of a generation that are not lost; one that has come again since then is not of it."""
        return [self._nodes[number] for number in generation.counts if number not in generation.lost]

    def _come_for(self, generation: _Placed) -> str:
        """Name the nodes that have come and with which more ranks could run; an empty string if there are none."""
        new = [node for node in self._nodes.values() if node.is_new]
        for node in new:
            node.is_new = False
        if not new or self._policy.on_failure != "shrink":
            return ""
        with contextlib.suppress(TuttiError, OSError):
            if self._largest().world_size > generation.spec.world_size:
                return " and ".join(f"node {node.number} on {node.host}" for node in new)
        for node in new:
            node.link.send({"kind": "note", "message": _without_ranks(node)})
        return ""

    def _call_off(self, generation: _Placed, kind: str, words: str) -> None:
        generation.called_off, generation.pausing = True, kind == "pause"
        generation.until = time.monotonic() + REPORT_S + self._grace_s
        for node in self._running(generation):
            if node.report is None:
                node.link.send({"kind": kind, "message": words})

    def _decide(self, generation: _Placed) -> None:
        self._plan = self._plan or full_plan(self._all)
        reports = [node.report for node in self._running(generation) if node.report is not None]
        statuses = {report["status"] for report in reports}
        if self._stopped is not None:
            self._finish(None, "", end=self._stopped)
            return
        failure = _cause(generation, reports)
        if failure is None and (statuses == {"completed"} or not generation.pausing):
            self._finish(None, "", end={"status": "completed"})
            return
        try:
            following = self._after(generation, failure)
        except (TuttiError, OSError) as error:
            following = Outcome(status="failed", exit_code=1, failure=failure, given_up=str(error))
        if isinstance(following, Outcome):
            self._finish(failure, following.given_up)
            return
        self._placed, self._next, self._failed, self._port = None, following, failure, None
        self._deadline = time.monotonic() + self._spec.timeout_s

    def _after(self, generation: _Placed, failure: Failure | None) -> Restart | Outcome:
        if failure is None:
            return self._restarts.grown(self._largest())
        outcome = Outcome(status="failed", exit_code=failure.exit_code or 1, failure=failure)
        return self._restarts.after(generation.spec, outcome)

    def _fewer(self, failure: Failure) -> LaunchSpec:
        """Return what the nodes that are there have room for, without the places of ranks that have failed."""
        assert self._placed is not None
        for node in self._running(self._placed):
            node.capacity -= len(set(self._placed.ranks_of(node.number)) & set(failure.ranks))
        return self._largest()

    def _largest(self) -> LaunchSpec:
        """Return the largest generation that the nodes that are there have room for."""
        return smaller(self._all, self._room(), self._policy.least or 1, self._plan)

    def _room(self) -> int:
        return sum(node.capacity for node in self._nodes.values())

    def _gather(self, following: Restart) -> None:
        """Start the next generation as soon as there is room for it."""
        missing = [number for number in range(self._spec.nodes) if number not in self._nodes]
        late = f"{_numbered(missing)} did not come within {self._spec.timeout_s:g} s"
        if self._stopped is not None:
            self._finish(None, "", end=self._stopped)
        elif time.time() + following.delay_s >= self._stop_at_s:
            written = bool(RunFolder(self._spec.folder).checkpoint_times())
            code = RESUMABLE if written else TIME_LIMIT_CODE
            self._finish(None, "", end={"status": "stopped", "exit_code": code, "resumable": written})
        elif self._room() >= following.spec.world_size and (self._begun or not missing):
            self._start(following)
        elif time.monotonic() > self._deadline and self._failed is None:
            self._finish(None, "", refusal=f"{late}; start `tutti run` there, or wait longer (--timeout)")
        elif time.monotonic() > self._deadline:
            self._finish(self._failed, f"{late}, so the run was not started again")
        elif self._begun:
            each = "" if len(missing) == 1 else " on each"
            words = (
                f"{following.message}\nwaiting up to {self._spec.timeout_s:g} s for {_numbered(missing)}: start the "
                f"same command there again{each}, or use --on-failure shrink"
            )
            for node in self._nodes.values():
                if not node.told:
                    node.link.send({"kind": "note", "message": words})
                    node.told = True

    def _start(self, following: Restart) -> None:
        """Place the ranks, and start them once the first node has found a port for them to meet at."""
        counts, left = {}, following.spec.world_size
        for node in sorted(self._nodes.values(), key=lambda one: one.number):
            if count := min(node.capacity, left):
                counts[node.number] = count
                left -= count
        first = self._nodes[next(iter(counts))]
        if self._port is None:
            self._port = 0
            first.link.send({"kind": "port"})
        if not self._port:
            return
        self._begun, self._next, self._placed = True, None, _Placed(following.spec, counts)
        host = split_address(self._spec.rendezvous or "")[0] if first.number == 0 else first.link.address
        host = f"[{host}]" if ":" in host else host
        told, dropped = _changes(self._all.environment, following.spec.environment)
        for node in self._nodes.values():
            node.report, node.is_new = None, False
            message, node.told = "" if node.told else following.message, False
            if node.number not in counts:
                node.link.send({"kind": "note", "message": f"{message}\n{_without_ranks(node)}".strip()})
                continue
            node.link.send(
                {
                    "kind": "start",
                    "ranks_per_node": [*counts.values()],
                    "node_rank": [*counts].index(node.number),
                    "rendezvous": f"{host}:{self._port}" if len(counts) > 1 else None,
                    "set": told,
                    "drop": dropped,
                    "delay_s": following.delay_s,
                    "grown": following.grown,
                    "message": message,
                }
            )

    def _finish(self, failure: Failure | None, given_up: str, refusal: str = "", end: Message | None = None) -> None:
        said = None if failure is None else serialization.to_data(failure)
        told = {"status": "failed", "exit_code": 1, "resumable": False, **(end or {})}
        told |= {"kind": "finish", "failure": said, "given_up": given_up, "refusal": refusal}
        for node in self._nodes.values():
            node.link.send(told)
        self._ended.set()


def _cause(generation: _Placed, reports: list[Message]) -> Failure | None:
    """Return the failure that the others follow from, of all that nodes report; None if there is none."""
    found: list[tuple[int, Failure]] = []
    for report in reports:
        if report.get("status") != "failed":
            continue
        try:
            failure = serialization.from_data(Failure, report["failure"], source="a node's report")
        except (SpecError, LookupError):
            failure = Failure(
                ranks=(0,), first=0, hosts=(), message="a node's ranks failed, and its report cannot be read",
                traceback="", exit_code=1,
            )  # fmt: skip
        by_itself = failure.kind in ("user", "exception", "killed")
        found.append((0 if by_itself else 3 if failure.kind == "peer" else 2, failure))
    if generation.lost:
        hosts = tuple(dict.fromkeys(node.host for node in generation.lost.values()))
        ranks = tuple(rank for number in generation.lost for rank in generation.ranks_of(number))
        several = len(generation.lost) > 1
        message = (
            f"{_numbered(sorted(generation.lost))} ({', '.join(hosts)}) {'are' if several else 'is'} lost: `tutti run` "
            "has ended there, or the network is cut"
        )
        lost = Failure(
            ranks=ranks, first=ranks[0], hosts=hosts, message=message, traceback="", exit_code=1, kind="killed",
            error=LOST_NODE,
        )  # fmt: skip
        found.append((1, lost))
    return min(found, key=lambda one: one[0])[1] if found else None


def _memory_step(nodes: Iterable[_Node]) -> int | None:
    """Return the step of the newest checkpoint that nodes have in memory, as they report; None if they have none."""
    steps = [(node.report or {}).get("memory_step") for node in nodes]
    return max((step for step in steps if isinstance(step, int)), default=None)


def _without_ranks(node: _Node) -> str:
    if not node.capacity:
        return (
            "the ranks of this node have failed, so the run goes on without it; end this `tutti run` and start it "
            "again to take part"
        )
    return "the run goes on without ranks here, as there is no use for more; this node waits"


def describe(spec: LaunchSpec, policy: RestartPolicy, secret: bytes) -> dict[str, Any]:
    """Return what must be the same in the commands of all nodes, by the option's name; of arguments only a code."""
    return {
        "--nnodes": spec.nodes,
        "--nproc": list(spec.ranks_per_node),
        "script": spec.target.rpartition("/")[2],
        "arguments": mac(secret, "arguments", list(spec.arguments)).hex(),
        "--max-restarts": policy.max_restarts,
        "--min-ranks": policy.min_ranks,
        "--on-failure": policy.on_failure,
        "--memory-checkpoint-every": spec.environment.get("TUTTI_MEMORY_CHECKPOINT_EVERY"),
    }


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a generation has otherwise than what was asked for, and those that it lacks.

    What to resume is always told: a node that has come again may have been asked to resume something else.
    """
    told = {name: value for name, value in after.items() if before.get(name) != value or name in _RESUMING}
    return told, sorted((before.keys() | _RESUMING) - after.keys())


def _numbered(numbers: list[int]) -> str:
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
