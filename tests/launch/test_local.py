"""The launcher's own promises: the spec is checked, ranks that do not listen are ended, the environment is right."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tutti.errors import LaunchError
from tutti.launch import launch_environment
from tutti.launch.launcher import LaunchSpec
from tutti.launch.local_launcher import LocalLauncher
from tutti.launch.script_path import run_folder

DEAF = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("here").touch()
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


def test_several_nodes_may_try_one_folder_at_once(tmp_path: Path) -> None:
    """As the nodes of a run with one file system do."""
    with ThreadPoolExecutor(4) as nodes:
        tried = nodes.map(lambda node: run_folder(tmp_path / "run", None, "t", node % 4), range(2000))
        assert set(tried) == {tmp_path / "run"}
    assert list((tmp_path / "run").iterdir()) == []
