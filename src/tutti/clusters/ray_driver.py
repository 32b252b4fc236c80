"""The driver of a job on Ray: it asks for nodes, starts an agent on each, and decides how the run goes on.

A generation is a placement group with one bundle a node, all or nothing, whose agents run `tutti run`. Another
begins where a node is lost or drained, or where fewer nodes than asked for are used and others come; it goes on from
the newest checkpoint. What the driver prints is the job's log, and lines that begin with STATE say how things stand.
"""

import json
import secrets
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.clusters.cluster_job import NodeCommand
from tutti.clusters.ray_node import NodeAgent
from tutti.clusters.ray_placement import GangPlacement, StoppedError
from tutti.errors import RESUMABLE

STATE = "tutti-state "
"""Begins a line of the log with the state of the job as JSON: state, reason, nodes, and exit code at the end."""

NAMESPACE = "tutti"
"""Of the agents in Ray, by which `tutti cancel` finds them."""

EXTRA_GRACE_S = 60.0
"""Seconds that nodes have to end after a stop beyond those that ranks have to write a checkpoint."""

CANCELLED = 143
"""Exit code of a job that was ended at once."""

NODE_DIED = "its node has died, or the network to it is cut"
"""Why an agent has ended that nobody has killed. With a range of nodes it is no failure."""

_LOOK_S = 3.0
_POLL_S = 0.5
_FAILED_S = 20.0  # in which the other nodes notice by themselves that one has failed


@dataclass(slots=True)
class AgentOfNode:
    """The driver's view of one node.

    Attributes:
        call: what was asked of the agent last.
        seen, line: bytes of its output that are in the log, and the beginning of a line that is not.
        code: exit code of `tutti run`; None while it runs.
        lost: why its agent has ended, in words.
    """

    number: int
    agent: Any
    name: str = ""
    call: Any = None
    seen: int = 0
    line: bytes = b""
    code: int | None = None
    lost: str = ""

    @property
    def over(self) -> bool:
        """Whether its part has ended, one way or the other."""
        return self.code is not None or bool(self.lost)


class RefusedError(Exception):
    """The job cannot run; the sentence says why."""


