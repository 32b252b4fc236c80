"""A node's part in a run over several nodes that may go on after failures: what node 0 decides is done here.

See `tutti.launch.node_leader`. Node 0 takes part in the same way.
"""

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tutti.config import serialization
from tutti.config.safe_text import plain_text
from tutti.errors import RESUMABLE, LaunchError
from tutti.job_secret import find_secret
from tutti.launch.failure import LOST_NODE, Failure, shortened
from tutti.launch.launcher import LaunchSpec, RankError
from tutti.launch.memory_folder import newest_step
from tutti.launch.network import free_port, split_address
from tutti.launch.node_leader import NodeLeader
from tutti.launch.node_link import Message, NodeLink, join
from tutti.launch.node_rendezvous import TOKEN_FILE, describe
from tutti.launch.restarts import RestartPolicy, Restarts, fitting
from tutti.launch.slots import checked_slots
from tutti.launch.supervisor import Interrupts, Outcome, Recovery, Restart
from tutti.network_interfaces import here_address
from tutti.surviving_rank import LeftBehind

_SEEN_S = 10.0
"""Seconds that a file of another host may take until it is seen in a shared folder."""

_LOOK_S = 0.1


class NodeMember:
    """This node's connection to node 0, and what node 0 has decided. See `tutti.launch.supervisor.Recovery`.

    Args:
        spec: what this node was asked to start.
        policy: how often, and with how many ranks, the run goes on.
        interrupted: the signals received so far.
        say: takes messages for the user.
        address: where node 0 listens.
        has_number: whether the number in `spec` is this node's, or node 0 gives it one.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        policy: RestartPolicy,
        interrupted: Interrupts,
        say: Callable[[str], None],
        address: tuple[str, int],
        *,
        has_number: bool,
    ) -> None:
        self._asked, self._policy, self._interrupted, self._say = spec, policy, interrupted, say
        secret = find_secret()
        number = spec.node_rank if has_number else None
        ranks, shares = spec.local_world_size, "TUTTI_SHARE_DEVICE" in spec.environment
        if policy.least_nproc is not None:
            ranks = checked_slots(policy.least_nproc, ranks, share_device=shares)
        hello = {"node": number, "host": socket.gethostname(), "ranks": ranks, **describe(spec, policy, secret)}
        self._decisions: queue.Queue[Message | None] = queue.Queue()
        self._called: Literal["", "end", "pause"] = ""
        self._link, welcome = join(address, secret, hello, spec.timeout_s, self._is_interrupted)
        self._leader_folder, self._asked = str(welcome["folder"]), replace(spec, node_rank=int(welcome["node"]))
        self._link.start(self._take)
        self._check_folder(spec.folder, str(welcome["token"]))
        self._link.send({"kind": "ready"})

    def begin(self, spec: LaunchSpec) -> LaunchSpec | Outcome:
        """Wait until node 0 starts the first generation.

        Raises:
            LaunchError: nodes that are needed did not come, or node 0 is lost.
        """
        first = self._decision(Outcome(status="completed", exit_code=0, called_off=True))  # a node without ranks
        if isinstance(first, Outcome):
            return first
        if first.message:
            self._say(first.message)
        return first.spec

    def may_restart(self, error: RankError) -> bool:
        """Return whether a restart may follow this failure of a rank; node 0 counts them."""
        return error.kind != "user"

    def called_off(self) -> Literal["", "end", "pause"]:
        """Return whether the ranks of this node are to end, or to pause with a checkpoint."""
        return self._called

    def after(
        self, spec: LaunchSpec, outcome: Outcome, written: Callable[[int], LeftBehind | None] = lambda rank: None
    ) -> Restart | Outcome:
        """Tell node 0 how the generation ended here, and return what it decides when it has heard all nodes."""
        status = "called off" if outcome.called_off else outcome.status
        failure = None if outcome.failure is None else serialization.to_data(shortened(outcome.failure))
        end = {"exit_code": outcome.exit_code, "resumable": outcome.resumable, "memory_step": newest_step(spec)}
        end["signalled"] = outcome.signal is not None
        self._link.send({"kind": "report", "status": status, "failure": failure, **end})
        return self._decision(outcome)

    def leaves(self) -> bool:
        """Return whether a signal ends this node's part only."""
        return self._policy.elastic and self._asked.node_rank > 0

    def close(self) -> None:
        """Leave: node 0 takes this node for lost, unless the run is over."""
        self._link.close()

    def _is_interrupted(self) -> bool:
        return self._interrupted.number is not None

    def _take(self, link: NodeLink, message: Message | None) -> None:
        kind = "lost" if message is None else message.get("kind")
        if kind == "note" and message is not None:
            self._say(plain_text(str(message["message"])))
        elif kind == "port":
            link.send({"kind": "port", "port": free_port()})
        elif kind in ("end", "pause") and message is not None:
            if message["message"]:
                self._say(plain_text(str(message["message"])))
            self._called = "pause" if kind == "pause" else "end"
        else:
            self._called = "end" if message is None else ""
            self._decisions.put(message)

    def _decision(self, outcome: Outcome) -> Restart | Outcome:
        """Wait for node 0; return the next generation, or the end of the run where this node's own was `outcome`."""
        while True:
            if self._interrupted.count > (outcome.signal is not None):
                number = int(self._interrupted.number or 0)
                self._link.send({"kind": "leave", "exit_code": 128 + number})
                return Outcome(status="stopped", exit_code=128 + number, signal=number)
            with contextlib.suppress(queue.Empty):
                decided = self._decisions.get(timeout=_LOOK_S)
                break
        if decided is None:
            return self._without_leader(outcome)
        if decided["kind"] == "start":
            return Restart(
                spec=self._following(decided),
                delay_s=float(decided["delay_s"]),
                message=str(decided["message"]),
                grown=bool(decided["grown"]),
            )
        if decided["refusal"]:
            raise LaunchError(plain_text(str(decided["refusal"])))
        if decided.get("left"):
            return replace(outcome, left=True)
        if decided["failure"] is None:
            return _end_elsewhere(decided) if outcome.failure is not None or outcome.called_off else outcome
        failure = serialization.from_data(Failure, decided["failure"], source="node 0's decision")
        given_up = plain_text(str(decided["given_up"]))
        return Outcome(status="failed", exit_code=failure.exit_code or 1, failure=failure, given_up=given_up)

    def _following(self, decided: Message) -> LaunchSpec:
        """Return what node 0 lets this node start, with paths as this node sees them."""
        environment = {name: value for name, value in self._asked.environment.items() if name not in decided["drop"]}
        own = str(self._asked.folder)
        for name, value in dict(decided["set"]).items():
            inside = value == self._leader_folder or value.startswith(f"{self._leader_folder}/")
            environment[name] = own + value[len(self._leader_folder) :] if inside else value
        return replace(
            self._asked,
            ranks_per_node=tuple(decided["ranks_per_node"]),
            node_rank=decided["node_rank"],
            rendezvous=decided["rendezvous"],
            environment=environment,
        )

    def _without_leader(self, outcome: Outcome) -> Outcome:
        if outcome.failure is None and not outcome.called_off:
            return outcome  # its ranks had completed, or were stopped here
        message = "node 0, which decides for all nodes, is lost: its `tutti run` has ended, or the network to it is cut"
        failure = outcome.failure or Failure(
            ranks=(0,), first=0, hosts=(self._link.address,), message=message, traceback="", exit_code=1, kind="killed",
            error=LOST_NODE,
        )  # fmt: skip
        given_up = "" if failure.message == message else message
        return Outcome(status="failed", exit_code=RESUMABLE, failure=failure, given_up=given_up)

    def _check_folder(self, folder: Path, token: str) -> None:
        """Check that this node sees node 0's run folder, which checkpoints and the record of the run are in."""
        deadline = time.monotonic() + _SEEN_S
        while True:
            with contextlib.suppress(OSError):
                if (folder / TOKEN_FILE).read_text() == token:
                    return
            if time.monotonic() > deadline or self._is_interrupted():
                break
            time.sleep(_LOOK_S)
        self._link.close()
        if self._is_interrupted():
            raise KeyboardInterrupt
        raise LaunchError(
            f"node {self._asked.node_rank} on {socket.gethostname()} does not see node 0's run folder at {folder}, and "
            "restarts go on from the checkpoints in it; name a folder that all nodes share with --folder"
        )


