"""The launcher's own promises: the spec is checked, ranks that do not listen are ended, the environment is right."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tutti.errors import LaunchError
from tutti.launch import launch_environment, process_tree
from tutti.launch.launcher import LaunchSpec
from tutti.launch.local_launcher import LocalLauncher
from tutti.launch.script_path import begins_again, run_folder

DEAF = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("here").touch()
time.sleep(600)
"""


DAEMON = """
import pathlib, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path("pid").write_text(str(child.pid))
time.sleep(600)
"""


def test_a_rank_that_does_not_listen_is_ended_by_force(tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text(DEAF.replace('"here"', repr(str(tmp_path / "here"))))
    handle = LocalLauncher().start(LaunchSpec(target=str(script), folder=tmp_path / "run"))
    deadline = time.monotonic() + 30
    while not (tmp_path / "here").exists() and time.monotonic() < deadline:
        assert handle.wait(0.05) == {}
    handle.stop(0.3)
    assert handle.wait(5) == {0: -9}
    handle.stop(0.3)


REFUSED = """
import psutil
from tutti.launch.local_launcher import warming
try:
    with warming():
        print(len(psutil.Process().children()) > 0)
        raise ValueError
except ValueError:
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    print([command for command in commands if "forkserver import main" in command])
"""


def test_what_is_refused_leaves_no_server_that_goes_on_importing() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n[]\n"


def test_a_child_in_a_session_of_its_own_ends_with_a_rank_that_was_killed(tmp_path: Path) -> None:
    script, file = tmp_path / "daemon.py", tmp_path / "pid"
    script.write_text(DAEMON.replace('"pid"', repr(str(file))))
    handle = LocalLauncher().start(LaunchSpec(target=str(script), folder=tmp_path / "run"))
    deadline = time.monotonic() + 30
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(handle.pids()[0], signal.SIGKILL)
    assert handle.wait(5) == {0: -9}
    handle.stop(0)
    deadline = time.monotonic() + 5
    while process_tree.is_alive(int(file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process_tree.is_alive(int(file.read_text()))


def test_ranks_of_a_node_follow_those_of_the_nodes_before_it() -> None:
    spec = LaunchSpec(target="t.py", folder=Path("/r"), ranks_per_node=(2, 1, 3), node_rank=2, rendezvous="a:1")
    assert (spec.world_size, spec.first_rank, list(spec.ranks)) == (6, 3, [3, 4, 5])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ranks_per_node": (2, 0)}, "1 rank or more"),
        ({"ranks_per_node": (1, 1)}, "need a rendezvous"),
        ({"node_rank": 1}, "from 0 to 0"),
    ],
)
def test_a_spec_that_cannot_be_started_is_refused(changed: dict[str, object], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        LaunchSpec(target="t.py", folder=Path("/r"), **changed)  # type: ignore[arg-type]


def test_what_ranks_find_in_their_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    one = launch_environment.of_node(
        LaunchSpec(target="t", folder=Path("/r"), ranks_per_node=(2,), threads=3), tmp_path
    )
    assert one["TUTTI_RENDEZVOUS"] == f"file://{tmp_path}/store", "one node needs no port"
    assert (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["OMP_NUM_THREADS"]) == ("2", "2", "3")
    assert one["GLOO_SOCKET_IFNAME"] == "lo"
    spec = LaunchSpec(
        target="t", folder=Path("/r"), ranks_per_node=(2, 1), node_rank=1, rendezvous="127.0.0.1:29500",
        environment={"TUTTI_PLAN": "/p.json"},
    )  # fmt: skip
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine0")
    two = launch_environment.of_node(spec, tmp_path)
    assert two["TUTTI_RENDEZVOUS"] == "tcp://127.0.0.1:29500"
    assert (two["WORLD_SIZE"], two["LOCAL_WORLD_SIZE"], two["NODE_RANK"]) == ("3", "1", "1")
    assert two["TUTTI_PLAN"] == "/p.json"
    assert "GLOO_SOCKET_IFNAME" not in two, "the user's own choice is kept"


def test_threads_are_shared_out_unless_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_environment, "granted_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [launch_environment.threads_per_rank(ranks) for ranks in (1, 3, 8, 9)] == [8, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch_environment.threads_per_rank(8) == 5


@pytest.mark.parametrize(("text", "cores"), [("max 100000\n", None), ("250000 100000\n", 2.5), ("", None)])
def test_the_control_group_bounds_the_cores(tmp_path: Path, text: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert launch_environment._cgroup_quota(tmp_path / "cpu.max") == cores
    assert launch_environment._cgroup_quota(tmp_path / "absent") is None


def test_a_resumed_run_goes_on_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old = tmp_path / "old"
    (old / "checkpoints/step-00000004").mkdir(parents=True)
    (old / "checkpoints/step-00000004/index.json").touch()
    (old / "run.json").touch()
    assert run_folder(None, Path("old"), "t") == old
    assert run_folder(old, old / "checkpoints/step-00000004", "t") == old
    assert run_folder(None, old / "checkpoints/step-00000004", "t").parent == tmp_path / "runs"
    with pytest.raises(LaunchError, match="already holds a run"):
        run_folder(old, None, "t")
    first, second = run_folder(None, None, "t"), run_folder(None, None, "t")
    assert first != second
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="--folder"):
        run_folder(tmp_path / "file/inside", None, "t")


@pytest.mark.parametrize(
    ("rows", "again"),
    [
        ([], True),
        ([{"kind": "start"}, {"kind": "step", "step": 3}], True),
        ([{"kind": "start"}, {"kind": "end", "status": "stopped"}], True),
        ([{"kind": "start"}, {"kind": "end", "status": "failed"}, {"kind": "start"}], True),
        ([{"kind": "start"}, {"kind": "end", "status": "completed"}], False),
    ],
)
def test_a_run_that_ended_before_its_first_checkpoint_begins_again(
    tmp_path: Path, rows: list[dict[str, object]], again: bool
) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert begins_again(tmp_path) is again
    if again:
        assert run_folder(tmp_path, None, "t") == tmp_path
    (tmp_path / "checkpoints/step-00000004").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000004/index.json").touch()
    assert not begins_again(tmp_path)


def test_a_run_that_still_runs_is_not_begun_again(tmp_path: Path) -> None:
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    (tmp_path / "run.json").write_text(json.dumps({"ranks": [here]}))
    with pytest.raises(LaunchError, match=f"still runs on this host .process {os.getpid()}"):
        begins_again(tmp_path)
    os.utime(tmp_path / "run.json", (1, 1))  # this process is younger, so it only has the number of an old one
    assert begins_again(tmp_path)


def test_several_nodes_may_try_one_folder_at_once(tmp_path: Path) -> None:
    """As the nodes of a run with one file system do."""
    with ThreadPoolExecutor(4) as nodes:
        tried = nodes.map(lambda node: run_folder(tmp_path / "run", None, "t", node % 4), range(2000))
        assert set(tried) == {tmp_path / "run"}
    assert list((tmp_path / "run").iterdir()) == []
