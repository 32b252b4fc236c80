"""Resuming beside damaged checkpoints, and disks that are full: what the ranks do, say, and exit with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoint.test_checkpoint_damage import RANK_FILE
from checkpoint.test_checkpoint_saving_multirank import names, sharded_job
from harness import run_ranks
from tutti.errors import DamagedCheckpointError


def save_thrice(folder: Path) -> None:
    job, _, loader = sharded_job(folder, keep_checkpoints=5)
    steps = iter(loader)
    for _ in range(3):
        job.step(next(steps))
        job.save()


def resume(folder: Path, path: Path) -> Any:
    """(step, what was said on rank 0), or the refusal; then one step more and a checkpoint."""
    said: list[str] = []
    from tutti.trainer.metrics import ProgressDisplay

    ProgressDisplay.say = lambda self, message: said.append(message)  # type: ignore[method-assign]
    try:
        job, _, loader = sharded_job(folder, resume=path, keep_checkpoints=2)
    except DamagedCheckpointError as error:
        return error.exit_code, str(error)
    begun = job._run().state.progress.step
    job.step(next(iter(loader)))
    job.save()
    return begun, next(sentence for sentence in said if "resumed from" in sentence)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 32
    file.write_bytes(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_ranks(save_thrice, 2, folder)
    return folder


def test_the_newest_sound_checkpoint_is_resumed_from(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made, tmp_path / "run"))
    flip(run / "checkpoints" / "step-00000003" / "rank-00001.safetensors")
    (run / "checkpoints" / "step-00000002" / RANK_FILE).unlink()
    ranks = run_ranks(resume, 2, run, run)
    assert [step for step, _ in ranks] == [1, 1]
    said = ranks[0][1]
    assert "resumed from" in said
    assert "at step 1; passed over step-00000003, which is damaged: rank-00001.safetensors: the values of" in said
    assert f"; passed over step-00000002, which is damaged: {RANK_FILE} is missing" in said
    # Step 2 was written again. Step 3 stays, as what could not be read may be sound, but it does not count as one kept.
    assert names(run) == ["step-00000001", "step-00000002", "step-00000003"]
    assert run_ranks(resume, 2, run, run)[0][0] == 2
    assert names(run) == ["step-00000002", "step-00000003"], "step 3, written again, counts"


def test_a_damaged_checkpoint_that_is_named_is_refused(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made, tmp_path / "run"))
    path = run / "checkpoints" / "step-00000003"
    flip(path / "rank-00001.safetensors")
    ranks = run_ranks(resume, 2, tmp_path / "again", path)
    assert ranks[0] == ranks[1]
    code, said = ranks[0]
    assert code == 2
    assert f"{path} is damaged: rank-00001.safetensors: the values of" in said


SCRIPT = """
import os, sys, torch, tutti
from torch import nn
from torch.utils.data import TensorDataset

job = tutti.Job(global_batch_size=8, folder=sys.argv[1], checkpoint_every=2, keep_checkpoints=0)
data = TensorDataset(torch.randn(64, 3), torch.arange(64) % 2)
model = nn.Linear(3, 2)
model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.functional.cross_entropy)
from tutti.checkpoint import save
write = save.write_tensors

def full(path, *items):
    if "step-00000002" not in str(path) and not (sys.argv[2] == "once" and "step-00000008" in str(path)):
        raise OSError(28, "No space left on device")
    return write(path, *items)

save.write_tensors = full
for epoch in job.epochs(1):
    for batch in loader:
        job.step(batch)
print("steps", job.global_step)
"""


@pytest.mark.parametrize(("how", "code"), [("always", 1), ("once", 0)])
def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path: Path, how: str, code: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TUTTI_")}
    done = subprocess.run(
        [sys.executable, "train.py", "run", how],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "steps 8" in done.stdout
    assert done.stderr.count("training goes on") == 1
    assert "checkpoint of step 4 could not be written" in done.stderr
    assert done.returncode == code, done.stderr
    if code:
        assert names(tmp_path / "run") == ["step-00000002"]
        assert "checkpoint of step 8" in done.stderr.splitlines()[-1]
    else:
        assert names(tmp_path / "run") == ["step-00000008"]
