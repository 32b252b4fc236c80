"""Dated result files: the measurement, the machine, its load, the versions and the commit."""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
QUICK_RESULTS = ROOT / "benchmarks" / "out"
WHOLE = ("summary", "configuration", "conditions")
"""Entries of a result file that are never summarised."""
DETAIL = frozenset(
    (
        "models",
        "clusters",
        "cluster",
        "plan",
        "phases",
        "predicted_phases",
        "predicted_low_s",
        "predicted_high_s",
        "visits_s",
        "warmup_s",
        "cpu_s",
        "pace",
    )
)
"""Entries of samples that a summary leaves out: specifications, and the details of a step's times."""
SAMPLES_NOTE = (
    "summarised: lists of four or more samples are given as count, minimum, quartiles and maximum; "
    "specifications and phases are left out"
)
DISTRIBUTIONS = ("torch", "numpy", "numba", "tutti", "tensorboardX", "pydantic")


def spread(values: list[float]) -> float:
    """(max - min) / median."""
    return (max(values) - min(values)) / median(values)


def load() -> float:
    """Return the number of runnable processes, averaged over the last minute."""
    return os.getloadavg()[0]


def conditions(load_at_start: float) -> dict[str, Any]:
    """Return machine, versions and commit, as they are when the suite ends."""
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
        "versions": {name: version_of(name) for name in DISTRIBUTIONS},
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
    }


def version_of(name: str) -> str:
    """Return a distribution's version; of tutti in a source tree, its own; "absent" without one."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        from tutti.config.version import VERSION

        return f"{VERSION} (source tree)" if name == "tutti" else "absent"


def document(
    suite: str, result: dict[str, Any], configuration: dict[str, Any], load_at_start: float, *, quick: bool
) -> dict[str, Any]:
    """Return one suite's result document, as of now."""
    return {
        "suite": suite,
        "evidence": "measured",
        "ended_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "conditions": conditions(load_at_start),
        "configuration": configuration,
        **result,
    }


def write(
    suite: str,
    result: dict[str, Any],
    configuration: dict[str, Any],
    load_at_start: float,
    *,
    quick: bool,
    samples: bool = False,
) -> Path:
    """Write one suite's dated file and return its path; further files of a day get a number.

    Args:
        suite: name of the suite, part of the file's name.
        result: what the suite measured; its `summary` is always written in full.
        configuration: sizes of the suite.
        load_at_start: runnable processes before the suite began.
        quick: write to `benchmarks/out`, which git ignores.
        samples: write every sample; otherwise lists of samples are written as quartiles.
    """
    made = document(suite, result, configuration, load_at_start, quick=quick)
    folder = QUICK_RESULTS if quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = free_path(folder, f"{datetime.now(UTC).date().isoformat()}-{suite}")
    path.write_text(as_text(made if samples else summarised(made)), encoding="utf-8")
    return path


def as_text(document: dict[str, Any]) -> str:
    """Return the document as JSON. An entry of at most 120 characters is written on one line."""
    return _lines(document, 0) + "\n"


def _lines(value: Any, depth: int) -> str:
    flat = json.dumps(value, allow_nan=False)
    if len(flat) + depth <= 120 or not isinstance(value, dict | list) or not value:
        return flat
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{pad}{json.dumps(str(key))}: {_lines(part, depth + 1)}" for key, part in value.items()]
    else:
        parts = [pad + _lines(part, depth + 1) for part in value]
    opened, closed = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return f"{opened}\n" + ",\n".join(parts) + f"\n{' ' * depth}{closed}"


def summarised(document: dict[str, Any]) -> dict[str, Any]:
    """Return a result document with quartiles instead of lists of samples; `WHOLE` entries do not change."""
    parts = {
        key: value if key in WHOLE else _summarised(value)
        for key, value in document.items()
        if key in WHOLE or not _is_detail(key, value)
    }
    return {**parts, "samples": {"note": SAMPLES_NOTE, **_as_dict(parts.get("samples"))}}


def _as_dict(samples: Any) -> dict[str, Any]:
    if samples is None:
        return {}
    return samples if isinstance(samples, dict) else {"all": samples}


def _summarised(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _summarised(part) for key, part in value.items() if not _is_detail(key, part)}
    if isinstance(value, list):
        numbers = _numbers(value)
        if numbers is not None:
            return quartiles(numbers) if len(numbers) >= 4 else value
        merged = _merged(value) if len(value) >= 4 else None
        return [_summarised(part) for part in value] if merged is None else {"rows": len(value), "each": merged}
    return _rounded(value)


def _is_detail(key: str, value: Any) -> bool:
    return key in DETAIL or (key == "plans" and isinstance(value, dict))


def _merged(rows: list[Any]) -> Any:
    """Merge rows of one structure into one row of quartiles; None if they differ in more than their numbers."""
    if all(isinstance(row, dict) for row in rows):
        if any(row.keys() != rows[0].keys() for row in rows):
            return None
        columns = {key: _merged([row[key] for row in rows]) for key in rows[0]}
        return None if any(column is None for column in columns.values()) else columns
    if all(isinstance(row, list) for row in rows):
        if any(len(row) != len(rows[0]) for row in rows):
            return None
        cells = [_merged(list(column)) for column in zip(*rows, strict=True)]
        return None if any(cell is None for cell in cells) else cells
    numbers = _numbers(rows)
    if numbers is not None:
        return quartiles(numbers)
    return (rows[0] if rows[0] is not None else "none") if all(row == rows[0] for row in rows) else None


def _numbers(values: list[Any]) -> list[float] | None:
    """Return the numbers of a list, or of a list of lists; None if it contains anything else."""
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    if flat and all(isinstance(item, int | float) and not isinstance(item, bool) for item in flat):
        return [float(item) for item in flat]
    return None


def quartiles(values: list[float]) -> dict[str, float]:
    """Return count, minimum, quartiles and maximum of samples; only the value if all are equal."""
    if len(values) < 2 or min(values) == max(values):
        return {"n": len(values), "median": _rounded(values[0])}
    low, middle, high = (_rounded(part) for part in quantiles(values, n=4, method="inclusive"))
    return {
        "n": len(values),
        "min": _rounded(min(values)),
        "q1": low,
        "median": middle,
        "q3": high,
        "max": _rounded(max(values)),
    }


def _rounded(value: Any) -> Any:
    """Round a float to six digits; return anything else unchanged."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def free_path(folder: Path, stem: str) -> Path:
    """Return `stem`.json in `folder`, or the first of `stem`-2.json, `stem`-3.json, ... that does not exist."""
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
