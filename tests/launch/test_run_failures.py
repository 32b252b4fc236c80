"""Every way a run can fail: one clear sentence, the right exit code, and no process left behind."""

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from launch_rig import SCRIPTS, TUTTI, running, tutti_run, wait_until

import tutti
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan

ACT = str(SCRIPTS / "act.py")


def test_an_exception_on_one_rank_is_shown_once_with_rank_and_host(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "3", ACT, "raise", "1")
    assert done.code == 1
    assert f"rank 1 on host {socket.gethostname()} failed:" in done.err
    assert (done.out + done.err).count("ValueError: boom in user code") == 1
    assert (done.out + done.err).count("Traceback") == 1
    assert "in deeper" in done.err, "the user's own frames are shown"
    assert "runpy" not in done.err
    assert "rank_main" not in done.err
    assert [done.error(rank)["kind"] for rank in range(3)] == ["peer", "exception", "peer"]
    afterwards = tutti.why(done.folder)
    failed = f"rank 1 on host {socket.gethostname()} failed: ValueError: boom in user code"
    assert (afterwards.status, afterwards.message) == ("ended", f"the run has ended after step 0: {failed}")
    (done.folder / "failure.json").unlink()
    assert "has not come" not in tutti.why(done.folder).message, "of ranks that are gone that is not known"


def test_the_output_of_every_rank_is_kept_and_that_of_rank_0_shown(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "2", ACT, "raise", "1")
    assert done.out == "rank 0 of 2 is here\n"
    assert "complaint of rank 0" in done.err
    assert "complaint of rank 1" not in done.err
    for rank in range(2):
        folder = done.folder / "ranks" / str(rank)
        assert (folder / "stdout.log").read_text() == f"rank {rank} of 2 is here\n"
        assert f"complaint of rank {rank}" in (folder / "stderr.log").read_text()
    assert "boom in user code" in (done.folder / "ranks/1/stderr.log").read_text()


def test_the_exit_code_of_the_script_is_kept(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "2", ACT, "exit", "1")
    assert done.code == 3
    assert "rank 1 on host" in done.err
    assert "exit code 3" in done.err
    assert "Traceback" not in done.err


def test_what_is_raised_while_an_error_is_handled_is_recorded(tmp_path: Path) -> None:
    script = tmp_path / "wordless.py"
    script.write_text(
        "import sys\nclass Wordless:\n    def __str__(self): raise ValueError('no words')\nsys.exit(Wordless())"
    )
    done = tutti_run(tmp_path, "--nproc", "1", str(script))
    assert done.code == 1
    assert "ValueError: no words" in done.err
    assert "recorded no error" not in done.err


def test_a_killed_rank_is_named_with_the_signal_and_its_likely_cause(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "3", ACT, "kill", "2")
    assert done.code == 1
    assert "rank 2 on host" in done.err
    assert "signal 9 (SIGKILL)" in done.err
    assert "memory" in done.err
    assert "Traceback" not in done.err


def test_a_rank_that_ends_while_others_wait_is_named(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "2", ACT, "leave", "1")
    assert done.code == 1
    assert "rank 1 on host" in done.err
    assert "ended there after the rendezvous, while other ranks still waited for it at " in done.err
    assert "act.py:" in done.err
    assert "(`dist.all_reduce(torch.ones(1))`)" in done.err


def test_a_message_of_all_ranks_is_said_once_without_traceback(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "3", "--json", ACT, "all-user-error", "0")
    assert done.code == 2
    assert "all 3 ranks on host" in done.err
    assert done.err.count("the data set is empty") == 1
    assert "Traceback" not in done.err
    document = json.loads(done.out)
    assert document["failed_ranks"] == [0, 1, 2]
    assert document["exit_code"] == 2
    assert document["status"] == "failed"


