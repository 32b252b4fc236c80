"""`tutti run --on-slow-rank rebalance`: a rank that is slow gets fewer samples, until it is slow no longer."""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from launch_rig import SCRIPTS, Finished, tutti_run

SLOW = str(SCRIPTS / "slow.py")

CHANGED = re.compile(r"rank 1 gets (\d+) of 16 samples of a batch instead of (\d+) from step (\d+) on; (.*)")


def trained(folder: Path, ranks: int, *arguments: str) -> Finished:
    folder.mkdir()
    done = tutti_run(folder, "--nproc", str(ranks), *arguments)
    assert done.code == 0, done.err
    return done


def samples(folder: Path) -> dict[int, list[int]]:
    """The samples of every step, in the order of ranks."""
    steps: dict[int, list[int]] = defaultdict(list)
    for file in sorted(folder.glob("samples-*")):
        for line in file.read_text().splitlines():
            step, _, ids = line.partition(" ")
            steps[int(step)] += map(int, ids.split(","))
    return steps


def check_like_one_device(folder: Path, ranks: Path, *arguments: str) -> None:
    """Compare a run with that of one rank, in which nothing takes time."""
    trained(folder, 1, SLOW, "--ms", "0", *arguments)
    assert samples(ranks) == samples(folder), "no sample is lost or doubled, and their order is the same"
    got, expected = torch.load(ranks / "final.pt"), torch.load(folder / "final.pt")
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.long
@pytest.mark.parametrize("cause", ["data", "compute"])
def test_a_slow_rank_gets_fewer_samples(tmp_path: Path, cause: str) -> None:
    script = ("--steps", "150", "--cause", cause)
    done = trained(tmp_path / "two", 2, "--on-slow-rank", "rebalance", SLOW, *script)
    assert "rank 1 on host " in done.err
    found = CHANGED.search(done.err)
    assert found, done.err
    now, before, step = map(int, found.groups()[:3])
    assert before == 8
    assert 2 <= now <= 5
    assert found[4].startswith("rank 1 takes ")
    if cause == "data":
        assert found[4].endswith("times as long as others: data")
    effect = f"with the shares of the batch since step {step}, a step takes "
    times = re.search(rf"{effect}(\S+) ms; (\S+) ms before", done.err)
    assert times, done.err
    if cause == "data":  # which sleeps, so that busy cores change nothing
        assert float(times[1]) < 0.9 * float(times[2])
    report = json.loads((tmp_path / "two/run/report/report.json").read_text())
    notes = "\n".join(finding["sentence"] for finding in report["findings"] if finding["code"] == "SHARES")
    assert CHANGED.search(notes.replace("Rank", "rank")), report["findings"]
    assert effect[1:] in notes
    plan = json.loads((tmp_path / "two/run/plan.json").read_text())
    assert not plan["shares"], "a restart begins as the plan says"
    check_like_one_device(tmp_path / "one", tmp_path / "two", *script)


@pytest.mark.long
def test_what_cannot_be_rebalanced_is_refused(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "2", "--on-slow-rank", "rebalance", "--mesh", "split=2", SLOW, "--ms", "0")
    assert done.code == 2, done.err
    assert done.err.count("on_slow_rank = 'rebalance' with the mesh split=2: its ranks compute the same") == 1, done.err
    assert "Traceback" not in done.err
