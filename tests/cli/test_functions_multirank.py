"""`tutti.run`, `verify`, `report` and `notebook` with ranks of this machine."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tutti
from tutti.config.run_report import RunReport
from tutti.errors import PlanError, ScriptError, TrainingError

TRAIN = """
import sys

import torch
from torch import nn

import tutti

SCALE = 3.0


def make(width):
    torch.manual_seed(0)
    return nn.Linear(width, 2)


def train(epochs, batch=8, callbacks=None):
    job = tutti.Job(global_batch_size=batch, callbacks=callbacks)
    model = make(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.arange(128.0).reshape(32, 4) / 128 * SCALE, torch.arange(32) % 2)
    model, optimizer, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy)
    for _ in job.epochs(epochs):
        for batch in loader:
            job.step(batch)
    print(f"rank {job.rank} is done")
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


if __name__ == "__main__" and len(sys.argv) > 1:
    train(int(sys.argv[1]), *map(int, sys.argv[2:]))
"""

BESIDE = """
from pathlib import Path

text = Path("beside.txt").read_text()


class Text(str):
    pass
"""

NOTEBOOK = (
    TRAIN
    + """
import beside

WORD = beside.Text("by value of a class of the module")


def with_a_module(word):
    train(1)
    return [beside.text, word, WORD, type(word) is beside.Text]


def wrong():
    values = {"loss": 1.0}
    return values["missing"]


class Interrupts:
    def on_step_end(self, job, step, loss):
        raise KeyboardInterrupt


def interrupted(epochs):
    train(epochs, callbacks=Interrupts())


class Silent:
    def __reduce__(self):
        raise RuntimeError("it stays here")


def plain(epochs):
    model = make(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.arange(128.0).reshape(32, 4) / 128 * SCALE, torch.arange(32) % 2
    return model, inputs


if __name__ == "__main__":
    run = tutti.notebook(train, 1)
    alone = tutti.notebook(train, 1, nproc=1, folder="alone", verbose=False)
    for name, value in run.value.items():
        torch.testing.assert_close(value, alone.value[name], rtol=1e-5, atol=1e-7)
    assert not torch.equal(run.value["weight"], make(4).weight)
    assert run.report.system.ranks.value == 2 and (run.folder / "ranks" / "1" / "stdout.log").is_file()
    beside_it = tutti.notebook(with_a_module, WORD, nproc=1, verbose=False)
    assert beside_it.value == ["in the notebook's folder", WORD, WORD, True]
    kept = Silent()
    for function, arguments in ((wrong, ()), (lambda: kept, ()), (train, (1, -8)), (interrupted, (1,))):
        try:
            tutti.notebook(function, *arguments, nproc=1, verbose=False)
        except tutti.TuttiError as error:
            print("REFUSED", type(error).__name__, error)
"""
)


def test_functions_run_verify_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    report = tutti.run("train.py", [1], nproc=2, folder="run", predict=False)
    assert isinstance(report, RunReport)
    assert report.system.ranks.value == 2
    assert report == tutti.report("run")
    verdict = tutti.verify(script, ["1"], steps=2)
    assert verdict.passed, verdict.sentence
    with pytest.raises(PlanError, match=r"all 2 ranks .* failed"):
        tutti.run("train.py", [1, -8], nproc=2, predict=False)
    script.write_text("raise KeyError('weights')\n")
    with pytest.raises(TrainingError, match=r"(?s)train.py\", line 1.*KeyError: 'weights'"):
        tutti.run(script, nproc=1, predict=False)
    script.write_text("x = 1\n")
    with pytest.raises(ScriptError, match=r"train.py ended without preparing a tutti.Job"):
        tutti.run(script, nproc=1, predict=False)
    script.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(TrainingError, match=r"train.py hangs on 1 rank: it showed no progress for 0.5 s"):
        tutti.verify(script, timeout=0.5)
    assert capfd.readouterr() == ("", "")


def test_a_function_of_main_trains_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "cells.py").write_text(NOTEBOOK)
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "beside.txt").write_text("in the notebook's folder")
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rank 0 is done\nREFUSED TrainingError rank 0 on host ")
    first, second, third, fourth = done.stdout.split("REFUSED ")[1:]
    assert 'cells.py", line' in first
    assert "in wrong\n    return values" in first
    assert "KeyError: 'missing'" in first
    assert first.count('File "') == 1, "only the function's own frames"
    assert second.startswith("ScriptError lambda cannot be sent to the ranks (RuntimeError: it stays here)")
    assert third.startswith("PlanError")
    assert fourth.count('File "') == 3, "interrupted, train and on_step_end, and no line of tutti's"
    assert "in on_step_end\n    raise KeyboardInterrupt" in fourth


CELLS = (
    TRAIN,
    "run = tutti.notebook(train, 1)",
    "print(type(run.report).__name__, sorted(run.value))",
    "def wrong():\n    return {}['missing']\n\ntutti.notebook(wrong, nproc=1)",
)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("ipykernel") is None, reason="needs ipykernel")
def test_a_function_of_a_cell_trains_in_a_kernel(tmp_path: Path) -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(cwd=str(tmp_path), env=dict(os.environ))
    texts: list[str] = []

    def take(message: dict) -> None:  # type: ignore[type-arg]
        content = message["content"]
        texts.append(content.get("text") or json.dumps(content.get("traceback", "")))

    try:
        for cell in CELLS:
            client.execute_interactive(cell, timeout=100, output_hook=take)
    finally:
        manager.shutdown_kernel(now=True)
    shown = "".join(texts)
    assert "rank 0 is done" in shown
    assert "RunReport ['bias', 'weight']" in shown
    assert "in wrong" in shown
    assert "KeyError: 'missing'" in shown
    assert "commands/notebook.py" not in shown
