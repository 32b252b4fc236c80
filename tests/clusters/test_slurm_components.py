"""Heterogeneous jobs, and tasks with a GPU of their own, on a real Slurm that counts files as GPUs."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters.command_rig import state, tutti
from launch.launch_rig import SCRIPTS, TUTTI, running, wait_until
from launch.slurm_rig import missing, own_slurm

needs_slurm = pytest.mark.skipif(missing() is not None, reason=str(missing()))

TRAIN = str(SCRIPTS / "train.py")

COMPONENTS = """
[slurm]
setup = ["export SEEN=$SLURM_PROCID-$CUDA_VISIBLE_DEVICES"]
[[slurm.components]]
nodes = 1
ranks = 2
gpus = 2
[[slurm.components]]
nodes = 1
ranks = 1
gpus = 1
constraint = "old"
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with own_slurm(scheduler="backfill", gpus=2, types=("a100", "t4")) as environment:
        yield {**environment, "XDG_CACHE_HOME": f"{environment['XDG_STATE_HOME']}/cache"}


@needs_slurm
@pytest.mark.slow
@pytest.mark.long
def test_a_job_of_two_kinds_of_nodes_trains_stops_and_goes_on(tmp_path: Path, cluster: dict[str, str]) -> None:
    (tmp_path / "tutti.toml").write_text(COMPONENTS.replace('constraint = "old"\n', ""))
    script = "import os\nprint('seen', os.environ['RANK'], os.environ['SEEN'], flush=True)\n"
    (tmp_path / "train.py").write_text(script + Path(TRAIN).read_text())
    words = ("--no-predict", "--folder", "run", "train.py", "200", "0.2")
    code, out, err = tutti(tmp_path, cluster, "submit", "--on", "slurm", "--json", *words)
    assert code == 0, err
    job = json.loads(out)["job"]

    def log() -> str:
        return "\n".join(file.read_text() for file in tmp_path.glob("run/*.out"))

    def step() -> int:
        return int(str(state(tmp_path, cluster, "run")["step"] or 0))

    assert wait_until(lambda: step() >= 2, 100), log() + str(state(tmp_path, cluster, "run"))
    found = state(tmp_path, cluster, "run")
    assert (found["state"], found["nodes"]) == ("running", "n0,n1")
    assert json.loads((tmp_path / "run/run.json").read_text())["world_size"] == 3
    seen = "".join((tmp_path / f"run/ranks/{rank}/stdout.log").read_text() for rank in range(3))
    assert [line for line in seen.splitlines() if line.startswith("seen")] == [
        "seen 0 0-0,1",
        "seen 1 0-0,1",
        "seen 2 1-0",
    ]
    subprocess.run(["scancel", "--signal=TERM", job], env={**cluster, "PATH": "/usr/bin:/bin"}, check=True)

    def starts() -> list[int]:
        rows = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        return [row["resumed_at_step"] for row in rows if row["kind"] == "start"]

    assert wait_until(lambda: len(starts()) == 2, 100), log() + str(state(tmp_path, cluster, "run"))
    assert starts()[1] >= 2
    code, _, err = tutti(tmp_path, cluster, "cancel", "--checkpoint", "run")
    assert code == 0, err
    code, _, err = tutti(tmp_path, cluster, "attach", "run")
    assert code == 75, err + log()


IMAGES = """\
import torch, tutti
from torch import nn
job = tutti.Job(global_batch_size=48, seed=0)
layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), *(nn.Conv2d(64, 64, 3, padding=1) for _ in range(3))]
model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 32 * 32, 10))
samples = torch.utils.data.TensorDataset(torch.randn(96, 3, 32, 32), torch.randint(10, (96,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = job.prepare(model, optimizer, samples, nn.functional.cross_entropy)
for epoch in job.epochs(1):
    for batch in loader:
        print("share", len(batch[0]), flush=True)
        job.step(batch)
"""

KINDS = """
[hardware]
gpus = { a100 = "A100-SXM4-80GB", t4 = "T4" }
links = "nvlink3,8*ib-hdr"
[[slurm.components]]
ranks = 1
gpus = "t4:1"
[[slurm.components]]
ranks = 2
gpus = "a100:2"
"""


def shares_of(run: Path) -> list[int]:
    """The samples of each rank in the first step."""
    logs = [(run / f"ranks/{rank}/stdout.log").read_text() for rank in range(3)]
    return [int(re.findall(r"^share (\d+)$", log, re.MULTILINE)[0]) for log in logs]


def losses(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "step"]


