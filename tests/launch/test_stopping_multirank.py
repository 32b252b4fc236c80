"""Runs that are stopped end with grace and can go on; whatever else ends, no process is left behind."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from launch_rig import SCRIPTS, TUTTI, Running, running, tutti_run, wait_until

STOP = str(SCRIPTS / "stop.py")
RUN = (*TUTTI, "run", "--no-predict", "--folder", "run", "--nproc", "2")


def ready(folder: Path) -> list[int]:
    assert wait_until(lambda: all((folder / f"ready-{rank}").exists() for rank in range(2)), 60)
    assert wait_until(lambda: all((folder / f"ready-{rank}").read_text() for rank in range(2)))
    return [int((folder / f"ready-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.long) for n in (signal.SIGHUP, signal.SIGUSR1))]
)
def test_ranks_that_wrote_a_checkpoint_make_the_run_resumable(tmp_path: Path, number: signal.Signals) -> None:
    with running(*RUN, STOP, "resumable", cwd=tmp_path) as run:
        ready(tmp_path)
        run.process.send_signal(number)
        code, _, err = run.finish()
        run.assert_nothing_left()
    assert code == 75
    assert "go on with `tutti run --resume run" in err
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_for_all_processes_is_one_for_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    """A terminal that closes sends SIGHUP to the foreground group, twice; schedulers send SIGTERM to every process."""
    with running(*RUN, STOP, "resumable", cwd=tmp_path) as run:
        ready(tmp_path)
        below = [each.pid for each in psutil.Process(run.process.pid).children(recursive=True)]
        for pid in [] if number == signal.SIGHUP else below:
            os.kill(pid, number)
        os.killpg(run.process.pid, number)
        time.sleep(0.02)
        os.killpg(run.process.pid, number)
        code, _, _ = run.finish()
        run.assert_nothing_left()
    assert code == 75
    assert (tmp_path / "saved-0").exists()


def test_a_rank_that_stops_alone_without_a_checkpoint_is_not_called_saved(tmp_path: Path) -> None:
    with running(*RUN, STOP, "without", cwd=tmp_path) as run:
        ready(tmp_path)
        run.process.terminate()
        code, _, err = run.finish()
    assert code == 75
    assert "the ranks ended with exit code 75, but wrote no checkpoint into run" in err


def test_a_deaf_rank_is_killed_after_the_grace(tmp_path: Path) -> None:
    with running(*RUN, "--grace", "1", STOP, "deaf", cwd=tmp_path) as run:
        ready(tmp_path)
        run.process.terminate()
        code, _, err = run.finish()
        run.assert_nothing_left()
    assert code == 143
    assert "they have 1 s to end" in err


def test_ranks_stop_by_themselves_at_the_time_limit(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "2", "--time-limit", "4s", "--max-restarts", "3", STOP, "limit")
    assert done.code == 75
    assert "restart" not in done.err
    assert (tmp_path / "saved-1").exists()


def test_ranks_that_know_no_time_limit_are_ended(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "2", "--time-limit", "2s", "--grace", "1", STOP, "wait")
    assert done.code == 124
    assert "the time limit is over" in done.err


@pytest.mark.long
def test_nobody_needs_to_read_what_a_run_prints(tmp_path: Path) -> None:
    command = f"{sys.executable} -m tutti.cli.main run --no-predict --folder run --nproc 2 {STOP} lines"
    shell = ("bash", "-c", f"set -o pipefail; {command} 2>&1 | head -3; exit ${{PIPESTATUS[0]}}")
    with running(*shell, cwd=tmp_path) as run:
        code, out, err = run.finish()
        run.assert_nothing_left()
    assert len(out.splitlines()) == 3
    assert (tmp_path / "finished-0").exists(), "training went on"
    assert code == 2, "a script without a Job, as without the pipe"
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


def test_a_connection_that_the_script_lost_is_its_own_failure(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "2", STOP, "reset")
    assert done.code == 1
    assert "rank 1 on host" in done.err
    assert "ConnectionResetError" in done.err
    assert done.error(1)["kind"] == "exception"


def test_an_exit_code_of_143_is_not_a_signal(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "1", STOP, "143")
    assert done.code == 143
    assert "the script exited with exit code 143" in done.err
    assert "signal" not in done.err


def server_of(run: Running) -> psutil.Process:
    return next(one for one in psutil.Process(run.process.pid).children() if "forkserver" in " ".join(one.cmdline()))


def test_a_killed_fork_server_is_named(tmp_path: Path) -> None:
    with running(*RUN, STOP, "wait", cwd=tmp_path) as run:
        ready(tmp_path)
        server_of(run).kill()
        code, _, err = run.finish()
        run.assert_nothing_left()
    assert code != 0
    assert "the fork server, from which this host's ranks are started, was killed" in err


def test_a_child_in_a_session_of_its_own_ends_with_the_run(tmp_path: Path) -> None:
    with running(*RUN, "--grace", "1", STOP, "session", cwd=tmp_path) as run:
        for pid in ready(tmp_path):
            os.kill(pid, signal.SIGKILL)  # before anybody has asked it for its children
        run.finish()
        run.assert_nothing_left()


@pytest.mark.parametrize("how", ["stopped", "gil", "server", "session"])
def test_no_rank_outlives_a_killed_launcher(tmp_path: Path, how: str) -> None:
    with running(*RUN, STOP, how, cwd=tmp_path) as run:
        ranks = ready(tmp_path)
        if how == "stopped":
            for pid in ranks:
                os.kill(pid, signal.SIGSTOP)
        server = server_of(run)
        run.process.kill()
        if how == "server":
            server.kill()
        run.process.wait()
        began = time.monotonic()
        run.assert_nothing_left()
        assert time.monotonic() - began < 10


@pytest.mark.long
def test_nohup_keeps_a_run_alive(tmp_path: Path) -> None:
    with running("nohup", *RUN, STOP, "lines", cwd=tmp_path) as run:
        ready(tmp_path)
        os.kill(run.process.pid, signal.SIGHUP)
        run.finish()
        run.assert_nothing_left()
    assert (tmp_path / "finished-0").exists()
