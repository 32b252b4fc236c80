"""Decides for all nodes of a run what they start next, where ranks may be started again. Runs in node 0's `tutti run`.

Each node starts and watches its own ranks, and reports how a generation ended there. As soon as one node's ranks fail,
or a node is lost, the others end theirs; when all have reported, the next generation is the same for all. A node that
comes again while the run goes on with fewer ranks lets the others pause with a checkpoint, and takes part from there.

With a range of nodes (`--nnodes 1:4`) the run begins with those that there are. One that is told to stop leaves with a
checkpoint, and the others go on; only node 0 stops all. Where too few are left, the run waits for others.
"""

import contextlib
import math
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tutti.config import serialization
from tutti.config.plan import Plan
from tutti.config.run_folder import RunFolder
from tutti.errors import RESUMABLE, SpecError, TuttiError
from tutti.launch.failure import LOST_NODE, Failure
from tutti.launch.launcher import LaunchSpec
from tutti.launch.network import split_address
from tutti.launch.node_link import Message, NodeLink
from tutti.launch.node_rendezvous import TOKEN_FILE, Node, NodeEvents, NodeRendezvous, NodeTable
from tutti.launch.restarts import RestartPolicy, Restarts, full_plan, smaller
from tutti.launch.supervisor import TIME_LIMIT_CODE, Outcome, Restart
from tutti.network_interfaces import EVERYWHERE

REPORT_S = 60.0
"""Seconds that a node has to end its ranks and to report, once another node's have failed."""

_LOOK_S = 0.2

JOIN_S = 10.0
"""Seconds that a run which may begin with fewer nodes waits for more, after the last one has come."""

_SETTLE_S = 2.0
"""Seconds that ranks which are to pause for a node that has come go on, as others may come right after it."""