@pytest.mark.long
@needs_slurm
@pytest.mark.slow
def test_a_job_of_two_kinds_trains_by_the_plan_that_slurm_was_asked_for(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    (tmp_path / "tutti.toml").write_text(KINDS)
    (tmp_path / "train.py").write_text(IMAGES)
    code, out, err = tutti(
        tmp_path, cluster, "plan", "--on", "slurm", "--data-parallel", "--output", "p.json", "train.py"
    )
    assert code == 0, err
    assert "tutti run --on slurm --nnodes 2 --nproc 1,2 --plan p.json train.py" in out
    share = json.loads((tmp_path / "p.json").read_text())["shares"]
    assert share[0] < 0.8 < share[1] == share[2] == 1.0, "the first node is the one with the T4"
    words = ("run", "--on", "slurm", "--no-predict", "--no-progress")
    code, _, err = tutti(tmp_path, cluster, *words, "--folder", "planned", "--plan", "p.json", "train.py")
    assert code == 0, err
    assert "equal shares" not in err
    assert state(tmp_path, cluster, "planned")["nodes"] == "n1,n0"
    sizes = shares_of(tmp_path / "planned")
    assert sum(sizes) == 48
    assert all(abs(size - 48 * part / sum(share)) <= 1 for size, part in zip(sizes, share, strict=True))
    code, _, err = tutti(tmp_path, cluster, *words, "--folder", "equal", "train.py")
    assert code == 0, err
    assert err.count("all of its ranks get equal shares") == 1
    assert shares_of(tmp_path / "equal") == [16, 16, 16]
    assert losses(tmp_path / "planned") == pytest.approx(losses(tmp_path / "equal"), rel=1e-5)


@pytest.mark.long
@needs_slurm
@pytest.mark.slow
@pytest.mark.timeout(900)  # two nodes of one machine measure in turns
def test_the_nodes_of_a_job_of_two_kinds_are_measured_together(tmp_path: Path, cluster: dict[str, str]) -> None:
    (tmp_path / "tutti.toml").write_text(KINDS)
    (tmp_path / "train.py").write_text(IMAGES)
    code, _, err = tutti(tmp_path, cluster, "probe", "--on", "slurm", "--quick", "--no-plot")
    assert code == 0, err
    measured = json.loads((tmp_path / "cluster.json").read_text())
    assert measured["conditions"]["hosts"] == ["n1", "n0"], "in the order of the components"
    assert sum(node["count"] for node in measured["nodes"]) == 2
    assert {link["tier"] for link in measured["links"]} == {"node", "network"}
    words = ("plan", "--on", "slurm", "--data-parallel", "--json", "--output", "p.json", "train.py")
    code, out, err = tutti(tmp_path, cluster, *words)
    assert code == 0, err
    (pool,) = json.loads(out)["pools"]
    assert pool["nproc"] == [1, 2]
    assert pool["notes"][0].startswith("measured on n1, n0 at 20")
    words = ("run", "--on", "slurm", "--no-progress", "--folder", "run", "--plan", "p.json", "train.py")
    code, _, err = tutti(tmp_path, cluster, *words)
    assert code == 0, err
    assert (tmp_path / "run/prediction.json").exists(), "the job finds what was measured of its nodes"


@pytest.mark.long
@needs_slurm
@pytest.mark.slow
def test_each_task_of_srun_sees_a_gpu_of_its_own(tmp_path: Path, cluster: dict[str, str]) -> None:
    shown = "import os; print('gpu', os.environ['SLURM_PROCID'], os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
    script = tmp_path / "meet.py"
    script.write_text(f"{shown}\n{(SCRIPTS / 'meet.py').read_text()}")
    command = (
        "srun",
        "--nodes=2",
        "--ntasks=3",
        "--distribution=block",
        "--gpus-per-task=1",
        sys.executable,
        str(script),
    )
    with running(*command, cwd=tmp_path, environment=cluster) as run:
        code, out, err = run.finish()
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if line.startswith("gpu")) == ["gpu 0 0", "gpu 1 1", "gpu 2 0"]
    assert "trained on 3 ranks" in out


def test_the_script_of_a_job_of_two_kinds_is_shown(tmp_path: Path) -> None:
    (tmp_path / "tutti.toml").write_text(COMPONENTS)

    def shown(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*TUTTI, "submit", "--on", "slurm", *words, TRAIN],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    done = shown("--dry-run", "--request", "partition=gpu")
    first, second = done.stdout.split("#SBATCH hetjob\n")
    assert "--gpus-per-node=2\n" in first
    assert "--cpus-per-task=2\n" in first
    assert "--constraint=old\n" in second
    assert "--cpus-per-task=1\n" in second
    assert "#SBATCH --partition=gpu\n" in first
    assert "#SBATCH --partition=gpu\n" in second
    assert "srun --het-group=0,1 " in second
    plan = "`tutti plan --on slurm --request partition=gpu --output plan.json "
    assert done.stderr.count(plan) == 1, "shares are equal unless a plan says otherwise"
    assert "[[slurm.components]] has 2 nodes; leave one out" in shown("--nnodes", "3").stderr
    assert "contradicts the hosts, which have 2,1 ranks" in shown("--nproc", "2").stderr
    assert "Slurm has no arrays of heterogeneous jobs" in shown("--dry-run", "--array", "0-1").stderr
    (tmp_path / "tutti.toml").write_text(COMPONENTS.replace("ranks = 2\n", ""))
    assert "only some have `ranks`; give all of them one, or none" in shown().stderr
    equal = "[slurm]\ngpus = 2\n[[slurm.components]]\nranks = 2\n[[slurm.components]]\nranks = 2\ngpus = 2\n"
    (tmp_path / "tutti.toml").write_text(equal)
    assert shown("--dry-run").stderr == "", "components that ask for the same are nodes of one kind"
