"""`tutti checkpoint list|verify|prune`, and which checkpoints of a run stay."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn
from torch.utils.data import TensorDataset

from harness import run_ranks
from tutti import Job
from tutti.checkpoint.retention import BestMetric, Retention, parse_best
from tutti.cli.main import cli
from tutti.errors import PlanError, TuttiError

VALUES = [3.0, 1.0, 2.0, 4.0]


def train(folder: Path, every: int | None, **options: Any) -> None:
    """Four epochs of one step; the evaluations give VALUES."""
    os.environ["TUTTI_RUN_FOLDER"] = str(folder)
    job = Job(global_batch_size=8, checkpoint_every=every, **options)
    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    model = nn.Linear(3, 2)
    _, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.functional.cross_entropy)
    for epoch in job.epochs(4):
        for batch in loader:
            job.step(batch)
        job.evaluate(data, {"score": lambda output, target, epoch=epoch: torch.full((len(output),), VALUES[epoch])})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_ranks(train_with, 1, folder, 1, {"keep_checkpoints": 9})
    return folder


def train_with(folder: Path, every: int | None, options: dict[str, Any]) -> None:
    train(folder, every, **options)


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["checkpoint", *map(str, arguments)])


def damage(run: Path, step: int) -> None:
    file = run / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())


def test_list_has_the_values_of_evaluations(run: Path) -> None:
    entries = json.loads(command("list", run, "--json").stdout)["checkpoints"]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4]
    assert [entry["values"]["test/score"] for entry in entries] == VALUES
    assert {entry["world_size"] for entry in entries} == {1}
    (run / "checkpoints" / "step-00000003" / "index.json").unlink()
    shown = command("list", run)
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert "1 rank" in lines[0]
    assert "test/score=3" in lines[0]
    assert "DAMAGED: index.json is missing" in lines[2]


def test_verify_names_what_is_damaged(run: Path) -> None:
    assert command("verify", run).exit_code == 0
    damage(run, 2)
    done = command("verify", run, "--json")
    assert done.exit_code == 1
    found = {Path(entry["path"]).name: entry["damage"] for entry in json.loads(done.stdout)["checkpoints"]}
    assert found.pop("step-00000002") == (
        "rank-00000.safetensors: the values of 'model/bias' are not those that were saved"
    )
    assert set(found.values()) == {None}
    assert command("verify", run / "checkpoints" / "step-00000001").exit_code == 0
    assert command("verify", run / "checkpoints" / "step-00000002").exit_code == 1


def test_prune_leaves_the_newest_sound_ones_and_the_best(run: Path) -> None:
    damage(run, 4)
    done = command("prune", run, "--keep", 1, "--best", "score:min", "--json")
    assert done.exit_code == 0
    assert steps(run) == [2, 3]
    assert len(json.loads(done.stdout)["removed"]) == 2
    damage(run, 2)
    damage(run, 3)
    refused = command("prune", run, "--keep", 1)
    assert isinstance(refused.exception, TuttiError)
    assert "no checkpoint" in str(refused.exception)
    assert steps(run) == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--keep", 0), "keep 1 checkpoint or more"),
        (("--keep", 1, "--best", "score"), "such as 'val/loss:min'"),
        (("--keep", 1, "--best", "other:max"), "was evaluated at its step"),
    ],
)
def test_prune_refuses(run: Path, arguments: tuple[object, ...], says: str) -> None:
    refused = command("prune", run, *arguments)
    assert says in str(refused.exception)
    assert steps(run) == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["list", "verify"])
def test_a_folder_without_checkpoints_is_refused(tmp_path: Path, name: str) -> None:
    assert "holds no checkpoint" in str(command(name, tmp_path).exception)


@pytest.mark.parametrize(("every", "best", "kept"), [(None, "test/score:min", [2, 4]), (1, "score:max", [4])])
def test_the_best_by_a_metric_stays(tmp_path: Path, every: int | None, best: str, kept: list[int]) -> None:
    run_ranks(train_with, 1, tmp_path, every, {"keep_checkpoints": 1, "keep_best": best})
    assert steps(tmp_path) == kept


def paths(*numbers: int) -> list[Path]:
    return [Path(f"step-{number:08d}") for number in numbers]


def test_what_is_superfluous() -> None:
    best = BestMetric(metric="loss", mode="min")
    assert Retention(keep=2).superfluous(paths(1, 2, 3)) == paths(1)
    assert Retention(keep=1).superfluous(paths(1, 9, 3), paths(3)[0]) == paths(1, 9)
    assert Retention(keep=1, best=best, values={1: 2.0, 2: 1.0, 7: 0.0}).superfluous(paths(1, 2, 3)) == paths(1)
    damaged = Retention(keep=1, passed_over=set(paths(3)))
    assert damaged.superfluous(paths(1, 2, 3)) == paths(1)
    assert Retention(keep=5, passed_over=set(paths(9))).superfluous(paths(1, 3, 9), paths(3)[0]) == []


@pytest.mark.parametrize("text", ["loss", "loss:", ":min", "loss:best", ""])
def test_a_metric_needs_a_direction(text: str) -> None:
    with pytest.raises(PlanError, match="keep_best"):
        parse_best(text, "keep_best")
