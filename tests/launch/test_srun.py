"""A script is also a plain program under srun: a real, private Slurm of two nodes says what that environment is."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_rig import running
from slurm_rig import missing, slurm
from test_other_launchers import MEET, assert_all_met, assert_trained, facts_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    base = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    base.chmod(0o755)
    try:
        with slurm(base) as environment:
            yield environment
    finally:
        shutil.rmtree(base, ignore_errors=True)


def test_srun_on_two_nodes(cluster: dict[str, str], tmp_path: Path) -> None:
    command = ("srun", "--nodes=2", "--ntasks=3", "--distribution=block", sys.executable, MEET)
    with running(*command, cwd=tmp_path, environment=cluster) as run:
        code, out, err = run.finish()
    assert code == 0, err
    facts = facts_of(out)
    assert_all_met(facts, ranks=3, launcher="srun", local=[2, 2, 1])
    assert [one["local_rank"] for one in facts] == [0, 1, 0]
    assert_trained(out, tmp_path, ranks=3)


@pytest.mark.long
def test_the_doctor_checks_the_nodes_of_a_step_together(cluster: dict[str, str], tmp_path: Path) -> None:
    command = ("srun", "--nodes=2", "--ntasks=3", "--distribution=block", sys.executable, "-m", "tutti", "doctor")
    with running(*command, cwd=tmp_path, environment=cluster) as run:
        code, out, err = run.finish()
    assert code == 0, out + err
    assert out.count("links: ") == 2  # one task of each node
    assert "the first task of this node checks it" in out
    assert "(node 1)" in out  # both are on this host
    assert "is the same folder on all hosts" in out
    assert "4 started, met and all-reduced a number" in out
