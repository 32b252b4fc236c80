"""Jobs of Ray without a cluster: what would be submitted, what is refused, and how states and nodes are read."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from clusters.command_rig import tutti
from launch.launch_rig import SCRIPTS, free_port, wait_until
from tutti.clusters.cluster_job import JobRecord, JobRequest, write_record
from tutti.clusters.local_files import packed_files
from tutti.clusters.profile_file import with_requests
from tutti.clusters.ray_api import RayCluster, RayJobInfo, checked_address, last_state, printed, refused
from tutti.clusters.ray_driver import AgentOfNode, RayDriver, lost_because
from tutti.clusters.ray_jobs import RayJobs, status_of
from tutti.clusters.ray_placement import described
from tutti.clusters.ray_task import read_ray_settings, task_of
from tutti.environment import ray_address
from tutti.errors import LaunchError

TRAIN = str(SCRIPTS / "train.py")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("import tutti\n")
    return folder


def test_the_job_is_shown_and_nothing_is_made(project: Path) -> None:
    profile = (
        '[run]\non = "ray"\nnnodes = "2:3"\n[ray]\naddress = "head:8265"\nfolder = "/disk"\nsetup = ["module load x"]\n'
    )
    (project / "tutti.toml").write_text(profile + 'gpus = 2\nmemory = "1.5GiB"\nresources = { fast = 1 }\n')
    request = ("--request", "cpus=8,exclude=data/,*.bin,env=A:1,B:2")
    code, out, err = tutti(
        project, {}, "submit", "--dry-run", *request, "--nproc", "2", str(project / "train.py"), "--at", f"{project}/x"
    )
    assert code == 0, err
    assert not (project / "runs").exists()
    shown = json.loads(out)
    assert shown["address"] == "http://head:8265"
    bundle = {"CPU": 8, "GPU": 2, "memory": 1.5 * 2**30, "fast": 1}
    assert shown["placement_group"] == {"strategy": "STRICT_SPREAD", "bundles": [bundle] * 3}
    made = shown["runtime_env"]
    assert made["working_dir"] == str(project)
    assert made["excludes"][-2:] == ["data/", "*.bin"]
    assert Path(made["py_modules"][0]).name == "tutti"
    assert made["env_vars"] == {"A": "1", "B": "2", "RAY_JOB_STOP_WAIT_TIME_S": "120"}
    task = shown["entrypoint"][-1]
    assert task["words"] == ["--nproc", "2", "train.py", "--at", "x"], "paths are those of the copy"
    assert (task["nodes"], task["least_nodes"], task["threads"]) == (3, 2, 4)
    assert task["folder"] == f"/disk/{task['job']}"
    # Without a folder in the cluster, nodes see this machine's, and run in this directory.
    (project / "tutti.toml").unlink()
    code, out, err = tutti(
        project, {"RAY_ADDRESS": "other:1"}, "submit", "--on", "ray", "--dry-run", "--nproc", "2", TRAIN
    )
    assert code == 0, err
    shown = json.loads(out)
    assert shown["address"] == "http://other:1"
    assert "working_dir" not in shown["runtime_env"]
    assert shown["entrypoint"][-1]["directory"] == str(project)


@pytest.mark.parametrize(
    ("requests", "words", "nproc", "said"),
    [
        (["speed=9"], (), (1, 1), "ray has no setting 'speed'; settings are address, cpus"),
        (["sync=git"], (), (1, 1), "ray setting sync: Input should be 'upload' or 'none'"),
        (["memory=much"], (), (1, 1), "ray setting memory"),
        (["resources=fast:0"], (), (1, 1), "ray setting resources.fast"),
        (["env=TUTTI_SECRET:x"], (), (1, 1), "TUTTI_SECRET is made for each run; leave it out"),
        (["sync=upload,directory=/x"], (), (1, 1), "directory=/x names another; leave one out"),
        ([], ("--mesh", "replicate=2"), (1,), "--mesh fixes the number of ranks"),
        ([], ("--plan=p.json",), (1,), "--plan fixes the number of ranks"),
        ([], (), None, "say how many ranks a node has with --nproc N"),
    ],
)
def test_refusals(requests: list[str], words: tuple[str, ...], nproc: tuple[int, ...] | None, said: str) -> None:
    request = JobRequest(
        name="x", folder=Path("/run"), directory=Path("/here"), words=(*words, "x.py", "--mesh", "3"), script="x.py",
        nodes=2, least_nodes=1, nproc=nproc, settings=with_requests({}, requests),
    )  # fmt: skip

    def checked() -> None:
        RayJobs().check_range(request)
        task_of(request, read_ray_settings(request.settings), "job")

    with pytest.raises(LaunchError) as refusal:
        checked()
    assert said in str(refusal.value)


@pytest.mark.parametrize("text", ["auto", "ray://head:10001", "local", "head", "http://", "head:99999"])
def test_what_is_no_dashboard(text: str) -> None:
    with pytest.raises(LaunchError, match="name it with --request address=http://HOST:8265"):
        checked_address(text)


def test_a_cluster_that_is_not_there(project: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    code, _, err = tutti(project, {"RAY_ADDRESS": address}, "submit", "--on", "ray", "--nproc", "1", TRAIN)
    assert code == 2
    assert err.startswith(f"tutti: the Ray cluster at {address} cannot be reached (Connection refused); start it")
    assert len(err.splitlines()) == 1, "one sentence"


def test_a_run_may_go_on_where_its_earlier_cluster_does_not_answer(project: Path) -> None:
    old, new = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    (project / "run").mkdir()
    write_record(
        project / "run", JobRecord(scheduler="ray", job="x", name="x", nodes=1, nproc=None, submitted_utc="", log="")
    )
    (project / "state/tutti/ray").mkdir(parents=True)
    about = {"address": f"http://{old}", "inside": "", "log": "x"}
    (project / "state/tutti/ray/x.json").write_text(json.dumps(about))
    words = ("submit", "--on", "ray", "--folder", "run", "--nproc", "1", TRAIN)
    code, _, err = tutti(project, {"RAY_ADDRESS": new, "XDG_STATE_HOME": str(project / "state")}, *words)
    assert code == 2
    warning, refusal = err.splitlines()
    unknown = "whether the earlier job of run has ended is not known"
    assert warning.startswith(f"{unknown}: the Ray cluster at http://{old} cannot be reached")
    assert refusal.startswith(f"tutti: the Ray cluster at http://{new} cannot be reached")


class Dashboard(BaseHTTPRequestHandler):
    """What Ray's client asks a dashboard for when it is made."""

    def do_GET(self) -> None:
        body = json.dumps(
            {"version": "4", "ray_version": ray.__version__, "ray_commit": "", "session_name": ""}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize("user", [None, "http://other:1"])
def test_one_cluster_does_not_become_the_address_of_the_next(monkeypatch: pytest.MonkeyPatch, user: str | None) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    if user is not None:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", user)
    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            made = RayCluster(address)
        finally:
            server.shutdown()
            thread.join()
    assert made._client.get_address() == address
    assert ray_address() == (user or ""), "what the user's variables say"


@pytest.mark.parametrize(
    ("before", "said"), [(0, "it was stopped before it began"), (1, "it was stopped before it went on")]
)
def test_a_stop_while_nodes_are_asked_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch, before: int, said: str) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def never(*_: object, **__: object) -> None:
        driver._stop()
        raise ray.exceptions.GetTimeoutError

    silent = SimpleNamespace(look=SimpleNamespace(remote=lambda *_, **__: None))
    task = {"bundle": {}, "restarts": 0, "least_nodes": 2, "nodes": 2, "kind": "seen", "words": []}
    driver = RayDriver(SimpleNamespace(get=never, exceptions=ray.exceptions), task)
    driver._number = before + 1
    nodes = [AgentOfNode(number, silent) for number in range(2)]
    assert driver._generation(nodes, {}) == (False, said, 75)


