"""`--share-device`: `run`, `verify` and `notebook` with two ranks on one device of the tests."""

from pathlib import Path

import pytest

import fakegpu
import tutti
from fakegpu import needs_fakegpu
from tutti.config import serialization
from tutti.config.plan import Plan
from tutti.config.run_folder import RunFolder, RunHeader
from tutti.errors import LaunchError, ScriptError

SCRIPT = f"""
import sys

sys.path.insert(0, {str(Path(fakegpu.__file__).parents[1])!r})

import fakegpu

fakegpu.load()

import torch
from torch import nn

import tutti

job = tutti.Job(global_batch_size=8)
model = nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
numbers = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(32, 10, generator=numbers), torch.randint(4, (32,), generator=numbers)
data = torch.utils.data.TensorDataset(inputs, targets)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy)
for _ in job.epochs(1):
    for batch in loader:
        job.step(batch)
assert next(model.parameters()).device.type == "fakegpu"
"""

pytestmark = [needs_fakegpu, pytest.mark.long]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_ranks_share_a_device_only_where_it_is_asked_for(script: Path, tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"two ranks would compute on one device \(ranks .* --share-device"
    ) as refused:
        tutti.run(script, nproc=2, predict=False)
    assert str(refused.value).count("two ranks") == 1
    report = tutti.run(script, nproc=2, share_device=True, checkpoint_every=2, folder=tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert report is not None
    header = serialization.load(RunHeader, folder.header)
    assert (header.backend, header.extra["shared_devices"]) == ("staged", "1")
    assert header.command.startswith("tutti run --nproc 2 --share-device")
    assert serialization.load(Plan, folder.plan).share_device
    assert report.system.devices.value == 1
    assert "FUNCTION-NOT-SPEED" in {finding.code for finding in report.findings}
    again = tutti.run(folder.plan.parent / "../train.py", plan=folder.plan, predict=False, folder=tmp_path / "again")
    assert again is not None  # the plan says that ranks share a device


@pytest.mark.parametrize("mesh", ["shard=2", "split=2"])
def test_ranks_that_share_a_device_compute_what_one_device_computes(script: Path, mesh: str) -> None:
    verdict = tutti.verify(script, mesh=mesh, share_device=True, timeout=30)
    assert verdict.passed, verdict.sentence


def test_verify_refuses_shared_devices_by_name(script: Path) -> None:
    with pytest.raises(ScriptError, match=r"refused on 2 ranks, so there is nothing to compare: .*--share-device"):
        tutti.verify(script, nproc=2, timeout=30)
