"""`make gpu` runs on a machine with torch and a source tree: rehearsed on the CPU until only the device is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


def suite(*arguments: str, folder: Path, timeout_s: float = 110) -> tuple[int, str]:
    """Run the suite in a folder of its own, without the variables that would find an installed tutti first."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    run = subprocess.run(
        command, cwd=folder, env=environment | HIDDEN, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return run.returncode, run.stdout + run.stderr


def result_in(folder: Path) -> Any:
    (file,) = folder.glob("*-gpu-cpu.json")
    return json.loads(file.read_text(encoding="utf-8"))


def test_a_machine_without_a_gpu_is_told_what_it_would_do(tmp_path: Path) -> None:
    code, out = suite("speed,memory", "--output", str(tmp_path), folder=tmp_path)
    assert code == 0, out
    assert "has no GPU" in out
    assert "beside allocated and reserved" in out
    assert not list(tmp_path.glob("*.json"))


def test_unknown_parts_are_refused(tmp_path: Path) -> None:
    code, out = suite("spede", folder=tmp_path)
    assert code == 2
    assert "unknown part spede" in out


@pytest.mark.long
def test_the_parts_of_one_rank_run_on_the_cpu(tmp_path: Path) -> None:
    parts = "correct,speed,prediction"
    code, out = suite(parts, "--rehearse", "--output", str(tmp_path), folder=tmp_path)
    assert code == 0, out
    result = result_in(tmp_path)
    summary = result["summary"]
    assert list(summary) == parts.split(",")
    assert summary["correct"]["reached"] == 7
    assert not any(part["missed"] or part["ended"] for part in summary.values()), out
    rows = {row["what"]: row for part in result["parts"].values() for row in part["rows"]}
    assert rows["gpt, one rank against CPU float64"]["difference"] < 1e-12
    assert rows["gpt, bf16: tutti"]["ratio"] > 0
    assert result["conditions"]["versions"]["tutti"]


@pytest.mark.long
def test_every_part_runs_on_the_cpu(tmp_path: Path) -> None:
    code, out = suite("--rehearse", "--output", str(tmp_path), folder=tmp_path, timeout_s=390)
    assert code == 0, out
    result = result_in(tmp_path)
    assert result["summary"]["share"] == {"reached": 1, "missed": 0, "skipped": 0, "ended": ""}
    assert result["summary"]["kernels"]["reached"] == 18
    rows = {row["what"]: row for part in result["parts"].values() for row in part["rows"]}
    assert rows["offload parameters"]["tokens_per_s"] > 0


BARE = """
import importlib.metadata, sys

real = importlib.metadata.version

def version(name):
    if name == "tutti":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

importlib.metadata.version = version
sys.path[:0] = [{src!r}, {benchmarks!r}]
import tutti, record
from tutti.profile.probe.host_facts import versions
from tutti.trainer import run_header
from tutti.reporting import html_report
from tutti.commands import calibrate
from tutti.cli.main import cli
assert tutti.__file__.startswith({src!r}), tutti.__file__
print(versions()["tutti"], record.version_of("tutti"), tutti.__version__)
cli(["--version"])
"""


def test_a_source_tree_knows_its_version_without_an_installed_package(tmp_path: Path) -> None:
    code = BARE.format(src=str(ROOT / "src"), benchmarks=str(ROOT / "benchmarks"))
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    stated = next(
        line.split('"')[1] for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version")
    )
    assert run.stdout.split()[:2] == [stated, stated]
    assert f"version {stated}" in run.stdout


def test_spans_of_time() -> None:
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
    from gpu_offload import merged, overlap

    kernels = merged([(2.0, 3.0), (0.0, 1.0), (0.5, 2.0), (5.0, 6.0)])
    assert kernels == [(0.0, 3.0), (5.0, 6.0)]
    assert overlap((1.0, 5.5), kernels) == 2.5
