"""Torch's distributed checkpoint format: written from checkpoints, and taken as initial weights."""

import json
import os
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tutti
from tutti.checkpoint import dcp, export_dcp, import_dcp, to_state_dict
from tutti.cli.main import cli
from tutti.errors import CheckpointError


class Tied(nn.Module):
    """Weights of several dtypes, a tied one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, dtype=torch.float64)
        self.middle = nn.Linear(4, 4, dtype=torch.float64)
        self.norm = nn.LayerNorm(4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 7, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.norm(self.middle(self.embed(x)).bfloat16()).double()
        return self.head(hidden)


def tokens() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.TensorDataset(*(torch.randint(7, (16,), generator=generator) for _ in range(2)))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    plain = [p for name, p in model.named_parameters() if "norm" not in name]
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    return torch.optim.AdamW([{"params": plain}, {"params": norms, "weight_decay": 0.0}], lr=0.01)


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, nn.Module, Any, Any]:
    monkeypatch.setenv("TUTTI_RUN_FOLDER", str(folder))
    torch.manual_seed(11 + len(options))
    model = Tied()
    optimizer = make_optimizer(model)
    job = tutti.Job(global_batch_size=8, seed=0)
    _, _, loader = job.prepare(model, optimizer, tokens(), nn.functional.cross_entropy, **options)
    return job, model, optimizer, loader


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    """(run folder, model, optimizer) after two steps and a save."""
    job, model, optimizer, loader = prepared(tmp_path / "run", monkeypatch)
    for batch in loader:
        job.step(batch)
    job.save()
    return tmp_path / "run", model, optimizer


def assert_same_bits(got: Any, expected: Any) -> None:
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def test_torch_loads_an_exported_checkpoint_bit_for_bit(trained: Any, tmp_path: Path) -> None:
    run, model, optimizer = trained
    nbytes = export_dcp(run, tmp_path / "dcp")
    assert nbytes == sum(file.stat().st_size for file in (tmp_path / "dcp").iterdir())
    fresh = Tied()
    fresh_optimizer = make_optimizer(fresh)
    for parameter in fresh.parameters():
        parameter.grad = torch.zeros_like(parameter)
    fresh_optimizer.step()
    names, states = get_state_dict(fresh, fresh_optimizer)
    state = {"model": names, "optimizer": states}
    torch_dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(fresh, fresh_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert fresh.head.weight is fresh.embed.weight
    for name, value in model.state_dict().items():
        assert_same_bits(fresh.state_dict()[name], value)
    expected, got = optimizer.state_dict(), fresh_optimizer.state_dict()
    assert got["param_groups"] == expected["param_groups"]
    for number, values in expected["state"].items():
        for key, value in values.items():
            assert_same_bits(got["state"][number][key], value)


def test_a_plain_model_loads_an_export_without_optimizers(trained: Any, tmp_path: Path) -> None:
    run, model, _ = trained
    export_dcp(run, tmp_path / "dcp", optimizers=False)
    state = {"model": Tied().state_dict()}
    torch_dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, value in model.state_dict().items():
        assert_same_bits(state["model"][name], value)


def test_an_export_streams_one_tensor_at_a_time(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[weakref.ref[torch.Tensor]] = []
    most, read_whole = 0, dcp.read_whole

    def counted(*args: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(one() is not None for one in read))
        tensor = read_whole(*args)
        read.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(dcp, "read_whole", counted)
    export_dcp(trained[0], tmp_path / "dcp")
    assert len(read) >= 6
    assert most <= 1


@pytest.mark.parametrize("wrap", [lambda state: {"model": state, "optimizer": {}}, lambda state: state])
def test_a_job_starts_with_weights_that_torch_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Any], Any]
) -> None:
    torch.manual_seed(5)
    saved = Tied()
    torch_dcp.save(wrap(saved.state_dict()), checkpoint_id=tmp_path / "dcp", no_dist=True)
    _, model, _, _ = prepared(tmp_path / "run", monkeypatch, weights=tmp_path / "dcp")
    for name, value in saved.state_dict().items():
        assert_same_bits(model.state_dict()[name], value)


def test_an_exported_checkpoint_is_imported_as_plain_files(trained: Any, tmp_path: Path) -> None:
    run, _, _ = trained
    export_dcp(run, tmp_path / "dcp")
    expected = to_state_dict(run)["model"]
    assert import_dcp(tmp_path / "dcp", tmp_path / "m.safetensors") == (tmp_path / "m.safetensors").stat().st_size
    import_dcp(tmp_path / "dcp", tmp_path / "m.pt")
    for got in (load_file(tmp_path / "m.safetensors"), torch.load(tmp_path / "m.pt", weights_only=True)):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert_same_bits(got[name], value)


def test_what_cannot_be_converted_is_refused(trained: Any, tmp_path: Path) -> None:
    run, _, _ = trained
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there exists; name another folder"):
        export_dcp(run, tmp_path / "there")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export_dcp(tmp_path / "there", tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="could not be written"):
        export_dcp(run, run / "checkpoints" / "step-00000002" / "index.json" / "dcp")
    torch_dcp.save({"optimizer": {"x": torch.zeros(2)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(CheckpointError, match="holds no model"):
        import_dcp(tmp_path / "other", tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="metadata cannot be read"):
        import_dcp(tmp_path / "nowhere", tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_the_command_converts_there_and_back(trained: Any, tmp_path: Path) -> None:
    run, model, _ = trained
    folder, file = str(tmp_path / "dcp"), tmp_path / "m.safetensors"
    exported = CliRunner().invoke(cli, ["checkpoint", "export", str(run), "--to-dcp", folder, "--json"])
    assert exported.exit_code == 0, exported.output
    assert json.loads(exported.output)["written"] == folder
    assert CliRunner().invoke(cli, ["checkpoint", "import", folder, "--to", str(file)]).exit_code == 0
    assert_same_bits(load_file(file)["embed.weight"], model.state_dict()["embed.weight"])
    again = CliRunner().invoke(cli, ["checkpoint", "import", folder, "--to", str(file)])
    assert again.exit_code == 2
    assert "exists; name another file" in again.output


class _Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


def test_metadata_that_runs_code_or_leads_outside_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch_dcp.save({"model": {"weight": torch.ones(2, 3)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    file = tmp_path / "dcp" / ".metadata"
    whole = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(CheckpointError, match=r"holds the Python object (posix|nt)\.system"):
        dcp.open_dcp(tmp_path / "dcp")
    assert not (tmp_path / "exploded").exists()
    for storage in whole.storage_data.values():
        storage.relative_path = "../outside.distcp"
    file.write_bytes(pickle.dumps(whole))
    with pytest.raises(CheckpointError, match="which lies outside"):
        dcp.open_dcp(tmp_path / "dcp")
