"""`tutti verify` from the command line: exit codes, the verdict as words and as JSON, files left and not left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.config import serialization
from tutti.config.verdict import Verdict
from verify.running import HERE


def tutti_verify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tutti.cli.main", "verify", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)


def test_a_correct_script_with_a_plan_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    plan = {"batch": {"global_batch_size": 16, "num_microbatches": 2}, "mesh": {"replicate": 3}, "shares": [2, 1, 1]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    script = str(HERE / "correct" / "mlp.py")
    done = tutti_verify(tmp_path, "--plan", "plan.json", "--steps", "2", "--folder", "run", script, "--its", "own")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS: 3 ranks compute what one device computes, over 2 steps in float64")
    verdict = serialization.load(Verdict, tmp_path / "run" / "verify.json")
    assert verdict.passed
    assert verdict.sentence in done.stdout.replace("\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "run"]


@pytest.mark.long
def test_a_broken_script_as_json(tmp_path: Path) -> None:
    script = str(HERE / "broken" / "own_batch_norm.py")
    done = tutti_verify(tmp_path, "--nproc", "2", "--steps", "1", "--json", "--output", "verdict.json", script)
    assert done.returncode == 1, done.stderr
    verdict = serialization.loads(Verdict, done.stdout)
    assert verdict == serialization.load(Verdict, tmp_path / "verdict.json")
    assert verdict.first is not None
    assert (verdict.first.module, verdict.first.step) == ("1", 1)


@pytest.mark.long
def test_what_cannot_be_compared_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    done = tutti_verify(tmp_path, "--steps", "1", "--output", "v.json", str(HERE / "incomparable" / "mixup.py"))
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("NOT COMPARABLE: 2 ranks differ from one device")
    assert "Remedy: " in done.stdout
    assert not serialization.load(Verdict, tmp_path / "v.json").comparable


def test_a_script_that_fails_shows_its_error_once(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import tutti\njob = tutti.Job(global_batch_size=4)\nraise ValueError('what is wrong')\n")
    done = tutti_verify(tmp_path, str(script))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("ValueError: what is wrong") == 1
    assert "fails on one device" in done.stderr
    without = tmp_path / "without.py"
    without.write_text("import tutti\n")
    done = tutti_verify(tmp_path, str(without))
    assert done.returncode == 2
    assert "without a step of a tutti.Job" in done.stderr


def test_a_refusal_on_ranks_is_no_verdict(tmp_path: Path) -> None:
    script = str(HERE / "correct" / "mlp.py")
    done = tutti_verify(tmp_path, "--mesh", "context=2", script)
    assert (done.returncode, done.stdout) == (2, "")
    assert "mlp.py is refused on 2 ranks, so there is nothing to compare: sequences of 6 tokens" in done.stderr
    assert "FAIL" not in done.stderr


def test_what_cannot_be_asked_is_a_sentence(tmp_path: Path) -> None:
    for arguments, words in (
        (["nothing.py"], "nothing.py does not exist"),
        (["--nproc", "0", str(HERE / "correct" / "mlp.py")], "0"),
        (["--epochs", "1", "--steps", "2", str(HERE / "correct" / "mlp.py")], "leave --steps or --epochs out"),
        (["--folder", "nowhere", str(HERE / "correct" / "mlp.py")], "nowhere is not a folder"),
    ):
        done = tutti_verify(tmp_path, *arguments)
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr
