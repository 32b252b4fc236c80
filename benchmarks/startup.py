"""Time from a command's start until all its ranks have done their first collective: tutti run beside torchrun.

Both run the same two scripts: a plain one that joins a process group and all-reduces, and one whose Job makes a
training step. The commands take turns, so that disturbances of the machine affect all of them. All clocks are those
of one host.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import spread
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeSpec

PLAIN = """
import os, time
import torch
import torch.distributed as dist

dist.init_process_group(
    "gloo",
    init_method=os.environ.get("TUTTI_RENDEZVOUS", "env://"),
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
dist.all_reduce(torch.ones(1))
with open(os.path.join(os.environ["STARTUP_FOLDER"], os.environ["RANK"]), "w") as file:
    file.write(repr(time.time()))
"""

JOB = """
import os, time
import torch
from torch import nn
import tutti

job = tutti.Job(global_batch_size=64, folder=os.path.join(os.environ["STARTUP_FOLDER"], "run"))
model = nn.Linear(8, 1)
samples = torch.utils.data.TensorDataset(torch.zeros(64, 8), torch.zeros(64, 1))
model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), samples, nn.MSELoss())
for batch in loader:
    job.step(batch)
with open(os.path.join(os.environ["STARTUP_FOLDER"], os.environ["RANK"]), "w") as file:
    file.write(repr(time.time()))
"""

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
TUTTI = (sys.executable, "-m", "tutti.cli.main", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """`repeats` starts of `ranks` ranks by each command."""

    ranks: int = 8
    repeats: int = 5


QUICK = Sizes(ranks=2, repeats=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One command for one script.

    Attributes:
        name: its name in the table.
        script: file name of the script.
        predicted: `tutti run` predicts the step first.
        against: the variant of torchrun with the same script; None for torchrun's own.
    """

    name: str
    script: str
    predicted: bool = False
    against: str | None = None

    def command(self, ranks: int, folder: Path) -> tuple[str, ...]:
        """Return the command line; `folder` holds the scripts and a cluster file."""
        script = str(folder / self.script)
        if self.against is None:
            return (*TORCHRUN, "--nproc-per-node", str(ranks), script)
        predict = ("--cluster", str(folder / "cluster.json")) if self.predicted else ("--no-predict",)
        return (*TUTTI, "--nproc", str(ranks), *predict, "--folder", str(folder / "run"), script)


VARIANTS = (
    Variant(name="torchrun, all-reduce", script="plain.py"),
    Variant(name="tutti run, all-reduce", script="plain.py", against="torchrun, all-reduce"),
    Variant(name="torchrun, Job step", script="job.py"),
    Variant(name="tutti run, Job step", script="job.py", against="torchrun, Job step"),
    Variant(name="tutti run, Job step, predicted", script="job.py", predicted=True, against="torchrun, Job step"),
)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Time all variants in turns. Returns {"samples": {variant: [seconds]}, "summary": {variant: ..}}."""
    samples: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
    for _ in range(sizes.repeats):
        for variant in VARIANTS:
            samples[variant.name].append(first_collective_s(variant, sizes.ranks))
    return {"samples": samples, "summary": {variant.name: summary(variant, samples) for variant in VARIANTS}}


def summary(variant: Variant, samples: dict[str, list[float]]) -> dict[str, Any]:
    """Return median, spread, and the ratios of medians to torchrun with the same script and with the plain one."""
    median_s = statistics.median(samples[variant.name])
    plain = statistics.median(samples[VARIANTS[0].name])
    return {
        "median_s": median_s,
        "spread": spread(samples[variant.name]),
        "ratio_to_torchrun": median_s / statistics.median(samples[variant.against]) if variant.against else None,
        "ratio_to_torchrun_all_reduce": median_s / plain,
    }


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table."""
    header = ["command", "median s", "spread", "of torchrun, same script", "of torchrun, all-reduce"]
    table = []
    for name, entry in result["summary"].items():
        same = "" if entry["ratio_to_torchrun"] is None else f"{entry['ratio_to_torchrun']:.2f}"
        plain = f"{entry['ratio_to_torchrun_all_reduce']:.2f}"
        table.append([name, f"{entry['median_s']:.2f}", f"{entry['spread']:.0%}", same, plain])
    return header, table


def first_collective_s(variant: Variant, ranks: int, timeout_s: float = 300) -> float:
    """Return the seconds from the command's start until the last rank has finished its first collective."""
    folder = Path(tempfile.mkdtemp(prefix="startup-"))
    try:
        (folder / "plain.py").write_text(PLAIN)
        (folder / "job.py").write_text(JOB)
        serialization.save(any_cluster(ranks), folder / "cluster.json")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "STARTUP_FOLDER": str(folder)}
        started = time.time()
        done = subprocess.run(
            variant.command(ranks, folder), cwd=folder, env=environment, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
        ends = [folder / str(rank) for rank in range(ranks)]
        if not all(end.exists() for end in ends):
            raise RuntimeError(
                f"{variant.name}: not every rank finished its collective (exit code {done.returncode}):\n{done.stderr}"
            )
        return max(float(end.read_text()) for end in ends) - started
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def any_cluster(ranks: int) -> ClusterSpec:
    """Return a cluster with invented rates, so that predictions need no measurement; the rates do not matter here."""
    device = DeviceSpec(
        name="cpu", kind="cpu", memory_nbytes=2**34, memory_bandwidth_bytes_per_s=1e10,
        peak_flops_per_s={"float32": 1e11}, cores=ranks, source="made up", evidence="assumed",
    )  # fmt: skip
    link = LinkSpec(tier="node", latency_s=1e-4, bandwidth_bytes_per_s=1e9, source="made up", evidence="assumed")
    node = NodeSpec(name="host", device="cpu", devices_per_node=ranks, memory_nbytes=2**34)
    return ClusterSpec(name="made up", devices={"cpu": device}, nodes=(node,), links=(link,))