def _end_elsewhere(decided: Message) -> Outcome:
    """Return the end of a run that went on without ranks here, or was stopped on another node."""
    if decided["status"] == "completed":
        return Outcome(status="completed", exit_code=0)
    return Outcome(status="stopped", exit_code=int(decided["exit_code"]), resumable=bool(decided["resumable"]))


@contextlib.contextmanager
def recovering(
    spec: LaunchSpec,
    policy: RestartPolicy,
    interrupted: Interrupts,
    say: Callable[[str], None],
    grace_s: float,
    stop_at_s: float | None,
    *,
    has_number: bool = True,
) -> Iterator[Recovery | None]:
    """Yield what decides how the run goes on after failures; None where they end it.

    Args:
        spec: what was asked for on this node, with the most ranks.
        policy: how often, and with how many ranks, the run goes on.
        interrupted: the signals received so far.
        say: takes messages for the user.
        grace_s: seconds that ranks have to write a checkpoint.
        stop_at_s: Unix time at which the run ends; None: no limit.
        has_number: whether the number in `spec` is this node's, or node 0 gives it one.

    Raises:
        LaunchError: this node cannot take part in a run over several nodes.
    """
    if not policy.goes_on or spec.nodes == 1:
        fewer = (lambda failure: fitting(spec, policy)) if policy.elastic else None
        yield Restarts(policy, spec, fewer) if policy.max_restarts else None
        return
    try:
        leader = NodeLeader(spec, policy, grace_s, stop_at_s) if spec.node_rank == 0 else None
    except LaunchError as error:
        if has_number:
            raise
        raise LaunchError(
            f"{error}. If that was the same command, which began on this host at the same moment, start this one again"
        ) from None
    try:
        host, port = split_address(spec.rendezvous or "")
        address = leader.reachable if leader is not None else (here_address(host, spans_hosts=True), port)
        member = NodeMember(spec, policy, interrupted, say, address, has_number=has_number or leader is not None)
        try:
            yield member
        finally:
            member.close()
    finally:
        if leader is not None:
            leader.close()
