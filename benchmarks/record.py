"""What stands beside every measurement: the machine, its load, the versions, the commit; and the dated file."""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
QUICK_RESULTS = ROOT / "benchmarks" / "out"
DISTRIBUTIONS = ("torch", "numpy", "numba", "tutti", "tensorboardX", "pydantic")


def spread(values: list[float]) -> float:
    """(max - min) / median."""
    return (max(values) - min(values)) / median(values)


def load() -> float:
    """Runnable processes, averaged over the last minute."""
    return os.getloadavg()[0]


def conditions(load_at_start: float) -> dict[str, Any]:
    """Machine, versions and commit, as they were when the suite ended."""
    import psutil

    return {
        "processor": _processor(),
        "cores_granted": len(os.sched_getaffinity(0)),
        "cores_of_host": os.cpu_count(),
        "memory_nbytes": psutil.virtual_memory().total,
        "load_at_start": load_at_start,
        "load_at_end": load(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "versions": {name: metadata.version(name) for name in DISTRIBUTIONS},
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
    }


def write(
    suite: str, result: dict[str, Any], configuration: dict[str, Any], load_at_start: float, *, quick: bool
) -> Path:
    """Write one suite's dated file and return its path; a second one of a day gets a number."""
    now = datetime.now(UTC)
    document = {
        "suite": suite,
        "evidence": "measured",
        "ended_utc": now.isoformat(timespec="seconds"),
        "quick": quick,
        "conditions": conditions(load_at_start),
        "configuration": configuration,
        **result,
    }
    folder = QUICK_RESULTS if quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = free_path(folder, f"{now.date().isoformat()}-{suite}")
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def free_path(folder: Path, stem: str) -> Path:
    """`stem`.json in `folder`, or the first of `stem`-2.json, `stem`-3.json, ... that does not exist."""
    path, number = folder / f"{stem}.json", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}.json", number + 1
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _git(*arguments: str) -> str | None:
    run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else None
