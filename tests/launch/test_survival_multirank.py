"""Ranks that outlive the death of another one go on from memory, and end as if nothing had happened."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from launch_rig import SCRIPTS, Finished, tutti_run

pytestmark = pytest.mark.timeout(600)

SURVIVE = str(SCRIPTS / "survive.py")


def run(folder: Path, *arguments: str, ranks: int = 3) -> Finished:
    folder.mkdir(exist_ok=True)
    options, script = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    return tutti_run(folder, "--nproc", str(ranks), *options, SURVIVE, *script)


def survived(folder: Path, *arguments: str, restarts: int, ranks: int = 3) -> Finished:
    done = run(folder, "--max-restarts", "30", *arguments, ranks=ranks)
    assert done.code == 0, done.err
    assert done.err.count("\nrestart ") == restarts, done.err
    return done


def samples(folder: Path) -> dict[int, list[int]]:
    """The samples of every step of all ranks; a step that is repeated after it was complete has them twice."""
    steps: dict[int, list[int]] = defaultdict(list)
    for file in folder.glob("samples-*"):
        for line in file.read_text().splitlines():
            step, _, ids = line.split(" ")
            steps[int(step)] += map(int, ids.split(","))
    return {step: sorted(ids) for step, ids in sorted(steps.items())}


def lives(folder: Path, rank: int) -> list[dict[str, int]]:
    return [json.loads(line) for line in (folder / f"life-{rank}").read_text().splitlines()]


def difference(folder: Path, other: Path) -> float:
    one, two = torch.load(folder / "final.pt"), torch.load(other / "final.pt")
    assert one.keys() == two.keys()
    return max((one[name] - two[name]).abs().max().item() for name in one)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run(folder, "--", "--epochs", "2")
    assert done.code == 0, done.err
    return folder


def test_the_others_go_on_from_memory_bit_for_bit(tmp_path: Path, undisturbed: Path) -> None:
    done = survived(tmp_path, "--", "--epochs", "2", "kill@3:1", "kill@6:0:forward", "kill@9:2:after", restarts=3)
    assert "restart 1 of 30: 3 ranks go on after step 3 from the memory of rank 0" in done.err
    assert "restart 2 of 30: 3 ranks go on after step 6 from the memory of rank 1" in done.err
    assert "go on after step 9 from the memory" not in done.err, "nothing is lost of a step that rank 2 has completed"
    assert difference(tmp_path, undisturbed) == 0
    assert samples(tmp_path) == samples(undisturbed), "no sample is lost, and none is counted twice"
    survivor = lives(tmp_path, 2)[:3]
    assert len({life["pid"] for life in survivor}) == 1, "rank 2 goes on in its process"
    assert len({life["pid"] for life in lives(tmp_path, 0)}) == 2
    assert max(life["files"] for life in survivor) == survivor[0]["files"], "no group of a left run stays open"
    assert not [*tmp_path.glob("run/checkpoints/step-0000001[0-9]")], "no checkpoint was needed"
    report = json.loads((tmp_path / "run/report/report.json").read_text())
    assert report["steps"]["value"] == 20


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sgd", "draws", "workers", "callbacks", "calls"])
def test_kinds_of_scripts_go_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    script = ("--kind", kind, "--epochs", "2", "--every", "3")
    assert run(tmp_path / "one", "--", *script).code == 0
    place = "kill@7:2:between" if kind == "calls" else "kill@7:2:forward"
    last = "kill@12:1" if kind == "draws" else "kill@12:1:after"  # draws after a rank's last mark are lost with it
    done = survived(tmp_path / "two", "--", *script, "kill@4:1", place, last, restarts=3)
    assert done.err.count("from the memory of rank") == 3, done.err
    assert difference(tmp_path / "one", tmp_path / "two") == 0
    assert samples(tmp_path / "one") == samples(tmp_path / "two")


@pytest.mark.long
def test_a_step_that_the_others_complete_is_not_repeated(tmp_path: Path, undisturbed: Path) -> None:
    done = survived(tmp_path, "--", "--epochs", "2", "kill@10:1:update", restarts=1)
    assert "go on after step 11 from the memory of rank 0" in done.err
    assert difference(tmp_path, undisturbed) == 0


@pytest.mark.long
def test_fewer_ranks_go_on_with_the_same_result(tmp_path: Path) -> None:
    script = ("--kind", "still", "--epochs", "2")
    assert run(tmp_path / "one", "--", *script, ranks=4).code == 0
    faults = ("kill@3:1", "kill@8:0:forward", "kill@14:1")
    done = survived(tmp_path / "two", "--on-failure", "shrink", "--", *script, *faults, restarts=3, ranks=4)
    assert done.err.count("from the memory of rank") == 3, done.err
    assert 0 < difference(tmp_path / "one", tmp_path / "two") <= 1e-12
    assert samples(tmp_path / "one") == samples(tmp_path / "two")
    assert json.loads((tmp_path / "two/run/run.json").read_text())["world_size"] == 1


@pytest.mark.long
@pytest.mark.parametrize("fewer", [False, True])
def test_shares_that_have_changed_begin_anew(tmp_path: Path, fewer: bool) -> None:
    """They change twice; then a rank dies, and the others go on from memory with equal shares, which change again."""
    script = ("--kind", "still", "--epochs", "2")
    assert run(tmp_path / "one", "--", *script, ranks=1).code == 0
    shares = ("--shares", "2=1:4:2", "--shares", "5=3:1:1", "--shares", "10=1:2:3", "--every", "7")
    options = ("--on-slow-rank", "rebalance", *(("--on-failure", "shrink") if fewer else ()))
    faults = ("kill@7:1:forward", "kill@12:0")
    done = survived(tmp_path / "two", *options, "--", *script, *shares, *faults, restarts=2)
    assert done.err.count("from the memory of rank") == 2, done.err
    assert difference(tmp_path / "one", tmp_path / "two") <= 1e-12
    assert samples(tmp_path / "one") == samples(tmp_path / "two")
    divided = {(int(step), int(rank)): shares for step, rank, shares in
               (line.split(" ", 2) for line in (tmp_path / "two/shares").read_text().splitlines())}  # fmt: skip
    assert divided[3, 0] == "(1.0, 4.0, 2.0)"
    assert divided[6, 0] == "(3.0, 1.0, 1.0)"
    assert divided[8, 0] == "()", "equal again"
    assert divided[11, 0] == ("(1.0, 2.0)" if fewer else "(1.0, 2.0, 3.0)")


@pytest.mark.long
def test_twenty_deaths_leave_no_memory_thread_or_file_behind(tmp_path: Path) -> None:
    faults = [f"kill@{step}:1" for step in range(1, 21)]
    survived(tmp_path, "--", "--epochs", "3", *faults, restarts=20, ranks=2)
    life = lives(tmp_path, 0)
    assert len({one["pid"] for one in life}) == 1
    assert max(one["files"] for one in life) == life[0]["files"]
    assert max(one["tasks"] for one in life) == life[0]["tasks"]
    assert life[20]["kib"] - life[5]["kib"] < 4096


@pytest.mark.long
def test_more_failures_while_a_rank_is_lost(tmp_path: Path, undisturbed: Path) -> None:
    in_recovery = ("late-kill@-1:1", "late-kill@-2:0")  # the new rank before it has the state, a survivor after that
    stuck = ("hang@8:2", "kill@8:1", "thread@10:0", "kill@12:1")
    done = survived(tmp_path, "--", "--epochs", "2", "kill@3:1", *in_recovery, *stuck, restarts=5)
    assert done.err.count("after step 3 from the memory of rank") == 3, done.err
    assert "after step 8 from the memory of rank 0" in done.err, "rank 2 hangs outside of any exchange"
    assert "after step 12 from the memory of rank 2" in done.err, "a thread of rank 0 cannot be ended"
    assert difference(tmp_path, undisturbed) == 0
    assert samples(tmp_path) == samples(undisturbed)


@pytest.mark.long
def test_all_ranks_are_started_again_if_that_is_asked_for(tmp_path: Path, undisturbed: Path) -> None:
    arguments = ("--recover", "checkpoint", "--", "--epochs", "2", "--every", "2", "kill@5:1")
    done = survived(tmp_path, *arguments, restarts=1)
    assert "3 ranks go on from step-00000004\n" in done.err
    assert len({life["pid"] for life in lives(tmp_path, 0)}) == 2
    assert difference(tmp_path, undisturbed) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "script", "said"),
    [
        (("--mesh", "shard=3"), ("--kind", "sgd", "kill@5:1"), "the plan divides the training state"),
        ((), ("--kind", "draws", "kill@5:1:update"), "the script draws random numbers between steps"),
        ((), ("--kind", "draws", "kill@4:1:after"), "the script draws random numbers between steps"),
        ((), ("--kind", "draws-of-1", "kill@4:1:after"), "the script draws random numbers between steps"),
    ],
)
def test_what_is_not_in_memory_comes_from_a_checkpoint(
    tmp_path: Path, options: tuple[str, ...], script: tuple[str, ...], said: str
) -> None:
    arguments = ("--epochs", "2", "--every", "2")
    assert run(tmp_path / "one", *options, "--", *arguments, *script[:-1]).code == 0
    done = survived(tmp_path / "two", *options, "--", *arguments, *script, restarts=1)
    assert f"3 ranks go on from step-00000004 (not from memory: {said}" in done.err
    assert difference(tmp_path / "one", tmp_path / "two") == 0