def told(state: str, reason: str = "", code: int | None = None) -> dict[str, object]:
    return {"state": state, "reason": reason, "nodes": "a,b", "code": code}


@pytest.mark.parametrize(
    ("status", "code", "about", "cancelled", "expected"),
    [
        ("PENDING", None, {}, False, ("pending", "Ray starts its driver", None)),
        ("RUNNING", None, {}, False, ("pending", "its driver asks for nodes", None)),
        ("RUNNING", None, told("pending", "it waits"), False, ("pending", "it waits", None)),
        ("RUNNING", None, told("running"), False, ("running", "", None)),
        ("SUCCEEDED", 0, told("ended", "", 0), False, ("completed", "", 0)),
        ("FAILED", 1, told("ended", "a was lost", 1), False, ("failed", "a was lost", 1)),
        ("STOPPED", None, told("ended", "stopped", 75), False, ("cancelled", "stopped", 75)),
        ("FAILED", 75, told("ended", "stopped", 75), False, ("cancelled", "stopped", 75)),
        ("FAILED", 143, told("ended", "x", 143), True, ("cancelled", "cancelled by `tutti cancel`", 143)),
        ("STOPPED", None, told("running"), True, ("cancelled", "cancelled by `tutti cancel`", 143)),
        ("FAILED", 1, {}, False, ("failed", "python has no torch", 1)),
        ("FAILED", None, told("running"), False, ("failed", "python has no torch", 1)),
    ],
)
def test_states(
    status: str, code: int | None, about: dict[str, object], cancelled: bool, expected: tuple[str, str, int | None]
) -> None:
    info = RayJobInfo(status=status, message="x\ntutti: python has no torch\n", exit_code=code, runtime_env={})
    found = status_of(info, about, cancelled=cancelled)
    assert (found.state, found.reason, found.exit_code) == expected


