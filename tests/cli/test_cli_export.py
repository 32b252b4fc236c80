"""`tutti export`: a run's newest checkpoint as a plain file, and what it says where there is none."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tutti.cli.main import cli
from tutti.errors import CheckpointError, SpecError


def export(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, arguments)], catch_exceptions=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    job = tutti.Job(global_batch_size=4, folder=folder)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    _, _, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy)
    for _ in job.epochs(1):
        for batch in loader:
            job.step(batch)
    torch.save([model.state_dict(), optimizer.state_dict()], folder / "expected.pt")
    return folder


def test_a_run_becomes_a_plain_file(run: Path, tmp_path: Path) -> None:
    model, optimizer = torch.load(run / "expected.pt")
    done = export(run, "--to", tmp_path / "m.safetensors", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["nbytes"] == (tmp_path / "m.safetensors").stat().st_size
    assert said["checkpoint"].endswith("step-00000002")
    for name, value in safetensors.torch.load_file(tmp_path / "m.safetensors").items():
        assert torch.equal(value, model[name])
    assert export(run / "checkpoints" / "step-00000002", "--to", tmp_path / "m.pt").exit_code == 0
    assert torch.equal(torch.load(tmp_path / "m.pt")["weight"], model["weight"])
    assert export(run, "--to", tmp_path / "both.pt", "--optimizers").exit_code == 0
    both = torch.load(tmp_path / "both.pt")
    assert both["optimizers"][0]["param_groups"] == optimizer["param_groups"]
    for place, state in optimizer["state"].items():
        assert torch.equal(both["optimizers"][0]["state"][place]["momentum_buffer"], state["momentum_buffer"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both.pt", "m.pt", "m.safetensors"]


def test_what_cannot_be_exported_says_why(run: Path, tmp_path: Path) -> None:
    for arguments, words in [
        ((run, "--to", tmp_path / "m.bin"), "ends in .safetensors or .pt"),
        ((run, "--to", tmp_path / "m.safetensors", "--optimizers"), "--optimizers needs --to FILE.pt"),
        ((run, "--to", run / "expected.pt"), "expected.pt exists"),
        ((run, "--to", tmp_path / "no" / "m.pt"), "is not a folder"),
        ((tmp_path / "no", "--to", tmp_path / "m.pt"), "does not exist"),
    ]:
        done = export(*arguments)
        assert isinstance(done.exception, SpecError)
        assert words in str(done.exception)
    done = export(tmp_path, "--to", tmp_path / "m.pt")
    assert isinstance(done.exception, CheckpointError)
    assert "holds no checkpoint" in str(done.exception)
