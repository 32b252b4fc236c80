"""The heap of a pipeline of large layers and several microbatches: what a step needs, and no more with each step."""

import json
import os
import sys
from pathlib import Path

import pytest
from launch_rig import running

from tutti.config import serialization
from tutti.config.plan import BatchPlan, PipelinePlan, Plan

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="the allocator is glibc's"),
]
MB, STEPS, LAYER_MB = 2**20, 48, 16
SCRIPT = """
import json, os, resource
import torch
from torch.utils.data import TensorDataset
import tutti

torch.manual_seed(0)
widths = (784, 2048, 2048, 2048)
hidden = [part for a, b in zip(widths, widths[1:]) for part in (torch.nn.Linear(a, b), torch.nn.ReLU())]
model = torch.nn.Sequential(*hidden, torch.nn.Linear(2048, 10))
data = TensorDataset(torch.randn(512, 784), torch.randint(10, (512,)))
job = tutti.Job(global_batch_size=64, keep_checkpoints=0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
model, _, loader = job.prepare(model, optimizer, data, torch.nn.functional.cross_entropy)
seen = []
for _ in job.epochs(STEPS // 8):
    for batch in loader:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        job.step(batch)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        seen.append((resident, faults))
with open(f"seen-{os.environ['RANK']}.json", "w") as file:
    json.dump(seen, file)
"""


def seen_by(folder: Path, *launcher: str, **environment: str) -> list[list[tuple[int, int]]]:
    """(bytes resident, page faults) of each step, by rank, in 8 microbatches over 2 stages."""
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("STEPS", str(STEPS)))
    plan = Plan(batch=BatchPlan(global_batch_size=64, num_microbatches=8), mesh={"stage": 2}, pipeline=PipelinePlan())
    path = serialization.save(plan, folder / "plan.json")
    with running(*launcher, str(script), cwd=folder, environment={"TUTTI_PLAN": str(path), **environment}) as run:
        code, _, err = run.finish(timeout_s=200)
    assert code == 0, err
    assert "Exception ignored" not in err
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]


def test_a_step_asks_for_no_more_memory_than_the_one_before(tmp_path: Path) -> None:
    """By `tutti run`, which sets the allocator: the fullest rank grew by 100 MB a step without."""
    launcher = (sys.executable, "-m", "tutti.cli.main", "run", "--no-predict", "--plan", str(tmp_path / "plan.json"))
    for steps in seen_by(tmp_path, *launcher):
        early, late = (max(nbytes for nbytes, _ in part) for part in (steps[: STEPS // 2], steps[STEPS // 2 :]))
        assert late <= early + 8 * LAYER_MB * MB, steps  # a hole is lost now and then, not some of them in every step
        assert sum(faults for _, faults in steps[-8:]) / 8 < 2000, steps  # a layer of 16 MB has 4096 pages


def test_a_heap_that_grows_is_given_up(tmp_path: Path) -> None:
    """By a launcher that sets nothing: what a rank has stays within a few times what a step needs."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for steps in seen_by(tmp_path, *launcher, GLIBC_TUNABLES=""):
        needed = steps[1][0]
        assert max(nbytes for nbytes, _ in steps) < 4 * needed, steps
        assert steps[STEPS // 2][0] < 2 * needed, steps