_RESUMING = {"TUTTI_RESUME", "TUTTI_RESTARTED"}


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
    lost: dict[int, Node] = field(default_factory=dict)

    def ranks_of(self, number: int) -> tuple[int, ...]:
        """Return the ranks of a node."""
        first = sum(count for node, count in self.counts.items() if node < number)
        return tuple(range(first, first + self.counts[number]))


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
        self._port: int | None = None  # where the ranks of the next generation meet; 0: it is asked for
        self._all = replace(spec, ranks_per_node=(spec.world_size,), node_rank=0, rendezvous=None)
        self._table = NodeTable(spec, self._token)
        self._nodes = self._table.nodes
        self._restarts = Restarts(
            policy, self._all, fewer=self._fewer, memory_step=lambda _: _memory_step(self._nodes.values())
        )
        self._events: NodeEvents = queue.Queue()
        self._placed: _Placed | None = None
        self._next: Restart | None = Restart(spec=self._all, delay_s=0.0, message="")
        self._failed: Failure | None = None  # what the next generation follows
        self._begun, self._deadline = False, time.monotonic() + spec.timeout_s
        self._ended = threading.Event()
        self._rendezvous = NodeRendezvous(spec, policy, self._events)
        (spec.folder / TOKEN_FILE).write_text(self._token)
        self._thread = threading.Thread(target=self._lead, name="tutti node leader", daemon=True)
        self._thread.start()

    @property
    def reachable(self) -> tuple[str, int]:
        """The address under which node 0 itself reaches this object."""
        host, port = self._rendezvous.address
        return ("127.0.0.1" if host == EVERYWHERE else host), port

    def close(self) -> None:
        """Stop: nodes that are still connected lose node 0, and end."""
        self._ended.set()
        self._thread.join(5)
        self._rendezvous.close()
        self._table.close()
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
            link.start(lambda one, said: self._events.put((one, said)))
            self._table.queue(link, message)
            return
        if message is None:
            self._table.forget(link)
        node = self._table.of_link(link)
        if node is None or self._table.begin(node, is_ready=kind == "ready"):
            return
        if message is None:
            self._lose(node)
        elif kind == "port":
            self._port = int(message["port"])
        elif kind == "report":
            node.report = message
        if message is not None and (kind == "leave" or message.get("status") == "stopped"):
            self._take_stop(node, message, signalled=kind == "leave" or bool(message.get("signalled")))

    def _take_stop(self, node: Node, message: Message, *, signalled: bool) -> None:
        """Take in that a node has stopped. Where their number may change, a node leaves alone, except for node 0.

        Args:
            signalled: whether it was told to stop there, and not by the ranks of another node or the time limit.
        """
        if not self._policy.elastic or (signalled and node.number == 0):
            self._stopped = {"resumable": False, **message, "status": "stopped"}
            node.report = self._stopped
        elif signalled:
            node.leaves = True
            if message["kind"] == "leave":  # it waits for no answer
                self._lose(node)

    def _lose(self, node: Node) -> None:
        del self._nodes[node.number]
        node.link.close()
        self._port = None  # it may have been asked for one
        generation = self._placed
        if generation is not None and node.number in generation.counts.keys() - generation.lost.keys():
            generation.lost[node.number] = node

    # What follows.

    def _go_on(self) -> None:
        self._table.let_in()
        if self._next is not None:
            self._gather(self._next)
            return
        generation = self._placed
        assert generation is not None
        running = self._running(generation)
        said = {(node.report or {}).get("status") for node in running}
        gone = (node.report for node in running if node.leaves and node.report is not None)
        ended = self._stopped or next(gone, None)
        if ended is not None and not ended["resumable"] and not generation.called_off:
            self._call_off(generation, "pause", "")  # no rank can agree with those to stop
        failed = bool(generation.lost) or "failed" in said
        stopping = self._stopped is not None or ("stopped" in said and not failed)
        if stopping and generation.until == math.inf:  # the ranks agree to stop, unless they hang
            generation.until = time.monotonic() + REPORT_S + self._grace_s
        elif self._stopped is None and failed and (not generation.called_off or generation.pausing):
            self._call_off(generation, "end", "")
        elif generation.until == math.inf and all(node.report is None for node in running):
            if come := self._come_for(generation):
                self._call_off(generation, "pause", f"{come} come: the ranks pause to go on with more")
        elif time.monotonic() > generation.until:
            late = [node for node in running if node.report is None]
            if generation.called_off:
                for node in late:
                    self._lose(node)
            else:
                self._call_off(generation, "end", "")
        if all(node.report is not None for node in self._running(generation)):
            self._decide(generation)

    def _running(self, generation: _Placed) -> list[Node]:
        """Return the nodes of a generation that are not lost; one that has come again since then is not of it."""
        return [self._nodes[number] for number in generation.counts if number not in generation.lost]

    def _come_for(self, generation: _Placed) -> str:
        """Name the nodes that have come and with which more ranks could run; an empty string if there are none."""
        new = [node for node in self._nodes.values() if node.is_new]
        if self._policy.elastic and time.monotonic() < self._table.last_came_s + _SETTLE_S:
            return ""
        for node in new:
            node.is_new = False
        if not new or not (self._policy.elastic or self._policy.on_failure == "shrink"):
            return ""
        with contextlib.suppress(TuttiError, OSError):
            if self._largest().world_size > generation.spec.world_size:
                return f"{' and '.join(node.words for node in new)} {'has' if len(new) == 1 else 'have'}"
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
        reports = {node.number: node.report for node in self._running(generation) if node.report is not None}
        statuses = {report["status"] for report in reports.values()}
        leaving = [node for node in self._running(generation) if node.leaves]
        failure = _cause(generation, [*reports.values()])
        if self._stopped is not None:
            self._finish(None, "", end=self._stopped)
            return
        if leaving and failure is not None and failure.kind == "peer":
            failure = None  # ranks only lost those of a node that left before training began
        if failure is None and not leaving and "stopped" in statuses:  # by the time limit
            self._finish(None, "", end=next(said for said in reports.values() if said["status"] == "stopped"))
            return
        if failure is None and not leaving and (statuses == {"completed"} or not generation.pausing):
            self._finish(None, "", end={"status": "completed"})
            return
        for node in leaving:
            node.link.send(_ended({**reports[node.number], "status": "stopped", "left": True}))
            del self._nodes[node.number]
        try:
            following = self._after(generation, failure, leaving)
        except (TuttiError, OSError) as error:
            following = Outcome(status="failed", exit_code=1, failure=failure, given_up=str(error))
        if isinstance(following, Outcome):
            self._finish(failure, following.given_up)
            return
        self._placed, self._next, self._failed, self._port = None, following, failure, None
        self._deadline = time.monotonic() + self._spec.timeout_s

    def _after(self, generation: _Placed, failure: Failure | None, leaving: list[Node]) -> Restart | Outcome:
        if failure is not None:
            outcome = Outcome(status="failed", exit_code=failure.exit_code or 1, failure=failure)
            return self._restarts.after(generation.spec, outcome)
        following = self._restarts.grown(self._largest())
        if not leaving:
            return following
        saved = " with a checkpoint" if all((node.report or {}).get("resumable") for node in leaving) else ""
        left = f"{' and '.join(node.words for node in leaving)} left{saved}, as it was told to stop there"
        return replace(following, message=f"{left}\n{following.message}")

    def _fewer(self, failure: Failure) -> LaunchSpec:
        """Return what the nodes that are there have room for, without ranks that have failed if none is replaced."""
        assert self._placed is not None
        for node in self._running(self._placed) if self._policy.on_failure == "shrink" else ():
            node.capacity -= len(set(self._placed.ranks_of(node.number)) & set(failure.ranks))
        return self._largest()

    def _largest(self) -> LaunchSpec:
        """Return the largest generation that there is room for; if it is too small, one that has to wait for nodes."""
        least = self._policy.least or 1
        room = max(self._table.room, least) if self._policy.elastic else self._table.room
        return smaller(self._all, room, least, self._plan)

    def _fitted(self, following: Restart) -> Restart:
        """Return a generation with all the ranks that there is room for now, where their number may change."""
        if not self._policy.elastic:
            return following
        largest = self._largest()
        if largest.world_size == following.spec.world_size:
            return following
        kept = {name: value for name, value in following.spec.environment.items() if name in _RESUMING}
        variables = {name: value for name, value in largest.environment.items() if name not in _RESUMING} | kept
        message = f"{following.message}\nwith {largest.world_size} ranks by now".strip()
        return replace(following, spec=replace(largest, environment=variables), message=message if self._begun else "")

    def _may_start(self, following: Restart) -> bool:
        """Return whether the nodes are there that the next generation needs, and no others are to be waited for."""
        missing = self._table.missing
        if not self._policy.elastic:
            return self._table.room >= following.spec.world_size and (self._begun or not missing)
        enough = len(self._nodes) >= (self._policy.least_nodes or self._spec.nodes)
        enough = enough and self._table.room >= (self._policy.least or 1)
        return enough and (self._begun or not missing or time.monotonic() > self._table.last_came_s + JOIN_S)

    def _gather(self, following: Restart) -> None:
        """Start the next generation as soon as there is room for it."""
        missing, needed = self._table.missing, self._policy.least_nodes or self._spec.nodes
        late, where = f"{_numbered(missing)} did not come within {self._spec.timeout_s:g} s", "there"
        if self._policy.elastic:
            late = f"{len(self._nodes)} of at least {needed} nodes were there within {self._spec.timeout_s:g} s"
            where = "on more"
        if self._stopped is not None:
            self._finish(None, "", end=self._stopped)
        elif time.time() + following.delay_s >= self._stop_at_s:
            written = bool(RunFolder(self._spec.folder).checkpoint_times())
            code = RESUMABLE if written else TIME_LIMIT_CODE
            self._finish(None, "", end={"status": "stopped", "exit_code": code, "resumable": written})
        elif self._may_start(following):
            self._start(self._fitted(following))
        elif time.monotonic() > self._deadline and self._failed is None and self._begun:
            self._finish(None, "", end={"status": "stopped", "exit_code": RESUMABLE, "resumable": True})
        elif time.monotonic() > self._deadline and self._failed is None:
            self._finish(None, "", refusal=f"{late}; start `tutti run` {where}, or wait longer (--timeout)")
        elif time.monotonic() > self._deadline:
            self._finish(self._failed, f"{late}, so the run was not started again")
        elif self._begun:
            each = "" if len(missing) == 1 else " on each"
            wanted = f"{_numbered(missing)}: start the same command there again{each}, or use --on-failure shrink"
            if self._policy.elastic:
                wanted = f"more nodes, as it goes on with {needed} or more: start the same command on them"
            self._table.tell(f"{following.message}\nwaiting up to {self._spec.timeout_s:g} s for {wanted}")

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
        first_one = not self._begun
        self._begun, self._next, self._placed = True, None, _Placed(following.spec, counts)
        host = split_address(self._spec.rendezvous or "")[0] if first.number == 0 else first.link.address
        host = f"[{host}]" if ":" in host else host
        told, dropped = _changes(self._all.environment, following.spec.environment)
        for node in self._nodes.values():
            node.report, node.is_new = None, False
            message, node.told = "" if node.told else following.message, False
            if first_one and self._table.missing:
                are = "is" if len(self._nodes) == 1 else "are"
                message = f"{len(self._nodes)} of up to {self._spec.nodes} nodes {are} there, so the run begins"
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
        for node in self._nodes.values():
            node.link.send(_ended({**(end or {}), "failure": said, "given_up": given_up, "refusal": refusal}))
        self._ended.set()


def _ended(end: Message) -> Message:
    """Return the message that the run is over for a node."""
    nothing = {"status": "failed", "exit_code": 1, "resumable": False, "failure": None, "given_up": "", "refusal": ""}
    return {**nothing, **end, "kind": "finish"}


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


def _memory_step(nodes: Iterable[Node]) -> int | None:
    """Return the step of the newest checkpoint that nodes have in memory, as they report; None if they have none."""
    steps = [(node.report or {}).get("memory_step") for node in nodes]
    return max((step for step in steps if isinstance(step, int)), default=None)


def _without_ranks(node: Node) -> str:
    if not node.capacity:
        return (
            "the ranks of this node have failed, so the run goes on without it; end this `tutti run` and start it "
            "again to take part"
        )
    return "the run goes on without ranks here, as there is no use for more; this node waits"


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a generation has otherwise than what was asked for, and those that it lacks.

    What to resume is always told: a node that has come again may have been asked to resume something else.
    """
    told = {name: value for name, value in after.items() if before.get(name) != value or name in _RESUMING}
    return told, sorted((before.keys() | _RESUMING) - after.keys())


def _numbered(numbers: list[int]) -> str:
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
