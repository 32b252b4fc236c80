"""Peers of `pays`: where they are installed, how to install them, and how they are run.

`python benchmarks/pays_peers.py [NAME ...]` installs them. Each has its own virtual environment in TUTTI_PEERS or
~/.cache/tutti-peers. A peer that is not installed gives a row "not installed".
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("TUTTI_PEERS") or Path.home() / ".cache" / "tutti-peers")
NAMES = ("horovod", "deepspeed", "hivemind")
SCRIPT = Path(__file__).with_name("pays_peer.py")
LIMIT_S = 300
"""Seconds for one peer's part; a longer one becomes a row that says so."""


def python_of(name: str) -> Path | None:
    """Return the Python interpreter that has a peer, or None."""
    path = FOLDER / name / "bin" / "python"
    return path if path.exists() and (FOLDER / name / "installed").exists() else None


def measured(name: str, lab: Any, model: str, data: Path, unit: dict[str, Any], output: Path) -> str | None:
    """Measure one peer on the ranks of a lab, which write to `output`. Returns None, or why the measurement is
    incomplete.
    """
    python = python_of(name)
    if python is None:
        return "not installed"
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "unit.json"
        listed.write_text(json.dumps(unit), encoding="utf-8")
        words = [str(python), str(SCRIPT), f"--peer={name}", f"--work={model}", f"--unit={listed}"]
        words += [f"--data={data}", f"--output={output}"]
        try:
            done = lab.run(words, environment={"OMP_NUM_THREADS": "1"}, cwd=Path(folder), timeout_s=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            return f"took longer than {LIMIT_S} s: {str(error.output or '').strip()[-300:]}"
    bad = [host for host in done if host.code]
    return ("\n".join(host.err[-1500:] for host in bad) or f"exit code {bad[0].code}") if bad else None


# Installing


def install(names: Sequence[str]) -> None:
    """Make the virtual environments, with the version of torch that tutti is tested with."""
    constraints = ROOT / "constraints.txt"
    torch = next(line for line in constraints.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    for name in names:
        folder = FOLDER / name
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, torch, *BASE[name]], check=True)
        INSTALL[name](pip, torch, folder)
        (folder / "installed").touch()
        print(f"{name}: installed in {folder}")


def _deepspeed(pip: list[str], torch: str, folder: Path) -> None:
    subprocess.run([*pip, "--no-build-isolation", torch, "deepspeed==0.19.8"], check=True)


def _hivemind(pip: list[str], torch: str, folder: Path) -> None:
    subprocess.run([*pip, torch, "hivemind==1.1.12"], check=True)


def _horovod(pip: list[str], torch: str, folder: Path) -> None:
    """Build Horovod from its sources for C++17, which torch's headers need; this takes about seven minutes on two
    cores.
    """
    source = folder / "source"
    source.mkdir(exist_ok=True)
    download = [*pip[:-2], "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
    subprocess.run([*download, "--dest", str(source), "horovod==0.28.1"], check=True)
    archive = next(source.glob("horovod-*.tar.gz"))
    subprocess.run(["tar", "-xzf", str(archive), "-C", str(source), "--strip-components=1"], check=True)
    for path in (source / "CMakeLists.txt", source / "horovod/torch/CMakeLists.txt"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 17"), encoding="utf-8")
    wanted = {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1",
              "HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MPI": "1", "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
              "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}  # fmt: skip
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", str(source)], check=True, env={**os.environ, **wanted})


INSTALL = {"horovod": _horovod, "deepspeed": _deepspeed, "hivemind": _hivemind}
BASE = {
    "horovod": ["numpy", "setuptools<81", "wheel", "cmake", "cloudpickle", "psutil", "pyyaml", "packaging"],
    "deepspeed": ["numpy", "setuptools", "wheel", "ninja", "psutil", "py-cpuinfo"],
    "hivemind": ["numpy", "setuptools<81"],
}

if __name__ == "__main__":
    install(sys.argv[1:] or NAMES)
