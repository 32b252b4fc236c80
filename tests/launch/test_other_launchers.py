"""A script with a Job is also a plain program under torchrun and mpirun: their environment is understood."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from launch_rig import SCRIPTS, running

MEET = str(SCRIPTS / "meet.py")


def facts_of(output: str) -> list[dict[str, object]]:
    found = [json.loads(line[line.index("{") :]) for line in output.splitlines() if line.endswith("}") and "{" in line]
    return sorted(found, key=lambda facts: facts["rank"])


def assert_all_met(facts: list[dict[str, object]], *, ranks: int, launcher: str, local: list[int]) -> None:
    assert [one["rank"] for one in facts] == list(range(ranks))
    assert {one["world_size"] for one in facts} == {ranks}
    assert [one["local_world_size"] for one in facts] == local
    assert {one["launcher"] for one in facts} == {launcher}
    assert {one["total"] for one in facts} == {ranks * (ranks + 1) / 2}


def assert_trained(output: str, folder: Path, *, ranks: int) -> None:
    """One rank speaks, and one run folder is left."""
    assert output.count("trained on") == 1
    assert f"trained on {ranks} ranks\n" in output
    headers = [json.loads(path.read_text()) for path in folder.glob("runs/*/run.json")]
    assert [header["world_size"] for header in headers] == [ranks]


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", MEET)
    with running(*command, cwd=tmp_path) as run:
        code, out, err = run.finish()
    assert code == 0, err
    assert_all_met(facts_of(out), ranks=2, launcher="torchrun", local=[2, 2])
    assert_trained(out, tmp_path, ranks=2)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun (Open MPI) is not installed")
def test_mpirun(tmp_path: Path) -> None:
    as_root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    command = ("mpirun", "--oversubscribe", *as_root, "-n", "2", sys.executable, MEET)
    with running(*command, cwd=tmp_path) as run:
        code, out, err = run.finish()
    assert code == 0, err
    assert_all_met(facts_of(out), ranks=2, launcher="mpirun", local=[2, 2])
    assert_trained(out, tmp_path, ranks=2)