def test_the_log_is_for_people_and_for_states() -> None:
    log = 'tutti-state {"state": "pending"}\nepoch 0\nRunning entrypoint for job x: python\n'
    log += 'tutti-state {"state": "running"}\nend'
    assert printed(log) == "epoch 0\nend"
    assert last_state(log) == {"state": "running"}
    assert last_state("epoch 0\n") == {}


def test_words() -> None:
    assert described({"CPU": 4.0, "memory": 2**30}) == "4 CPU, 1 GiB memory"
    assert described({"CPU": 4.0}, {"GPU": 1.0}) == "0 GPU"
    assert "ask for more with --request memory=SIZE" in lost_because("Worker killed: node low on memory (OOM)")
    assert lost_because("The actor died because its node has died.") == "its node has died, or the network to it is cut"
    assert refused("bad", "2.60.0", "2.52.0").endswith("has Ray 2.60.0 and the cluster 2.52.0: install that one here")


AGENT = """\
import json, os, sys, time
from tutti.clusters.ray_node import NodeAgent

agent, task = NodeAgent(), json.loads(sys.argv[1])
print(json.dumps([agent.look(task, first=number == 0)["problem"] for number in range(2)]), flush=True)
agent.start({**task, "python": sys.argv[2]}, ["run", "x"], "the secret")
output, command = b"", sys.argv[3]
while True:
    answer = agent.poll(len(output), command if output.count(b"\\n") > 2 else "", 0.2)
    output += answer["output"]
    if answer["code"] is not None:
        break
print(json.dumps([output.decode(), answer["code"]]), flush=True)
"""

PYTHON = """\
#!/bin/sh
tr '\\0' ' ' < /proc/$$/cmdline; echo
echo $TUTTI_SECRET ${OMP_NUM_THREADS-none} $MORE $$
[ "$5" != --plan ] || { cat "$6"; echo; }
exec sleep 60
"""


def agent_task(folder: Path, **other: object) -> dict[str, object]:
    task = {"job": "x", "kind": "inside", "folder": str(folder), "directory": "", "threads": 3, "keeps_threads": False}
    return {**task, "python": "", "setup": ["export MORE='a b'"], **other}


def agent(tmp_path: Path, task: dict[str, object], command: str) -> "subprocess.Popen[str]":
    (python := tmp_path / "python").write_text(PYTHON)
    python.chmod(0o755)
    words = [sys.executable, "-c", AGENT, json.dumps(task), str(python), command]
    environment = {**os.environ, "OMP_NUM_THREADS": "64"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)


@pytest.mark.parametrize(("command", "code"), [("stop", 75), ("kill", -signal.SIGKILL)])
def test_an_agent_starts_and_ends_what_it_is_told(tmp_path: Path, command: str, code: int) -> None:
    (tmp_path / "plan.json").write_text("the plan")
    _, files = packed_files(["--plan", "plan.json"], "", tmp_path)
    with agent(tmp_path, agent_task(tmp_path / "disk/run", files=files), command) as process:
        out, _ = process.communicate(timeout=30)
    problems, (output, ended) = map(json.loads, out.splitlines())
    assert problems == ["", ""]
    line, environment, plan = output.splitlines()
    assert plan == "the plan"
    assert "the secret" not in line
    found = re.search(r"-u -m tutti.cli.main run --plan (\S+/plan.json) x $", line)
    assert found is not None, line
    assert not Path(found[1]).parent.exists(), "it is removed with the end"
    assert environment.startswith("the secret 3 a b ")
    assert ended == code


def test_what_an_agent_has_started_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with agent(tmp_path, agent_task(tmp_path / "run"), "") as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert wait_until(lambda: "sleep" in [child.name() for child in psutil.Process(process.pid).children()])
            (child,) = psutil.Process(process.pid).children()
        finally:
            process.kill()
    assert wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 10)


def test_an_agent_says_what_its_node_lacks(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    script = "import json, sys; from tutti.clusters.ray_node import NodeAgent\n"
    script += "for task in json.loads(sys.argv[1]): print(NodeAgent().look(task, first=True)['problem'])"
    tasks = [
        agent_task(tmp_path / "run", kind="seen"),
        agent_task(Path("/proc/run")),
        agent_task(tmp_path / "run", directory="/nowhere"),
        agent_task(tmp_path / "run", setup=[], python="/usr/bin/false"),
        agent_task(tmp_path / "run", setup=[]),
    ]
    out = subprocess.run([sys.executable, "-c", script, json.dumps(tasks)], capture_output=True, text=True, check=True)
    expected = (
        "it does not see the run folder",
        "it cannot use the run folder /proc/run",
        "it does not see the directory /nowhere",
        "/usr/bin/false cannot be started there",
        "",
    )
    for said, words in zip(out.stdout.splitlines(), expected, strict=True):
        assert said.startswith(words)
        assert bool(said) == bool(words)