def test_what_a_failed_rank_had_started_ends_too(tmp_path: Path) -> None:
    assert tutti_run(tmp_path, "--nproc", "2", ACT, "linger", "0").code == 1  # tutti_run looks for what is left


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_all_ranks_cleanly(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with running(*TUTTI, "run", "--no-predict", "--nproc", "2", ACT, "wait", "0", cwd=tmp_path) as run:
        assert wait_until(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists())
        if number == signal.SIGINT:
            os.killpg(run.process.pid, number)  # as a terminal does
        else:
            run.process.terminate()
        finished, _, err = run.finish()
        run.assert_nothing_left()
    assert finished == code
    assert "Traceback" not in err
    assert "stopped" in err
    assert (tmp_path / "left-0").exists(), "the script's finally blocks run"
    assert (tmp_path / "left-1").exists()


def test_no_rank_outlives_its_supervisor(tmp_path: Path) -> None:
    with running(*TUTTI, "run", "--no-predict", "--nproc", "2", ACT, "wait", "0", cwd=tmp_path) as run:
        assert wait_until(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists())
        assert len(run.processes()) >= 5, "the supervisor, two ranks and what each started are seen"
        run.process.kill()
        run.process.wait()
        run.assert_nothing_left()


def test_a_script_without_a_job_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('hello')\n")
    done = tutti_run(tmp_path, "--nproc", "2", "plain.py")
    assert done.code == 2
    assert "plain.py ended without preparing a tutti.Job" in done.err
    assert done.out == "hello\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "does not exist"),
        ("if x\n", "line 1 is not valid Python"),
        ("x = '\0'\n", "not valid Python|cannot be read"),
    ],
)
def test_a_script_that_cannot_be_run_is_refused_before_anything_starts(
    tmp_path: Path, source: str | None, words: str
) -> None:
    if source is not None:
        (tmp_path / "script.py").write_text(source)
    done = tutti_run(tmp_path, "--nproc", "2", "script.py")
    assert done.code == 2
    assert any(word in done.err for word in words.split("|"))
    assert "Traceback" not in done.err
    assert not done.folder.exists()


@pytest.mark.parametrize(
    ("plan", "arguments", "words"),
    [
        (
            {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=2)},
            ("--compress", "factors"),
            "with sharding.level = 2",
        ),
        ({"mesh": {"replicate": 3}}, ("--sync", "shift-one"), "with mesh.replicate = 3: replicas exchange in pairs"),
        ({"mesh": {"split": 2, "space": 2, "stage": 2}}, (), "mesh.space = 2 with mesh.stage = 2"),
    ],
)
def test_a_plan_that_no_model_runs_under_is_refused_before_anything_starts(
    tmp_path: Path, plan: dict[str, Any], arguments: tuple[str, ...], words: str
) -> None:
    serialization.save(Plan(batch=BatchPlan(global_batch_size=8), **plan), tmp_path / "plan.json")
    done = tutti_run(tmp_path, "--plan", "plan.json", *arguments, ACT, "raise", "0")
    assert done.code == 2
    assert words in done.err
    assert not done.folder.exists()


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        nodes = ("--nnodes", "2", "--nproc", "1", "--rendezvous", f"127.0.0.1:{port}")
        done = tutti_run(tmp_path, *nodes, ACT, "raise", "0")
    assert done.code == 2
    assert f"port {port} on {socket.gethostname()} is in use" in done.err
    assert f"process {os.getpid()}" in done.err
    assert "--rendezvous" in done.err


def test_a_node_that_finds_no_one_says_so_in_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nodes = ("--nnodes", "2", "--node-rank", "1", "--nproc", "1", "--rendezvous", f"127.0.0.1:{port}")
    done = tutti_run(tmp_path, *nodes, "--timeout", "0.5", ACT, "raise", "0")
    assert done.code == 2
    assert f"nothing listened on port {port}" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nproc", "3", "--plan", "plan.json"), "its mesh has 2 ranks, but --nproc starts 3"),
        (("--nproc", "2,1"), "--nproc lists 2 nodes, but --nnodes is 1"),
        (("--nproc", "0"), "1 rank or more"),
        (("--nproc", "2", "--nnodes", "2"), "add --rendezvous"),
        (("--nproc", "2", "--nnodes", "2", "--rendezvous", "here"), "write HOST:PORT"),
        (("--nproc", "2", "--nnodes", "2", "--node-rank", "2", "--rendezvous", "a:1"), "from 0 to 1"),
        (("--nproc", "2", "--resume", "nothing"), "--resume nothing does not exist"),
        (("--nproc", "2", "--plan", "absent.json"), "absent.json does not exist"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    serialization.save(Plan(batch=BatchPlan(global_batch_size=8), mesh={"replicate": 2}), tmp_path / "plan.json")
    done = tutti_run(tmp_path, *arguments, ACT, "raise", "0")
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err
