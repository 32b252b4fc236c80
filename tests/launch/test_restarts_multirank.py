"""A run in which a rank dies and all are started again goes on from its checkpoint, as if nothing had happened."""

import json
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest
import torch
from launch_rig import SCRIPTS, Finished, tutti_run

RECOVER = str(SCRIPTS / "recover.py")
STEPS, BATCH = 30, 12


def recovered(folder: Path, *arguments: str, ranks: int = 3) -> Finished:
    folder.mkdir(exist_ok=True)
    options, script = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    fresh = ("--recover", "checkpoint") if "--max-restarts" in options else ()
    return tutti_run(folder, "--nproc", str(ranks), *fresh, *options, RECOVER, *script)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = recovered(folder, "--", "0")
    assert done.code == 0, done.err
    return folder


def batches(folder: Path) -> dict[int, list[int]]:
    """The samples of each step, by the newest record of every rank; each rank's own records must be in order."""
    newest: dict[int, tuple[float, list[int]]] = {}
    shares: dict[int, list[tuple[float, list[int]]]] = defaultdict(list)
    for file in folder.glob("samples-*"):
        for line in file.read_text().splitlines():
            step, time_s, ids = line.split(" ")
            shares[int(step)].append((float(time_s), [int(one) for one in ids.split(",")]))
    for step, records in shares.items():
        # The ranks of one generation complete a step within a moment: take whole batches from the last record back.
        ids: list[int] = []
        for _, part in sorted(records, reverse=True):
            if len(ids) < BATCH:
                ids += part
        newest[step] = (max(records)[0], sorted(ids))
    return {step: ids for step, (_, ids) in sorted(newest.items())}


def difference(folder: Path, other: Path) -> float:
    one, two = torch.load(folder / "final.pt"), torch.load(other / "final.pt")
    assert one.keys() == two.keys()
    return max((one[name] - two[name]).abs().max().item() for name in one)


def starts(folder: Path) -> list[int]:
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [row["resumed_at_step"] for row in rows if row["kind"] == "start"]


def test_a_killed_rank_is_replaced_and_no_sample_is_lost(tmp_path: Path, undisturbed: Path) -> None:
    done = recovered(tmp_path, "--max-restarts", "3", "--", "4", "kill@10:1", "exit@21:0")
    assert done.code == 0, done.err
    assert "rank 1 on host" in done.err
    assert "restart 1 of 3: 3 ranks go on from step-00000008" in done.err
    assert "restart 2 of 3: 3 ranks go on from step-00000020" in done.err
    assert starts(tmp_path) == [0, 8, 20], "all generations write into one run folder"
    assert batches(tmp_path) == batches(undisturbed)
    assert sorted(chain.from_iterable(batches(tmp_path).values())) == sorted(3 * list(range(120))), (
        "each sample once an epoch"
    )
    assert difference(tmp_path, undisturbed) == 0, "the same number of ranks adds in the same order"
    report = json.loads((tmp_path / "run/report/report.json").read_text())
    assert report["steps"]["value"] == STEPS


def test_two_ranks_go_on_for_three_with_the_same_result(tmp_path: Path, undisturbed: Path) -> None:
    done = recovered(tmp_path, "--max-restarts", "1", "--on-failure", "shrink", "--", "4", "kill@14:2")
    assert done.code == 0, done.err
    assert "restart 1 of 1: 2 ranks go on from step-00000012" in done.err
    assert json.loads((tmp_path / "run/run.json").read_text())["world_size"] == 2
    assert batches(tmp_path) == batches(undisturbed)
    assert 0 < difference(tmp_path, undisturbed) <= 1e-12, "other sums, the same values"


@pytest.mark.long
def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path, undisturbed: Path) -> None:
    done = recovered(tmp_path, "--max-restarts", "1", "--", "0", "kill@3:0")
    assert done.code == 0, done.err
    assert "go on from the beginning, as there is no checkpoint yet" in done.err
    assert batches(tmp_path) == batches(undisturbed)
    assert difference(tmp_path, undisturbed) == 0


def test_a_batch_that_fails_again_ends_the_run_and_its_samples_are_named(tmp_path: Path, undisturbed: Path) -> None:
    done = recovered(tmp_path, "--max-restarts", "5", "--", "4", "kill@6:1!", ranks=2)
    assert done.code == 1
    assert done.err.count("restart ") == 1
    assert "it was killed by signal 9" in done.err
    assert "it failed in step 7, and had failed there in the same way before" in done.err
    lines = [
        line.split(" ") for rank in range(3) for line in (undisturbed / f"samples-{rank}").read_text().splitlines()
    ]
    order = [sample for step, _, samples in lines if step == "7" for sample in samples.split(",")]
    samples = f"samples {', '.join(order[BATCH // 2 :])} (batch 7 of epoch 1)"
    assert f"the last batch that rank 1 asked for had {samples}" in done.err
    assert "--resume run" in done.err


@pytest.mark.long
def test_a_rank_that_cannot_start_is_left_out(tmp_path: Path) -> None:
    done = recovered(tmp_path, "--max-restarts", "5", "--min-ranks", "2", "--", "0", "exit@-1:2!")
    assert done.code == 0, done.err
    assert "restart 1 of 5: 3 ranks" in done.err
    assert "restart 2 of 5 in 1 s: 2 ranks" in done.err
