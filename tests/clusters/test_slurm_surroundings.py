"""What lies between Slurm and `tutti run` on a real cluster: other users, containers, setup lines, other folders."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tutti as package
from clusters.command_rig import tutti
from launch.launch_rig import SCRIPTS
from launch.slurm_rig import missing, slurm
from tutti.clusters.slurm_node import enter
from tutti.errors import LaunchError

needs_slurm = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SYSTEMS_PYTHON = Path("/usr/bin/python{}.{}".format(*sys.version_info))

PYTHONPATH = os.pathsep.join(
    [str(Path(package.__file__).parent.parent), *(path for path in sys.path if path.endswith("site-packages"))]
)
"""By which another interpreter of this version finds tutti and torch."""

IMAGE = """#!/bin/bash
[ "$1" = --nv ] || exit 9
shift
exec unshare --mount bash -c '
mkdir -p "$1" && mount --rbind / "$1" && mount -t tmpfs tmpfs "$1/opt" && mkdir "$1/opt/python" &&
cp {python} "$1/opt/python/python" && root=$1 && shift && exec chroot "$root" "$@"' image "{base}/root" "$@"
"""
"""A container whose root is another one, with Python in another place; it begins in its own working directory."""


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(base: Path) -> Iterator[dict[str, str]]:
    with slurm(base) as environment:
        yield {**environment, "XDG_STATE_HOME": str(base)}


def project_in(base: Path, name: str, settings: str) -> Path:
    """A folder that everybody may enter, with a script and a tutti.toml."""
    folder = base / name
    folder.mkdir()
    shutil.copy(SCRIPTS / "train.py", folder)
    (folder / "tutti.toml").write_text(f'[run]\non = "slurm"\nnnodes = 2\n[slurm]\n{settings}\n')
    return folder


WORDS = ("run", "--no-predict", "--nproc", "1", "--folder", "my run", "train.py", "1", "0")


def assert_trained_on_two(folder: Path, out: str) -> dict[str, object]:
    assert out == "epoch 0 of 2 ranks\n"
    header: dict[str, object] = json.loads((folder / "my run/run.json").read_text())
    assert header["world_size"] == 2
    return header


@needs_slurm
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not SYSTEMS_PYTHON.exists(), reason=f"there is no {SYSTEMS_PYTHON} that everybody may run")
def test_a_user_who_is_not_root(base: Path, cluster: dict[str, str]) -> None:
    folder = project_in(base, "of daemon", f'python = "{SYSTEMS_PYTHON}"')
    shutil.chown(folder, "daemon", "daemon")
    (base / "home").mkdir()
    shutil.chown(base / "home", "daemon", "daemon")
    environment = {
        **os.environ, **cluster, "HOME": str(base / "home"), "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1",
        "XDG_STATE_HOME": str(base / "home"), "USER": "daemon",
    }  # fmt: skip
    done = subprocess.run(
        ["setpriv", "--reuid=daemon", "--regid=daemon", "--clear-groups", SYSTEMS_PYTHON, "-m", "tutti", *WORDS],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    logs = "".join(file.read_text() for file in folder.glob("my run/slurm-*.out"))
    assert done.returncode == 0, done.stderr + logs
    assert_trained_on_two(folder, done.stdout)
    assert {path.owner() for path in (folder / "my run").rglob("*")} == {"daemon"}


@needs_slurm
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not SYSTEMS_PYTHON.exists(), reason=f"there is no {SYSTEMS_PYTHON} for the image")
def test_a_container_with_a_root_of_its_own(base: Path, cluster: dict[str, str]) -> None:
    folder = project_in(
        base, "in an image",
        f'container = "\'{base}/my image\' --nv"\npython = "/opt/python/python"\n'
        f'setup = ["module() {{ export LOADED=$2; }}", "module load cuda/12", "export PYTHONPATH={PYTHONPATH}"]',
    )  # fmt: skip
    image = base / "my image"
    image.write_text(IMAGE.format(python=SYSTEMS_PYTHON, base=base))
    image.chmod(0o755)
    with (folder / "train.py").open("a") as script:
        script.write("import os\nprint('in', sys.executable, os.environ['LOADED'], os.getcwd(), flush=True)\n")
    code, out, err = tutti(folder, cluster, *WORDS)
    logs = "".join(file.read_text() for file in folder.glob("my run/slurm-*.out"))
    assert code == 0, err + logs
    epoch, place = out.splitlines()
    assert_trained_on_two(folder, f"{epoch}\n")
    assert place == f"in /opt/python/python cuda/12 {folder}"


@needs_slurm
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('container = "env -u SLURM_PROCID"', "does not get Slurm's variables, which say which of 2 nodes it is"),
        ('setup = ["true", "module load cuda"]', "tutti: setup line 2 failed on "),
    ],
)
def test_what_keeps_a_node_from_its_part_is_said(
    base: Path, cluster: dict[str, str], settings: str, said: str, request: pytest.FixtureRequest
) -> None:
    folder = project_in(base, f"refused {request.node.callspec.indices['settings']}", settings)
    code, _, err = tutti(folder, cluster, *WORDS)
    assert code == 2, err
    assert said in err
    assert "Traceback" not in err


def test_a_directory_that_a_node_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=r"does not see .*none of the machine .*apptainer: --bind PATH"):
        enter(str(tmp_path), str(tmp_path / "none"))
    (tmp_path / "below").mkdir()
    enter(str(tmp_path / "below"), str(tmp_path))
    assert Path.cwd() == tmp_path / "below"
