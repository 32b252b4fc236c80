"""A real Ray of two nodes, each in a network namespace without a route out, that asks for a token."""

import importlib.util
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from clusters.command_rig import started, state, tutti
from launch.launch_rig import wait_until
from tutti.errors import LabError
from tutti.lab import Lab
from tutti.lab.lab_network import check_possible, pids
from tutti.lab.lab_run import LabCommand

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).parent / "ray"


def without_ray() -> str:
    """Why no Ray can be started here; empty if one can."""
    if importlib.util.find_spec("ray") is None or not RAY.exists():
        return "ray is not installed"
    try:
        check_possible()
    except LabError as error:
        return str(error)
    return ""


class RayNodes:
    """The cluster: the head is node 0, from which commands are given; node 1 comes and goes."""

    def __init__(self, lab: Lab, base: Path) -> None:
        self.lab, self.base = lab, base
        self.token = secrets.token_hex(20)
        self.address = f"http://{lab.address(0)}:8265"
        self.inside = f"{lab.address(0)}:6379"  # for programs of Ray; "auto" alone finds any cluster of this machine
        self.before = ("ip", "netns", "exec", lab.record.namespace(0))
        self.printed: list[str] = []
        self._commands: dict[int, LabCommand] = {}
        self._auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        self.variables = {**self._auth, "RAY_ADDRESS": self.address, "XDG_STATE_HOME": str(base / "state")}
        head = ("--head", f"--dashboard-host={lab.address(0)}", f"--temp-dir={base}/ray")
        self._start(0, *head)
        assert wait_until(lambda: self._listens(8265), 60), self.said()
        self.join()

    def said(self) -> str:
        return "".join(self.printed)

    def _start(self, host: int, *words: str) -> None:
        path = f"{RAY.parent}:{os.environ['PATH']}"  # as in an activated environment
        self._commands[host] = self.lab.start(
            [str(RAY), "start", "--block", f"--node-ip-address={self.lab.address(host)}", "--num-cpus=2",
             "--object-store-memory=80000000", "--disable-usage-stats", *words],
            hosts=[host], cwd=self.base, sink=lambda host, stream, line: self.printed.append(line),
            environment={**self._auth, "PATH": path, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip

    def _listens(self, port: int) -> bool:
        found = subprocess.run([*self.before, "ss", "-Hltn", f"sport = :{port}"], capture_output=True, check=True)
        return bool(found.stdout.strip())

    def join(self) -> None:
        """Start node 1."""
        before = self.said().count("Ray runtime started")
        self._start(1, f"--address={self.inside}")
        assert wait_until(lambda: self.said().count("Ray runtime started") > before, 60), self.said()

    def lose(self) -> None:
        """Kill node 1's raylet, and nothing else."""
        named = {pid: psutil.Process(pid).name() for pid in self.processes(1)}
        (raylet,) = (pid for pid, name in named.items() if name == "raylet")
        os.kill(raylet, 9)

    def drain(self) -> None:
        """Announce the end of node 1, as a cloud does before it takes a machine back."""
        words = [*self.before, str(RAY), "drain-node", "--address", self.inside]
        words += ["--node-id", self._node_id(), "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        words += ["--reason-message", "spot", "--deadline-remaining-seconds", "300"]
        subprocess.run(words, env={**os.environ, **self._auth}, check=True, capture_output=True, timeout=60)

    def _node_id(self) -> str:
        script = "import ray, sys; ray.init(address='auto', logging_level='ERROR'); print(*[node['NodeID'] for node in"
        script += " ray.nodes() if node['Alive'] and node['NodeManagerAddress'] == sys.argv[1]])"
        words = [*self.before, sys.executable, "-c", script, self.lab.address(1)]
        environment = {**os.environ, **self._auth, "RAY_ADDRESS": self.inside}
        done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
        return done.stdout.split()[-1]

    def clear(self) -> None:
        """End what is left of node 1."""
        self._commands.pop(1).stop(0)

    def processes(self, host: int) -> list[int]:
        return pids(self.lab.record.namespace(host))

    def ranks(self, host: int) -> list[int]:
        """Living processes of runs on a node."""
        found = []
        for pid in self.processes(host):
            try:
                process = psutil.Process(pid)
                if "TUTTI_LAUNCH" in process.environ() or "tutti.cli.main" in process.cmdline():
                    found.append(pid)
            except psutil.Error:
                continue
        return found

    def stop(self) -> None:
        for command in self._commands.values():
            command.stop(0)

    def tutti(self, cwd: Path, *words: str, timeout_s: float = 300, **variables: str) -> tuple[int, str, str]:
        """Run a command to its end; return its exit code and what it wrote."""
        environment = {**self.variables, **variables}
        return tutti(cwd, environment, *words, timeout_s=timeout_s, before=self.before)

    @contextmanager
    def started(self, cwd: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
        with started(cwd, self.variables, *words, before=self.before) as command:
            yield command

    def state(self, cwd: Path, run: str) -> dict[str, object]:
        return state(cwd, self.variables, run, self.before)


@contextmanager
def ray_nodes(base: Path) -> Iterator[RayNodes]:
    """A cluster that is ended, with all its processes, when the context is left."""
    with Lab(2) as lab:
        nodes = RayNodes(lab, base)
        try:
            yield nodes
        finally:
            nodes.stop()
