"""Who takes part in a run over several nodes: node 0's `tutti run` lets nodes in, numbers them, and knows who is there.

See `tutti.launch.node_leader`, which decides what they start.
"""

import contextlib
import math
import queue
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tutti.config.safe_text import plain_text
from tutti.errors import LaunchError
from tutti.job_secret import find_secret, mac
from tutti.launch.launcher import LaunchSpec
from tutti.launch.network import split_address
from tutti.launch.node_link import LOST_S, Message, NodeLink, admit
from tutti.launch.restarts import RestartPolicy
from tutti.network_interfaces import here_address

TOKEN_FILE = ".nodes"
"""The file in the run folder by which nodes see that they share it."""

_MOST_UNPROVED = 64
"""Connections that may be about to prove the secret at once."""

_LEFT_S = LOST_S + 2
"""Seconds that a node waits for the place of one that may be lost, before it is refused."""

_LOOK_S = 0.2

NodeEvents = queue.Queue[tuple[NodeLink, Message | None]]


@dataclass(slots=True)
class Node:
    """A node that is connected.

    Attributes:
        number: the number that it was started with.
        capacity: how many ranks it may have.
        told: whether it knows why the next generation follows.
        is_new: whether nobody has looked yet for ranks that it may get.
        leaves: whether it was told to stop, and the others go on without it.
        came_s: when it came, on the monotonic clock.
        report: how the current generation ended there; None while it runs.
    """

    number: int
    link: NodeLink
    host: str
    capacity: int
    told: bool = False
    is_new: bool = True
    leaves: bool = False
    came_s: float = field(default_factory=time.monotonic)
    report: Message | None = None

    @property
    def words(self) -> str:
        return f"node {self.number} on {self.host}"


class NodeRendezvous:
    """Listens at the rendezvous, and lets nodes in that know the secret and were started by the same command.

    Args:
        spec: what node 0 was asked to start.
        policy: how often, and with how many ranks, the run goes on.
        events: takes the links of nodes, and what they say of themselves.
    """

    def __init__(self, spec: LaunchSpec, policy: RestartPolicy, events: "NodeEvents") -> None:
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
        threading.Thread(target=self._listen, name="tutti node rendezvous", daemon=True).start()

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
        number, ranks = hello.get("node"), hello.get("ranks")
        who = f"the node on {hello.get('host')}" if number is None else f"node {number} on {hello.get('host')}"
        numbered = isinstance(number, int) and 0 <= number < self._spec.nodes
        if not numbered and not (number is None and self._policy.elastic):
            return f"{who} has no place among {self._spec.nodes} nodes; give all nodes the same --nnodes"
        if not isinstance(ranks, int) or not 0 < ranks <= max(self._spec.ranks_per_node):
            most = max(self._spec.ranks_per_node)
            return f"{who} would have {ranks} ranks, and node 0 allows 1 to {most}; give all nodes the same --nproc"
        for name, value in describe(self._spec, self._policy, self._secret).items():
            if hello.get(name) != value:
                differs = f"with {name} {hello.get(name)}, and node 0 with {value}"
                differs = "with other arguments of the script than node 0" if name == "arguments" else differs
                return f"{who} was started {differs}; give all nodes the same command, except for --node-rank"
        return ""


class NodeTable:
    """The nodes that are connected, and those that are about to be.

    Args:
        spec: what node 0 was asked to start.
        token: shows nodes that they see the same run folder.

    Attributes:
        nodes: those that take part, by number.
    """

    def __init__(self, spec: LaunchSpec, token: str) -> None:
        self._spec, self._token = spec, token
        self.nodes: dict[int, Node] = {}
        self._coming: list[Node] = []  # those that have not seen the run folder yet
        self._queued: list[tuple[float, NodeLink, Message]] = []  # until when they wait for a place that is taken

    @property
    def room(self) -> int:
        """How many ranks the nodes may have."""
        return sum(node.capacity for node in self.nodes.values())

    @property
    def missing(self) -> list[int]:
        return [number for number in range(self._spec.nodes) if number not in self.nodes]

    @property
    def last_came_s(self) -> float:
        return max((node.came_s for node in self.nodes.values()), default=-math.inf)

    def of_link(self, link: NodeLink) -> Node | None:
        """Return the node at the other side of a link."""
        return next((one for one in [*self.nodes.values(), *self._coming] if one.link is link), None)

    def queue(self, link: NodeLink, hello: Message) -> None:
        """Let a node wait for its place."""
        self._queued.append((time.monotonic() + _LEFT_S, link, hello))

    def forget(self, link: NodeLink) -> None:
        """Take a node that waits for its place as gone."""
        self._queued = [one for one in self._queued if one[1] is not link]

    def let_in(self) -> None:
        """Let in nodes whose place is free; refuse them where it stays taken by a node that lives."""
        for until, link, hello in [*self._queued]:
            host, asked = plain_text(str(hello["host"])), hello["node"]
            number = self._free() if asked is None else int(asked)
            taken = number is None or number in self.nodes
            if taken and time.monotonic() < until:
                continue
            self._queued.remove((until, link, hello))
            if number is not None and not taken:
                welcome = {"kind": "welcome", "folder": str(self._spec.folder), "token": self._token}
                if link.send({**welcome, "node": number}):
                    self._coming.append(Node(number, link, host, int(hello["ranks"])))
                continue
            if number is None:
                refusal = f"all {self._spec.nodes} nodes are there, so the one on {host} cannot take part"
                link.send({"refusal": f"{refusal}; end one of them, or start all with a larger --nnodes"})
            else:
                refusal = (
                    f"node {number} on {host} cannot take part, as node {number} runs on {self.nodes[number].host}"
                )
                link.send({"refusal": f"{refusal} already; end that one, or correct --node-rank"})
            link.close()

    def _free(self) -> int | None:
        taken = self.nodes.keys() | {node.number for node in self._coming}
        return next((number for number in range(1, self._spec.nodes) if number not in taken), None)

    def begin(self, node: Node, *, is_ready: bool) -> bool:
        """Take a node that is about to be connected as one that takes part, if it sees the run folder.

        Returns:
            False if it takes part already.
        """
        if node not in self._coming:
            return False
        self._coming.remove(node)
        if is_ready and node.number not in self.nodes:
            self.nodes[node.number] = node
        else:
            node.link.close()
        return True

    def tell(self, words: str) -> None:
        """Say what the run waits for to the nodes that do not know it yet."""
        for node in self.nodes.values():
            if not node.told:
                node.link.send({"kind": "note", "message": words})
                node.told = True

    def close(self) -> None:
        """Close all links."""
        for link in [*(node.link for node in (*self.nodes.values(), *self._coming)), *(q[1] for q in self._queued)]:
            link.close()


def describe(spec: LaunchSpec, policy: RestartPolicy, secret: bytes) -> dict[str, Any]:
    """Return what must be the same in the commands of all nodes, by the option's name; of arguments only a code."""
    least_nodes, least_nproc = policy.least_nodes, policy.least_nproc
    return {
        "--nnodes": spec.nodes if least_nodes is None else f"{least_nodes}:{spec.nodes}",
        "--nproc": list(spec.ranks_per_node) if least_nproc is None else f"{least_nproc}:{spec.ranks_per_node[0]}",
        "script": spec.target.rpartition("/")[2],
        "arguments": mac(secret, "arguments", list(spec.arguments)).hex(),
        "--max-restarts": policy.max_restarts,
        "--min-ranks": policy.min_ranks,
        "--on-failure": policy.on_failure,
        "--memory-checkpoint-every": spec.environment.get("TUTTI_MEMORY_CHECKPOINT_EVERY"),
    }