class RayDriver:
    """Runs one generation after another.

    Args:
        ray: the module, which is connected.
        task: what is run; see `tutti.clusters.ray_task.task_of`.
    """

    def __init__(self, ray: Any, task: Mapping[str, Any]) -> None:
        self._ray, self._task = ray, task
        self._stopped = self._cancelled = False
        self._placement = GangPlacement(ray, task, lambda: self._stopped, lambda words: say_state("pending", words))
        self._restarts, self._number, self._begun = int(task["restarts"]), 0, False
        self._leave, self._elastic = "", task["least_nodes"] < task["nodes"]
        self._what = task["words"][0] if task["kind"] == "command" else "run"
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)

    def _stop(self, *_: object) -> None:
        self._stopped = True

    def run(self) -> int:
        """Run to the end, and return the exit code of the job."""
        while True:
            try:
                group, size = self._placement.place()
            except StoppedError:
                say_state("ended", self._not_begun(self._number), code=RESUMABLE)
                return RESUMABLE
            self._number, self._leave = self._number + 1, ""
            nodes = [AgentOfNode(number, agent) for number, agent in enumerate(self._agents(group, size))]
            try:
                again, reason, code = self._generation(nodes, self._placement.nodes_of(group))
            except RefusedError as error:
                again, reason, code = False, str(error), 2
            finally:
                self._end(nodes)
                self._ray.util.remove_placement_group(group)
            if not again:
                say_state("ended", reason, _names(nodes), code)
                return code
            say(reason)
            say_state("pending", reason)

    def _agents(self, group: Any, size: int) -> list[Any]:
        bundle = dict(self._task["bundle"])
        options = {"num_cpus": bundle.pop("CPU", 0), "num_gpus": bundle.pop("GPU", 0)}
        if "memory" in bundle:
            options["memory"] = int(bundle.pop("memory"))
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        agent = self._ray.remote(NodeAgent)
        return [
            agent.options(
                **options, resources=bundle, namespace=NAMESPACE, name=f"{self._task['job']}.{self._number}.{number}",
                scheduling_strategy=strategy(placement_group=group, placement_group_bundle_index=number),
            ).remote()
            for number in range(size)
        ]  # fmt: skip

    def _generation(self, nodes: list[AgentOfNode], places: Mapping[str, dict[str, Any]]) -> tuple[bool, str, int]:
        """Run a generation; return whether another follows, why or how it ended, and the exit code.

        Raises:
            RefusedError: a node cannot run it.
        """
        self._begin(nodes, list(places.values()))
        if not any(node.over for node in nodes):
            say_state("running", "", _names(nodes))
            self._watch(nodes, places.keys())
        return self._outcome(nodes)

    def _begin(self, nodes: list[AgentOfNode], places: list[dict[str, Any]]) -> None:
        """Start `tutti run` on all nodes."""
        answers: list[dict[str, Any]] = []
        for node in nodes:  # node 0 first: it makes the folder that the others are to see
            answer = self._asked(node, node.agent.look.remote(self._task, first=node.number == 0))
            if answer is None:
                node.lost = node.lost or ("" if node.over else "it does not answer")
                return
            node.name = answer["host"]
            answers.append(answer)
        wrong = [
            f"{node.name}: {look['problem']}" for node, look in zip(nodes, answers, strict=True) if look["problem"]
        ]
        if wrong:
            raise RefusedError(wrong[0])
        begun = all(look["begun"] for look in answers)
        if self._begun and not begun:
            raise RefusedError(
                f"{nodes[0].name} does not see what the run has written into {self._task['folder']} on another node; "
                "name a folder that all nodes share with --request folder=PATH"
            )
        self._begun = self._begun or begun
        bundle = self._task["bundle"]
        shared = any(place["Resources"].get("CPU", 0) > bundle.get("CPU", 0) for place in places)
        rendezvous, secret = f"{places[0]['NodeManagerAddress']}:{answers[0]['port']}", secrets.token_hex(32)
        for node in nodes:
            arguments = self._arguments(node.number, len(nodes), rendezvous, begun=begun, shared=shared)
            node.call = node.agent.start.remote(self._task, arguments, secret)

    def _arguments(self, number: int, count: int, rendezvous: str, *, begun: bool, shared: bool) -> list[str]:
        if self._task["kind"] == "command":
            command = NodeCommand(words=tuple(self._task["words"]), numbered=self._task["numbered"])
            return command.on_node(number, count, self._task["nproc"], rendezvous)
        found = ["run", "--on", "local", "--folder", self._task["folder"]]
        resume = self._task["folder"] if begun else self._task["resume"]
        found += ["--resume", resume] if resume else []
        if shared:  # other jobs of the node would bind their ranks to the same cores
            found += ["--bind-cores", "none"]
        if count > 1:
            found += ["--nnodes", str(count), "--node-rank", str(number), "--rendezvous", rendezvous, "--one-screen"]
        return [*found, *self._task["words"]]

    def _asked(self, node: AgentOfNode, call: Any) -> Any:
        """Return an agent's answer, or None if it has ended; then its node is lost."""
        errors = self._ray.exceptions
        while True:
            try:
                return self._ray.get(call, timeout=_POLL_S)
            except errors.GetTimeoutError:
                if self._stopped:
                    node.code = RESUMABLE
                    return None
            except errors.ActorUnavailableError:
                time.sleep(_POLL_S)
                return None  # asked again, until Ray knows whether it lives
            except errors.RayActorError as error:
                node.lost = lost_because(str(error))
                return None
            except errors.RayTaskError as error:
                raise RefusedError(
                    f"the agent on {node.name or f'node {node.number}'} failed ({_last_line(error)})"
                ) from None

    def _watch(self, nodes: list[AgentOfNode], ids: Collection[str]) -> None:
        """Watch the nodes to their end."""
        deadline, looked_at, told = float("inf"), time.monotonic(), ""
        calm_since = looked_at
        while not all(node.over for node in nodes):
            waiting = {node.call: node for node in nodes if not node.over}
            ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=_POLL_S)
            for call in ready:
                self._take(waiting[call], told)
            now = time.monotonic()
            if told == "" and (self._stopped or self._leave):
                told, deadline = "stop", now + self._task["grace_s"] + EXTRA_GRACE_S
                say_state("running", self._leave or "it was told to stop: ranks write a checkpoint", _names(nodes))
            if any(node.over for node in nodes) and deadline == float("inf"):
                bad = any(node.lost or node.code not in (0, RESUMABLE) for node in nodes if node.over)
                deadline = now + (_FAILED_S if bad else self._task["grace_s"] + EXTRA_GRACE_S)
            if any(node.lost for node in nodes) and (self._restarts or self._elastic):
                deadline = min(deadline, now)  # they would wait for the lost node, which comes with the next generation
            if now > deadline:
                told = "kill"
            if now > looked_at + _LOOK_S and not told:
                looked_at = now
                if self._placement.leaving() & set(ids):
                    self._leave = "a node is being drained: ranks write a checkpoint, and go on on other nodes"
                elif len(nodes) == self._task["nodes"] or not self._placement.further(ids):
                    calm_since = now
                elif now > calm_since + self._task["grow_s"]:
                    self._leave = "nodes have been added: ranks write a checkpoint, and go on on more nodes"

    def _take(self, node: AgentOfNode, command: str) -> None:
        """Take what an agent has answered, and ask it again."""
        answer = self._asked(node, node.call)
        if isinstance(answer, dict):
            data: bytes = answer["output"]
            node.seen += len(data)
            *lines, node.line = (node.line + data).split(b"\n")
            node.code = answer["code"]
            if node.code is not None and node.line:
                lines.append(node.line)
            prefix = f"[node {node.number}] ".encode() if node.number else b""
            sys.stdout.buffer.write(b"".join(prefix + line + b"\n" for line in lines))
            sys.stdout.buffer.flush()
            self._cancelled |= answer["cancelled"]
        if not node.over:
            node.call = node.agent.poll.remote(node.seen, command, _POLL_S)

    def _outcome(self, nodes: list[AgentOfNode]) -> tuple[bool, str, int]:
        """Return whether another generation follows, why or how this one ended, and the exit code."""
        codes = [node.code for node in nodes if node.code is not None]
        if self._cancelled:
            return False, "cancelled by `tutti cancel`", CANCELLED
        lost = next((node for node in nodes if node.lost), None)
        bad = next((node for node in nodes if node.code is not None and node.code > 0 and node.code != RESUMABLE), None)
        killed = next((node for node in nodes if node.code is not None and node.code < 0), None)
        if lost is not None:
            counts = lost.lost != NODE_DIED or not self._elastic
            return self._after_loss(f"{lost.name or f'node {lost.number}'} was lost ({lost.lost})", counts=counts)
        if bad is not None and bad.code is not None:
            return False, f"`tutti {self._what}` on {bad.name} ended with exit code {bad.code}", bad.code
        if killed is not None and killed.code is not None:
            words = f"`tutti {self._what}` on {killed.name} was killed by signal {-killed.code}"
            if self._stopped or self._leave:
                return False, f"{words}, because it did not end in time", 128 - killed.code
            return self._after_loss(f"{words}; does its node lack memory?", counts=True)
        if RESUMABLE in codes and self._leave and not self._stopped:
            return True, self._leave, 0
        if RESUMABLE in codes and all(node.call is None for node in nodes):
            return False, self._not_begun(self._number - 1), RESUMABLE
        return False, "it stopped with a checkpoint" if RESUMABLE in codes else "", max(codes)

    def _not_begun(self, before: int) -> str:
        """Say that it was stopped while nodes were got ready, after a number of generations."""
        return f"it was stopped before it {'went on' if before else 'began'}"

    def _after_loss(self, words: str, *, counts: bool) -> tuple[bool, str, int]:
        if (self._restarts or not counts) and not self._stopped:
            self._restarts -= counts
            return True, f"{words}; the run goes on from its newest checkpoint", 0
        return False, f"{words}; --max-restarts N lets the run go on from its newest checkpoint", 1

    def _end(self, nodes: list[AgentOfNode]) -> None:
        """End what still runs on nodes that answer, so that nothing of it writes beside the next generation."""
        calls = [
            node.agent.poll.remote(node.seen, "kill", 0.0) for node in nodes if node.call is not None and not node.over
        ]
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=_FAILED_S)


