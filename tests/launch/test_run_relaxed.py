"""A run that chooses how to send less: the plan that it made runs, and verifies."""

from dataclasses import replace
from pathlib import Path

import pytest
from launch_rig import TUTTI, running

from cost_model.examples import cluster, link
from tutti.config import serialization
from tutti.config.plan import Plan
from tutti.config.run_folder import RunFolder

SCRIPT = """
import torch, tutti
torch.manual_seed(0)
job = tutti.Job(global_batch_size=64)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 4))
x = torch.randn(256, 64)
data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
model, _, loader = job.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), data, torch.nn.functional.cross_entropy
)
for epoch in job.epochs(30):
    for batch in loader:
        job.step(batch)
print("accuracy", job.evaluate(data, {"a": lambda output, target: (output.argmax(1) == target).double()})["a"])
"""


@pytest.mark.long
@pytest.mark.parametrize(("dial", "mode"), [("reduced", "synchronous"), ("relaxed", "local")])
def test_what_is_chosen_runs_and_verifies(tmp_path: Path, dial: str, mode: str) -> None:
    """Where messages cost much and bytes nothing, only fewer messages help: replicas that differ."""
    (tmp_path / "train.py").write_text(SCRIPT)
    wire = link(bandwidth=1e5, latency_s=1e-6) if dial == "reduced" else link(bandwidth=1e9, latency_s=0.1)
    machines = str(serialization.save(replace(cluster(links=(wire,))), tmp_path / "cluster.json"))
    command = (*TUTTI, "run", "--nproc", "2", "--relax", dial, "--cluster", machines, "--folder", "run", "train.py")
    with running(*command, cwd=tmp_path) as run:
        code, out, err = run.finish(140)
        run.assert_nothing_left()
    assert code == 0, err
    assert f"as --relax {dial} allows" in err
    plan = serialization.load(Plan, RunFolder(tmp_path / "run").plan)
    assert plan.world_size == 2
    assert plan.sync.mode == mode
    assert (plan.sync.compress is not None) == (mode == "synchronous")
    assert float(out.split()[-1]) > 0.7
    with running(*TUTTI, "verify", "--plan", "run/plan.json", "train.py", cwd=tmp_path) as run:
        code, out, err = run.finish(140)
    assert code == 0, out + err
