"""Time from the death of a rank to the next completed step: `tutti run --max-restarts`, from memory or a checkpoint.

One rank kills itself between two steps. The others go on from their memory, or all ranks are started again from the
newest checkpoint; with a new rank in its place, or without. The last variant divides the state (ZeRO-3) and goes on
from a checkpoint in the node's memory; for how long training waits for such a checkpoint is told, too.
The time ends when the first step is complete on every rank that has not been completed before. All clocks are those of
one host.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import spread

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
import tutti

KILL_AT, LAST = 10, 12
job = tutti.Job(global_batch_size=48)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
samples = torch.utils.data.TensorDataset(torch.randn(4800, 64), torch.zeros(4800, dtype=torch.long))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = job.prepare(model, optimizer, samples, nn.CrossEntropyLoss())
for batch in loader:
    if job.global_step == KILL_AT and job.rank == job.world_size - 1 and not os.path.exists("killed"):
        with open("killed", "w") as file:
            file.write(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    job.step(batch)
    if job.global_step == KILL_AT and sys.argv[1:] != ["unsaved"]:
        job.save()
    if job.global_step == KILL_AT + 1:
        with open(f"next-{job.rank}", "w") as file:
            file.write(repr(time.time()))
    if job.global_step == LAST:
        break
"""

TUTTI = (sys.executable, "-m", "tutti.cli.main", "run", "--no-predict", "--max-restarts", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """`repeats` deaths in runs of `ranks` ranks, for each variant."""

    ranks: int = 4
    repeats: int = 5


QUICK = Sizes(ranks=2, repeats=1)

IN_MEMORY = "shard level 3, checkpoint in memory"

VARIANTS = {
    f"{way}, {on_failure}": ("--recover", way, "--on-failure", on_failure)
    for way in ("memory", "checkpoint")
    for on_failure in ("replace", "shrink")
} | {IN_MEMORY: ("--mesh", "shard={ranks}", "--shard", "level=3", "--memory-checkpoint-every", "4")}
"""Options of each variant. The checkpoint in memory is of step 8, so that two steps are made again, and are counted."""


def measure(sizes: Sizes) -> dict[str, Any]:
    """Time all variants in turns. Returns {"samples": {variant: [seconds]}, "summary": {variant: ..}}."""
    samples: dict[str, list[float]] = {name: [] for name in VARIANTS}
    stalls: list[float] = []
    for _ in range(sizes.repeats):
        for name, options in VARIANTS.items():
            seconds, stalled = recovery_s(tuple(option.format(ranks=sizes.ranks) for option in options), sizes.ranks)
            samples[name].append(seconds)
            stalls += stalled
    summary = {
        name: {"median_s": statistics.median(seconds), "spread": spread(seconds)} for name, seconds in samples.items()
    }
    summary[IN_MEMORY]["stall_s"] = statistics.median(stalls)
    return {"samples": samples, "summary": summary}


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table."""
    table = [
        [
            name,
            f"{entry['median_s']:.2f}",
            f"{entry['spread']:.0%}",
            f"{1e3 * entry['stall_s']:.0f}" if "stall_s" in entry else "",
        ]
        for name, entry in result["summary"].items()
    ]
    return ["after the death", "median s", "spread", "stall of a checkpoint ms"], table


def recovery_s(options: tuple[str, ...], ranks: int, timeout_s: float = 300) -> tuple[float, list[float]]:
    """Return the seconds from the death of a rank until every rank has completed the next step, and stalls.

    The stalls are the seconds for which training waited for each checkpoint in memory.
    """
    folder = Path(tempfile.mkdtemp(prefix="recover-"))
    try:
        (folder / "script.py").write_text(SCRIPT)
        in_memory = "--memory-checkpoint-every" in options
        script = ("script.py", "unsaved") if in_memory else ("script.py",)
        command = (*TUTTI, "--folder", "run", "--nproc", str(ranks), *options, *script)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        ends = list(folder.glob("next-*"))
        if (
            done.returncode
            or len(ends) != ranks - (options[-1] == "shrink")
            or in_memory != (" from memory (" in done.stderr)
        ):
            raise RuntimeError(f"the run did not recover (exit code {done.returncode}):\n{done.stderr}")
        killed = float((folder / "killed").read_text())
        rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        stalls = [row["duration_s"] for row in rows if row["kind"] == "memory_checkpoint" and "duration_s" in row]
        return max(float(end.read_text()) for end in ends) - killed, stalls
    finally:
        shutil.rmtree(folder, ignore_errors=True)
