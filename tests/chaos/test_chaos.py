"""A few schedules of `make chaos`, and each of its laws broken by hand."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from chaos import laws, soak
from chaos.schedule import PLANS, STEPS, Fault, Schedule, draw_schedule
from chaos.suffer import Story, check, suffer, undisturbed
from lab.hosts import needs_labs
from tutti.checkpoint.index import latest_checkpoint

pytestmark = pytest.mark.timeout(600)

BOTH = Schedule(
    seed=0,
    plan="shard-1",
    faults=(
        Fault(kind="kill", step=6, delay_s=0.02, rank=1),
        Fault(kind="kill-launcher", step=15, delay_s=0.04, damage="flipped"),
    ),
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(BOTH, tmp_path_factory.mktemp("chaos"))


@pytest.fixture(scope="module")
def suffered(reference: Path) -> Story:
    return suffer(BOTH, reference.parent / "suffered")


def test_a_killed_rank_a_killed_launcher_and_a_damaged_checkpoint(suffered: Story, reference: Path) -> None:
    check(suffered, reference)
    first, second = (Path(output).read_text() for output in suffered.output)
    assert "restart 1 of 9: 2 ranks go on from step-00000004" in first
    assert "step-00000012" in second, "the damaged one is named"
    assert "resumed from" in second


@pytest.mark.long
def test_two_hosts_of_which_one_is_lost_and_cut_off(tmp_path: Path) -> None:
    needs_labs()
    schedule = Schedule(
        seed=0,
        plan="nodes-shard",
        faults=(
            Fault(kind="kill-node", step=6, delay_s=0.02),
            Fault(kind="shake-link", step=10, delay_s=0.0),
            Fault(kind="cut-link", step=15, delay_s=0.03),
        ),
    )
    check(suffer(schedule, tmp_path / "suffered"), undisturbed(schedule, tmp_path))


def _lose_a_batch(folder: Path) -> None:
    file = folder / "samples-1"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if not line.startswith("7 ")))


def _double_a_sample(folder: Path) -> None:
    step, time_s, ids = (folder / "samples-0").read_text().splitlines()[-1].split(" ")
    first = ids.split(",")[0]
    with (folder / "samples-0").open("a") as file:
        file.write(f"{step} {float(time_s) + 1} {','.join([first] * len(ids.split(',')))}\n")


def _change_a_loss(folder: Path) -> None:
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    last = next(row for row in reversed(rows) if row.get("kind") == "step")
    last["loss"] += 1e-9
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _lose_the_end(folder: Path) -> None:
    newest = latest_checkpoint(folder / "run")
    assert newest is not None
    shutil.rmtree(newest)


def _leave_a_part(folder: Path) -> None:
    (folder / "run/checkpoints/.step-00000099.part").mkdir()


def _leave_a_file(folder: Path) -> None:
    (folder / "tmp/store").touch()


def _leave_memory(folder: Path) -> None:
    (folder / "memory/tutti-1").mkdir()


@pytest.mark.parametrize(
    ("harm", "law"),
    [
        (_lose_a_batch, "lost the samples"),
        (_double_a_sample, "doubled"),
        (_change_a_loss, "the loss of step"),
        (_lose_the_end, "the newest checkpoint"),
        (_leave_a_part, "folder of checkpoints"),
        (_leave_a_file, "temporary files"),
        (_leave_memory, "checkpoints in memory"),
    ],
)
def test_a_broken_law_is_seen(
    suffered: Story, reference: Path, tmp_path: Path, harm: Callable[[Path], None], law: str
) -> None:
    folder = Path(shutil.copytree(suffered.folder, tmp_path / "run"))
    harm(folder)
    with pytest.raises(laws.BrokenLaw, match=law):
        check(Story(schedule=BOTH, folder=folder, mark=suffered.mark, pids=suffered.pids), reference)


def test_a_process_that_is_left_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "LONGEST_END_S", 0.2)
    left = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, "TEST_MARK": "m"}
    )
    try:
        with pytest.raises(laws.BrokenLaw, match="processes are left behind"):
            laws.check_nothing_left(tmp_path, "m", set())
    finally:
        left.kill()
        left.communicate()


def test_states_that_differ_are_seen() -> None:
    one = {"a": [torch.ones(2, dtype=torch.float64), 3], "b": None}
    assert laws.largest_difference(one, {"a": [torch.ones(2, dtype=torch.float64), 3], "b": None}) == 0
    changed = torch.tensor([1.0, 1.0 + 2**-52], dtype=torch.float64)
    assert laws.largest_difference(one, {"a": [changed, 3], "b": None}) == 2**-52
    assert laws.largest_difference(one, {"a": [torch.ones(2, dtype=torch.float64), 4], "b": None}) == float("inf")


def test_a_seed_draws_one_schedule() -> None:
    drawn = [draw_schedule(seed, root=True) for seed in range(200)]
    assert drawn == [draw_schedule(seed, root=True) for seed in range(200)]
    assert {schedule.plan for schedule in drawn} == set(PLANS)
    assert len({fault.kind for schedule in drawn for fault in schedule.faults}) == 9
    assert all(1 < fault.step < STEPS for schedule in drawn for fault in schedule.faults)


@pytest.mark.parametrize(
    ("steps", "leak", "files", "expected"),
    [
        (4_000, 300.0, 0.0, ("not judged", "steady")),
        (8_000, 0.0, 0.0, ("steady", "steady")),
        (5_000, 300.0, 0.0, ("GROWS", "steady")),
        (8_000, 300.0, 0.0, ("GROWS", "steady")),
        (40_000, 30.0, 0.0, ("steady", "steady")),
        (40_000, 80.0, 0.0, ("GROWS", "steady")),
        (8_000, 0.0, 0.01, ("steady", "GROWS")),
    ],
)
def test_a_soak_tells_warm_up_from_growth(steps: int, leak: float, files: float, expected: tuple[str, str]) -> None:
    """Memory fills as it was measured, and leaks by so many bytes a step beside."""
    readings = [
        soak.Reading(
            step=step,
            memory_nbytes=round(
                269e6 + 1000 * min(step, 2_000) + 90 * min(step, 6_000) + leak * step + step // 50 % 2 * 2e5
            ),
            descriptors=40,
            threads=12,
            segments=7,
            files=30 + int(files * step),
        )
        for step in range(20, steps - 20, 30)
    ]
    verdicts = {name: verdict for name, verdict, _ in soak.judge(readings, steps)}
    assert (verdicts.pop("memory_nbytes"), verdicts.pop("files")) == expected
    assert set(verdicts.values()) == {"steady"}
