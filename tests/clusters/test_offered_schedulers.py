"""Schedulers of other packages, installed as far as Python can tell: a module and its dist-info folder on the path."""

import os
import subprocess
from pathlib import Path

import pytest

from launch.launch_rig import TUTTI

QUEUE = '''
import json, subprocess, sys
from pathlib import Path

from tutti.clusters.cluster_job import JobStatus


class Queue:
    """Runs a job at once, and waits for it."""

    def nodes(self, settings, nnodes):
        return ()

    def preview(self, request):
        return f"queue {request.settings['lane']}: {' '.join(request.words)}\\n"

    def submit(self, request):
        words = ["run", "--on", "local", "--folder", str(request.folder), *request.words]
        with open(self.log(request, "1"), "w") as log:
            done = subprocess.run([sys.executable, "-m", "tutti.cli.main", *words], stdout=log, stderr=log)
        (request.folder / "code").write_text(str(done.returncode))
        return str(request.folder)

    def log(self, request, job):
        return str(request.folder / "queue.log")

    def status(self, job):
        code = int((Path(job) / "code").read_text())
        return JobStatus(state="failed" if code else "completed", exit_code=code)

    def collect(self, job):
        return False

    def stop(self, job):
        pass

    cancel = stop
'''


def install(site: Path, package: str, entry_points: str, **modules: str) -> None:
    """Install a distribution of version 1.2 into a folder of Python's path."""
    info = site / f"{package}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[tutti.schedulers]\n{entry_points}\n")
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)


def tutti_with(site: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of tutti where a folder's packages are installed."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [*TUTTI, *words], cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_scheduler_of_another_package_runs_a_job(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "their-queue", "queue = their_queue:Queue", their_queue=QUEUE)
    (tmp_path / "train.py").write_text("print('trained', flush=True)\n")
    (tmp_path / "tutti.toml").write_text('[run]\non = "queue"\n[queue]\nlane = "fast"\n')
    shown = tutti_with(site, tmp_path, "run", "--dry-run", "--nproc", "1", "train.py")
    assert (shown.returncode, shown.stdout) == (0, "queue fast: --nproc 1 train.py\n"), shown.stderr
    done = tutti_with(site, tmp_path, "run", "--no-predict", "--nproc", "1", "--folder", "run", "train.py")
    assert "queue job" in done.stderr
    assert "trained" in (tmp_path / "run/queue.log").read_text()
    listed = tutti_with(site, tmp_path, "status", "run")
    assert "run: " in listed.stderr
    assert "(queue job" in listed.stderr
    without = tutti_with(tmp_path / "nowhere", tmp_path, "submit", "train.py")
    assert without.returncode == 2
    assert "tutti.toml: queue: there is no scheduler of this name; correct it, or install the package" in without.stderr


@pytest.mark.parametrize(
    ("entry_points", "module", "name", "said"),
    [
        ("queue = their_queue:Queue", "import no_such", "queue",
         "package their-queue 1.2 offers it as their_queue:Queue, which cannot be loaded (ModuleNotFoundError: "
         "No module named 'no_such'); correct or reinstall that package"),
        ("queue = their_queue:Queue", "def Queue():\n    raise OSError('no\\nlicence')", "queue",
         "(OSError: no licence); correct or reinstall"),
        ("queue = their_queue:Queue", "class Queue:\n    def nodes(self): ...\n    def stop(self): ...", "queue",
         "their_queue:Queue of package their-queue 1.2 is no scheduler, as it has no cancel, collect, log, preview, "
         "status, submit; ask for a version that fits"),
        ("slurm = their_queue:Queue", QUEUE, "slurm",
         "package their-queue 1.2 (their_queue:Queue) offers a scheduler by this name, which is tutti's own"),
        ("queue = their_queue:Queue", QUEUE, "lsf",
         "there is no scheduler 'lsf'; schedulers are slurm, ssh, "),
    ],
)  # fmt: skip
def test_what_is_no_scheduler_is_refused(tmp_path: Path, entry_points: str, module: str, name: str, said: str) -> None:
    install(tmp_path / "site", "their-queue", entry_points, their_queue=module)
    (tmp_path / "train.py").touch()
    done = tutti_with(tmp_path / "site", tmp_path, "submit", "--on", name, "train.py")
    assert done.returncode == 2
    assert said in done.stderr
    assert name != "lsf" or done.stderr.endswith(", queue\n"), "the package's is named, too"
    assert len(done.stderr.splitlines()) == 1, "one sentence"


def test_two_packages_of_one_name_are_refused(tmp_path: Path) -> None:
    for package in ("their-queue", "other-queue"):
        install(tmp_path / "site", package, "queue = their_queue:Queue", their_queue=QUEUE)
    (tmp_path / "train.py").touch()
    done = tutti_with(tmp_path / "site", tmp_path, "submit", "--on", "queue", "train.py")
    assert done.returncode == 2
    assert "each offer a scheduler by this name; uninstall all but one" in done.stderr
    for package in ("their-queue", "other-queue"):
        assert f"package {package} 1.2 (their_queue:Queue)" in done.stderr
