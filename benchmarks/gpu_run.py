"""What a part of the GPU suite is given: the device, the sizes and its deadline; and how it runs a command."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_script.py"

Row = dict[str, Any]
"""One measurement. "what" names it; "ok" says whether it reached its aim; "skipped" says why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRun:
    """One run of a part.

    Attributes:
        device: kind of the device, "cuda" or "cpu".
        tiny: the sizes of a rehearsal.
        deadline: when the part has to end, on the monotonic clock.
        folder: a private folder.
    """

    device: str
    tiny: bool
    deadline: float
    folder: Path

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        """Start a command in the part's folder, with the source tree on its path."""
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        settings = {"PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "160"} | hidden | environment
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=self.folder,
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def output(self, process: subprocess.Popen[str], limit_s: float) -> tuple[int, str]:
        """Wait for a command; returns its exit code and output. One that takes too long is ended: code 124."""
        try:
            text, _ = process.communicate(timeout=max(0.1, min(limit_s, self.left_s())))
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                text, _ = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                text, _ = process.communicate()
            return 124, text
        return process.returncode, text


def skipped(what: str, reason: str) -> Row:
    """Return the row of what this machine, or this version, lacks."""
    return {"what": what, "skipped": reason}


def last_line(text: str) -> str:
    """Return the last line of an output that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:300]


def until_deadline(run: PartRun, names: Sequence[str], needed_s: float) -> Iterator[str | Row]:
    """Yield each name, and a "skipped" row instead of those for which too little time is left."""
    for name in names:
        yield name if run.left_s() > needed_s else skipped(name, f"less than {needed_s:g} s were left")
