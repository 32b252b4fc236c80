"""The progress bar of a Job that python started: on a terminal, on rank 0, and beside what the script prints."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tutti.trainer.metrics import ProgressDisplay

SCRIPT = """
import torch
from torch.utils.data import TensorDataset
import tutti
job = tutti.Job(global_batch_size=4, folder="run")
model = torch.nn.Linear(3, 1)
data = TensorDataset(torch.ones(16, 3), torch.ones(16, 1))
model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, torch.nn.MSELoss())
for epoch in job.epochs(2):
    for batch in loader:
        job.step(batch)
    job.print("a result that is longer than the terminal is wide, so that wrapping at words would change it", epoch)
"""


def display(*, rank: int = 0, wanted: bool = True, supervised: bool = False) -> tuple[Any, io.StringIO]:
    world: Any = SimpleNamespace(is_main=rank == 0)
    shown = ProgressDisplay(world, supervised=supervised, wanted=wanted)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    shown._console = console
    shown._watched = shown.speaks and wanted and not supervised
    return shown, screen


@pytest.mark.parametrize(
    ("options", "drawn"), [({}, True), ({"rank": 1}, False), ({"wanted": False}, False), ({"supervised": True}, False)]
)
def test_who_sees_a_bar(options: Any, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown, screen = display(**options)
    shown.step(3, 10, 1.25, 100.0, "samples")
    shown.close()
    assert ("3/10" in screen.getvalue()) is drawn


def test_a_bar_on_a_terminal_leaves_printed_lines_whole(tmp_path: Path) -> None:
    """Standard output goes to a file and standard error to a terminal: the file has the lines, unchanged."""
    (tmp_path / "train.py").write_text(SCRIPT)
    main, terminal = pty.openpty()
    with (tmp_path / "out.txt").open("w") as out:
        done = subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            stdout=out,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "60"},
        )
        os.close(terminal)
        screen = b""
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            screen += part
    assert done.wait(60) == 0, screen
    assert "/8" in screen.decode()
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert [line[-1] for line in lines] == ["0", "1"]
    assert all(line.startswith("a result that is longer") for line in lines)