def _names(nodes: list[AgentOfNode]) -> list[str]:
    return [node.name for node in nodes]


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[-1]


def lost_because(said: str) -> str:
    """Return why an agent has ended, in words.

    Args:
        said: Ray's report.
    """
    text = " ".join(said.split())
    if "memory" in text and ("OOM" in text or "low on memory" in text):
        return "Ray killed its worker because the node ran out of memory: ask for more with --request memory=SIZE"
    if "node has died" in text or "node was terminated" in text or "raylet" in text:
        return NODE_DIED
    if "runtime_env" in text or "runtime environment" in text:
        return f"Ray could not prepare its environment: {text[-300:]}"
    return f"its worker was killed: {text[-200:]}"


def say(words: str) -> None:
    """Write a sentence of the driver's own into the log."""
    print(f"tutti: {words}", flush=True)


def say_state(state: str, reason: str = "", nodes: Sequence[str] = (), code: int | None = None) -> None:
    """Write how things stand into the log."""
    about = {"state": state, "reason": reason, "nodes": ",".join(filter(None, nodes)), "code": code}
    print(f"{STATE}{json.dumps(about)}", flush=True)


def _cancel(ray: Any, job: str) -> None:
    """End the agents of a job at once."""
    found = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]
    agents = [ray.get_actor(name, namespace=NAMESPACE) for name in found if name.startswith(f"{job}.")]
    calls = [agent.cancel.remote() for agent in agents]
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=_FAILED_S)


def main(arguments: Sequence[str]) -> None:
    """Run a job whose task is the only argument as JSON, or with "cancel JOB" end another."""
    import ray
    import ray.util.scheduling_strategies

    ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    if arguments[0] == "cancel":
        _cancel(ray, arguments[1])
        return
    code = RayDriver(ray, json.loads(arguments[0])).run()
    sys.stdout.flush()
    sys.exit(code)
