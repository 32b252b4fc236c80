"""`tutti.run(on="slurm")`, `tutti.submit` and `tutti.attach` as functions, on a real Slurm of two nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import tutti
from launch.launch_rig import SCRIPTS, wait_until
from launch.slurm_rig import missing, own_slurm
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan
from tutti.config.run_report import RunReport
from tutti.errors import LaunchError, TrainingError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

TRAIN = SCRIPTS / "train.py"

QUIET = {"predict": False, "nproc": 1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with own_slurm() as environment:
        yield {**environment, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def project(tmp_path: Path, cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_on_slurm_returns_its_report_and_prints_nothing(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = Plan(mesh={"replicate": 2}, batch=BatchPlan(global_batch_size=16))
    report = tutti.run(
        TRAIN, [1, 0], on="slurm", nnodes=2, plan=plan, folder="run", predict=False, settings={"partition": "urgent"}
    )
    assert isinstance(report, RunReport)
    assert Path(report.folder) == project / "run"
    assert serialization.load(Plan, project / "run/plan.json").mesh == {"replicate": 2}
    assert serialization.load(Plan, project / "run/given-plan.json") == plan, "a value is a file for the nodes"
    assert capfd.readouterr() == ("", "")
    again = tutti.attach("run")
    assert again.status().state == "completed"
    assert again.logs(rank=0) == "epoch 0 of 2 ranks\n"
    waited = again.wait(timeout=5)
    assert waited is not None
    assert waited.headline == report.headline


@pytest.mark.long
def test_a_submitted_run_is_followed_stopped_and_gone_on_with(project: Path) -> None:
    job = tutti.submit(TRAIN, [200, 0.1], on="slurm", folder="run", grace=10, **QUIET)
    assert (job.scheduler, job.folder) == ("slurm", project / "run")
    assert f"#SBATCH --output={project}/run/slurm-%j.out\n" in job.preview
    assert wait_until(lambda: (job.status().step or 0) >= 2, 60), job.logs()
    with pytest.raises(TimeoutError, match=r"has not ended in 0\.1 s; it goes on"):
        job.wait(timeout=0.1)
    job.cancel(checkpoint=True)
    with pytest.raises(TrainingError, match="stopped with a checkpoint; go on with resume="):
        job.wait(timeout=60)
    report = tutti.run(TRAIN, [1, 0], on="slurm", resume=job.folder, **QUIET)  # type: ignore[arg-type]
    assert report is not None
    with pytest.raises(LaunchError, match="has ended already"):
        tutti.attach(job.folder).cancel()


def test_failures_and_refusals_are_errors_with_the_sentence(project: Path) -> None:
    (project / "bad.py").write_text("raise ValueError('boom')\n")
    job = tutti.submit("bad.py", on="slurm", folder="bad", **QUIET)
    with pytest.raises(TrainingError, match=r"slurm job \d+ of bad: failed(?s:.*)ValueError: boom"):
        job.wait(timeout=100)
    shown = tutti.submit(
        TRAIN, ["--lr", 0.1], on="slurm", nnodes=2, nproc=[2, 2], mesh={"replicate": 4}, compress="top-k,density=0.1",
        time_limit=90, checkpoint_every=5, frugal=True, predict=False, settings={"gpus": 2}, dry_run=True,
    )  # fmt: skip
    assert shown.job == ""
    assert "#SBATCH --gpus-per-node=2\n" in shown.preview
    words = "--nproc 2,2 --mesh replicate=4 --compress top-k,density=0.1 --no-predict --frugal --checkpoint-every 5"
    assert all(word in shown.preview for word in words.split()), shown.preview
    assert f"--time-limit 90s -- {TRAIN} --lr 0.1" in shown.preview
    ranged = tutti.submit(TRAIN, on="slurm", nnodes="1:2", nproc=2, max_restarts=2, predict=False, dry_run=True)
    assert "#SBATCH --nodes=1-2\n" in ranged.preview, "as on the command line"
    assert "--nproc 2 --no-predict --max-restarts 2" in ranged.preview
    with pytest.raises(LaunchError, match="dry_run submits nothing"):
        shown.status()
    with pytest.raises(TypeError, match=r"'nprocs'; tutti\.run has no such option"):
        tutti.submit(TRAIN, on="slurm", nprocs=2)
    for options, said in (
        ({"settings": {"partition": "no"}}, "`sinfo --summarize` lists the partitions"),
        ({"settings": {"speed": 9}}, "slurm has no setting 'speed'"),
        ({"hosts": "a,b"}, "--hosts is for --on ssh"),
        ({"rendezvous": "a:1"}, "leave --rendezvous and --node-rank out"),
        ({"node_rank": 0}, "leave --rendezvous and --node-rank out"),
        ({"nproc": "x"}, "nproc='x' is not a number"),
    ):
        with pytest.raises(LaunchError, match=said):
            tutti.run(TRAIN, [1, 0], on="slurm", folder="no", **{**QUIET, **options})  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="give on='slurm'"):
        tutti.run(TRAIN, settings={"partition": "x"})
    with pytest.raises(LaunchError, match="is no submitted run"):
        tutti.attach(project)
