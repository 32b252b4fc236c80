"""A rank sees what a script under plain `python` sees, and starts clean: no device, no threads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch_rig import SCRIPTS, tutti_run

FACTS = SCRIPTS / "facts.py"


def test_a_script_sees_the_same_interpreter_as_under_python(tmp_path: Path) -> None:
    subprocess.run([sys.executable, FACTS, "--x", "1"], cwd=tmp_path, check=True, stdin=subprocess.DEVNULL)
    tutti_run(tmp_path, "--nproc", "2", str(FACTS), "--x", "1")
    alone, first, second = (json.loads((tmp_path / f"facts-{rank}.json").read_text()) for rank in ("alone", "0", "1"))
    assert first["facts"] == alone["facts"]
    assert second["facts"] == alone["facts"]
    assert alone["facts"]["exit_function_ran"], "or the comparison would show less than it says"
    assert alone["facts"]["thread_ended"]


def test_ranks_are_forked_before_any_device_or_thread_pool_is_touched(tmp_path: Path) -> None:
    tutti_run(tmp_path, "--nproc", "2", str(FACTS), environment={"OMP_NUM_THREADS": "2"})
    for rank in range(2):
        about = json.loads((tmp_path / f"facts-{rank}.json").read_text())["rank"]
        assert about["cuda_initialized"] is False
        assert about["parent_threads"] == 1
        assert about["threads"] == 2, "the user's own number is kept"
        assert about["omp"] == "2"


def test_a_module_runs_as_python_dash_m_would(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("word = 'relative import works'\n")
    (package / "train.py").write_text("import sys\nfrom .helper import word\nprint(__name__, word, sys.argv[1:])\n")
    done = tutti_run(tmp_path, "--nproc", "1", "-m", "mine.train", "--lr", "1")
    assert done.out == "__main__ relative import works ['--lr', '1']\n"


def test_a_job_trains_and_leaves_its_run_folder(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "2", str(SCRIPTS / "train.py"), "2", "0")
    assert done.code == 0, done.err
    assert done.out == "epoch 0 of 2 ranks\nepoch 1 of 2 ranks\n"
    assert json.loads((done.folder / "run.json").read_text())["world_size"] == 2
    again = tutti_run(tmp_path, "--nproc", "2", str(SCRIPTS / "train.py"), "2", "0")
    assert again.code == 2
    assert "already holds a run" in again.err


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        pytest.param("executor", "a thread has ended\nexit functions run\n", marks=pytest.mark.long),
        pytest.param("processes", "[1]\nexit functions run\n", marks=pytest.mark.long),
        pytest.param("daemon", "exit functions run\n", marks=pytest.mark.long),
        ("thread", "a thread has ended\nexit functions run\n"),
    ],
)
def test_a_run_ends_as_an_interpreter_would_whatever_threads_the_script_keeps(
    tmp_path: Path, kept: str, said: str
) -> None:
    done = tutti_run(tmp_path, "--nproc", "2", "--timeout", "20", str(SCRIPTS / "threads.py"), kept)
    assert done.code == 0, done.err
    assert done.out == said


@pytest.mark.long
def test_sys_exit_waits_for_threads_too(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "1", str(SCRIPTS / "threads.py"), "executor", "exit")
    assert done.code == 0, done.err
    assert done.out == "a thread has ended\nexit functions run\n"


@pytest.mark.parametrize(("kept", "rank", "name"), [("hang", 1, "uploader"), ("hung task", 0, "worker_0")])
def test_a_thread_that_never_ends_is_named_and_ended(tmp_path: Path, kept: str, rank: int, name: str) -> None:
    done = tutti_run(tmp_path, "--nproc", "2", "--timeout", "1.5", str(SCRIPTS / "threads.py"), kept)
    assert done.code == 2
    assert f"rank {rank} on host" in done.err
    assert f"the script ended, but after 1.5 s its threads had not: '{name}'" in done.err
    assert "Traceback" not in done.err


def test_an_exit_code_ends_a_rank_whose_thread_hangs(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "2", str(SCRIPTS / "threads.py"), "leave")
    assert done.code == 3
    assert "exit code 3" in done.err
