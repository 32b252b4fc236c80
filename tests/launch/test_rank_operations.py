"""Ranks that wait for each other in different operations end soon, with both operations named.

Kind: Lightning-AI/pytorch-lightning#379 (evaluation, saving or a prediction on rank 0 only).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, torch, tutti
from torch import nn
from torch.utils.data import TensorDataset
job = tutti.Job(global_batch_size=8, seed=0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
data = TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, _, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss(), shuffle=False)
what = os.environ["WHAT"]
for epoch in job.epochs(1):
    for index, batch in enumerate(loader):
        job.step(batch)
        if index == 0 and job.is_main:
            if what == "break":
                break
            if what == "evaluate":
                job.evaluate(data)
"""


@pytest.mark.long
@pytest.mark.parametrize(("what", "said"), [("break", "job.epochs"), ("evaluate", "job.evaluate")])
def test_ranks_in_different_operations_are_named(what: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "tutti.cli.main",
        "run",
        "--nproc",
        "2",
        "--no-predict",
        "--folder",
        "run",
        "train.py",
    ]
    environment = {**os.environ, "WHAT": what}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    text = " ".join((ended.stdout + ended.stderr).split())
    assert ended.returncode == 2, text
    assert f"rank 0 is in {said} " in text
    assert "while rank 1 is in job.step (epoch 0, batch 2)" in text
    assert "Traceback" not in text
