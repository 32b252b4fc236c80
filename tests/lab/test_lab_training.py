"""Training in a lab: the losses of one host, whatever the hosts, their ranks and their links."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.hosts import lab_or_skip, needs_labs
from tutti.lab import Lab

ROOT = Path(__file__).resolve().parents[2]
DIGITS = (str(ROOT / "examples/digits_tutti.py"), "--epochs", "1", "--dropout", "0", "--batch-size", "256")


pytestmark = pytest.mark.timeout(600)


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "step"]


def assert_same(found: list[float], expected: list[float]) -> None:
    """The example computes in float32, in which a sum's order is felt more and more."""
    assert found[:3] == pytest.approx(expected[:3], rel=1e-4)
    assert found == pytest.approx(expected, rel=2e-2)


def trained(lab: Lab, folder: Path, nproc: int) -> list[float]:
    done = lab.train("--folder", str(folder), *DIGITS, nproc=nproc, cwd=folder.parent, timeout_s=200)
    assert [one.code for one in done] == [0] * lab.hosts, "\n".join(one.err for one in done)
    header = json.loads((folder / "run.json").read_text())
    assert header["world_size"] == lab.hosts * nproc
    return losses(folder)


@pytest.mark.long
def test_hosts_of_a_lab_train_as_one_host_does(tmp_path: Path) -> None:
    with lab_or_skip(1) as one:
        expected = trained(one, tmp_path / "one", 1)
    assert len(expected) == 6
    with lab_or_skip(2, rates="1gbit") as two:
        assert_same(trained(two, tmp_path / "two", 1), expected)
        assert_same(trained(two, tmp_path / "four", 2), expected)


def test_the_command_line_trains_on_all_hosts(tmp_path: Path) -> None:
    needs_labs()
    name = f"train-{tmp_path.name}"
    tutti = (sys.executable, "-m", "tutti.cli.main", "lab")
    up = subprocess.run([*tutti, "up", "--name", name, "--rate", "1gbit"], capture_output=True, text=True, check=False)
    try:
        assert up.returncode == 0, up.stderr
        command = [*tutti, "run", "--name", name, "--json", str(ROOT / "tests/launch/scripts/train.py"), "1", "0"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=200)
    finally:
        subprocess.run([*tutti, "down", "--name", name], check=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "completed"
    assert "epoch 0 of 2 ranks" in done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in (folder / "ranks").iterdir()} == {"0", "1"}


@pytest.mark.long
def test_what_fails_on_all_hosts_is_said_once(tmp_path: Path) -> None:
    needs_labs()
    name = f"once-{tmp_path.name}"
    tutti = (sys.executable, "-m", "tutti.cli.main", "lab")
    run = [*tutti, "run", "--name", name]
    train, act = (str(ROOT / "tests/launch/scripts" / script) for script in ("train.py", "act.py"))
    up = subprocess.run([*tutti, "up", "--name", name, "--hosts", "2"], capture_output=True, text=True, check=False)

    def failing(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*run, *words], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=100)

    try:
        assert up.returncode == 0, up.stderr
        everywhere = failing("--sync", "hogwild", train, "1", "0")
        assert everywhere.stderr.count("which share no memory") == 1, everywhere.stderr
        assert "all 2 ranks on hosts host0, host1 failed" in everywhere.stderr
        one = failing("--json", act, "raise", "1")
        said = [line for line in one.stderr.splitlines() if line.endswith(" ValueError: boom in user code")]
        assert said == ["host1: ValueError: boom in user code"], one.stderr
        assert "boom in user code" in json.loads(one.stdout)["message"], "host 0's document has it all the same"
        before = failing("--mesh", "nonsense=2", train, "1", "0")
        assert before.stderr.count("there is no axis 'nonsense'") == 1, before.stderr
    finally:
        subprocess.run([*tutti, "down", "--name", name], check=True)


@pytest.mark.long
def test_unequal_links_and_unequal_hosts_change_nothing_but_time(tmp_path: Path) -> None:
    with lab_or_skip(1) as one:
        expected = trained(one, tmp_path / "one", 1)
    with lab_or_skip(3, rates=["unlimited", "1gbit", "50mbit"]) as three:
        assert_same(trained(three, tmp_path / "three", 1), expected)


STATIC = "--master-addr=$MASTER_ADDR --master-port=$MASTER_PORT --node-rank=$NODE_RANK"
DYNAMIC = "--rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT --rdzv-id=1"


@pytest.mark.long
@pytest.mark.parametrize("meet", [STATIC, DYNAMIC])
def test_torchrun_works_inside(meet: str, tmp_path: Path) -> None:
    torchrun = f"{sys.executable} -m torch.distributed.run --nnodes=$NNODES --nproc-per-node=$NPROC_PER_NODE {meet}"
    with lab_or_skip(2, rates="1gbit") as lab:
        done = lab.run(("sh", "-c", f"{torchrun} {' '.join(DIGITS)}"), cwd=tmp_path, timeout_s=300)
    assert [one.code for one in done] == [0, 0], done[0].err + done[1].err
    assert "test accuracy" in done[0].out
