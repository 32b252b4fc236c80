"""`make gpu`: what one GPU can prove of tutti, in parts that can be named, in at most 8 minutes.

python benchmarks/gpu.py                     all parts, from the source tree
python benchmarks/gpu.py correct,speed       some of them
python benchmarks/gpu.py --rehearse          every part's code on the CPU, in tiny sizes
python benchmarks/gpu.py --wheels .whl       with a folder of wheels that this Python lacks

It runs on a machine without a network whose Python has torch: tutti is taken from the source tree. After each part a
dated file is written, with the device in its name, so that an interrupted run keeps what it has measured.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT / name) for name in ("src", "benchmarks", "examples", "tests")]
sys.path[:0] = PATHS
TOTAL_S = 480.0
REHEARSAL_TOTAL_S = 240.0
NEEDED = ("torch", "numpy", "pydantic", "click", "rich", "psutil", "tensorboardX", "safetensors", "filelock", "numba")
"""Packages without which no part runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the suite: its module has `measure(run)`, which yields rows.

    Attributes:
        limit_s: seconds after which it is ended.
        proves: what it is for.
    """

    name: str
    module: str
    limit_s: float
    proves: str


PARTS = (
    Part(name="correct", module="gpu_correct", limit_s=60, proves="one rank on the device against the CPU in float64"),
    Part(name="share", module="gpu_share", limit_s=120, proves="ranks that share the device, verified on every axis"),
    Part(name="memory", module="gpu_memory", limit_s=90, proves="predicted memory beside allocated and reserved"),
    Part(name="speed", module="gpu_speed", limit_s=120, proves="steps beside a plain loop, Accelerate and Fabric"),
    Part(name="prediction", module="gpu_predicted", limit_s=90, proves="predicted step times beside measured ones"),
    Part(name="offload", module="gpu_offload", limit_s=90, proves="a model larger than the device"),
    Part(name="kernels", module="gpu_kernels", limit_s=60, proves="codecs and attention: bits and bandwidth"),
    Part(name="precision", module="gpu_precision", limit_s=45, proves="loss curves of all precisions"),
    Part(name="scaling", module="gpu_scaling", limit_s=90, proves="1 to 16 CPU ranks beside DDP"),
)
"""In order of worth."""


def main() -> int:
    """Run the parts; returns 1 if a measurement missed its aim or a part failed, else 0."""
    args = _arguments()
    if args.wheels is not None:
        _install(args.wheels)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"this Python lacks {', '.join(missing)}: put their wheels into a folder and add --wheels FOLDER")
        return 2
    device = "cpu" if args.rehearse else _accelerator()
    parts = [part for part in PARTS if not args.parts or part.name in args.parts]
    if device == "cpu" and not args.rehearse:
        print("this machine has no GPU; with one, this would measure:")
        for part in parts:
            print(f"  {part.name:<11} {part.proves} (at most {part.limit_s:.0f} s)")
        print("add --rehearse (make gpu REHEARSE=1) to run every part's code on the CPU, in tiny sizes")
        return 0
    return _run(parts, device, rehearse=args.rehearse, output=args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(part.name for part in PARTS)}; all if none")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, in tiny sizes")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to unpack for this run")
    parser.add_argument("--output", type=Path, help="folder for the result file")
    args = parser.parse_args()
    args.parts = [name for group in args.parts for name in group.split(",") if name]
    unknown = set(args.parts) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(part.name for part in PARTS)}")
    return args


def _install(folder: Path) -> None:
    """Unpack the wheels where this process, and those that it starts, find them. Nothing is installed."""
    import zipfile

    target = Path(tempfile.mkdtemp(prefix="tutti-wheels-"))
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    sys.path.append(str(target))
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(target)]).strip(os.pathsep)


def _accelerator() -> str:
    """Return the kind of device, asked in a process of its own: one that has used CUDA cannot be forked."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_tell_accelerator, args=(sender,))
    process.start()
    kind, name = receiver.recv() if receiver.poll(60) else ("cpu", "")
    process.join(10)
    os.environ["TUTTI_GPU_NAME"] = name
    return str(kind)


def _tell_accelerator(sender: Any) -> None:
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    name = torch.get_device_module(kind).get_device_name() if kind is not None else ""
    sender.send((kind.type if kind is not None else "cpu", name))


def _run(parts: list[Part], device: str, *, rehearse: bool, output: Path | None) -> int:
    import record

    name = os.environ.get("TUTTI_GPU_NAME") or device
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    folder = output or (record.QUICK_RESULTS if rehearse else record.RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = record.free_path(folder, f"{datetime.now(UTC).date().isoformat()}-gpu-{slug}")
    began, load = time.monotonic(), record.load()
    total = REHEARSAL_TOTAL_S if rehearse else TOTAL_S
    results: dict[str, dict[str, Any]] = {}
    importlib.import_module("tutti.trainer.job")  # once, before the parts are forked
    for part in parts:
        left = total - (time.monotonic() - began)
        print(f"== {part.name}: {part.proves} [{time.monotonic() - began:.0f} s]", flush=True)
        with _interrupted(results, part.name):
            results[part.name] = _one(part, device, min(part.limit_s, left), tiny=rehearse)
        configuration = {"device": name, "tiny": rehearse, "parts": [part.name for part in parts]}
        result = {"summary": _summary(results), "parts": results}
        document = record.document("gpu", result, configuration, load, quick=rehearse)
        path.write_text(record.as_text(document), encoding="utf-8")
        if "interrupted" in results[part.name]:
            break
    print(f"written: {path} [{time.monotonic() - began:.0f} s]")
    return 0 if all(entry["missed"] == 0 and not entry["ended"] for entry in _summary(results).values()) else 1


@contextlib.contextmanager
def _interrupted(results: dict[str, dict[str, Any]], name: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        results[name] = {"rows": [], "ended": "interrupted", "interrupted": True, "seconds": 0.0}


def _summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return, for each part, how many rows reached their aim, missed it, and were skipped; and how it ended."""
    return {
        name: {
            "reached": sum(row.get("ok") is True for row in result["rows"]),
            "missed": sum(row.get("ok") is False for row in result["rows"]),
            "skipped": sum("skipped" in row for row in result["rows"]),
            "ended": result["ended"],
        }
        for name, result in results.items()
    }


def _one(part: Part, device: str, limit_s: float, *, tiny: bool) -> dict[str, Any]:
    """Run one part in a process group of its own, and end all of it at its time-out."""
    began = time.monotonic()
    if limit_s < 1:
        return {"rows": [], "ended": "no time was left", "seconds": 0.0}
    with tempfile.TemporaryDirectory(prefix="tutti-gpu-", ignore_cleanup_errors=True) as folder:
        process = multiprocessing.get_context("fork").Process(
            target=_work, args=(part, device, began + limit_s - 0.1 * limit_s, Path(folder), tiny)
        )
        process.start()
        try:
            process.join(limit_s)
            hung = process.is_alive()
        finally:
            _end(process)
        rows = _rows_of(Path(folder) / "rows.jsonl")
    if hung:
        ended = f"did not end in {limit_s:.0f} s"
    else:
        ended = "" if process.exitcode == 0 else f"failed with exit code {process.exitcode}"
    if ended:
        print(f"  {part.name} {ended}", flush=True)
    return {"rows": rows, "ended": ended, "seconds": round(time.monotonic() - began, 1)}


def _end(process: Any) -> None:
    """Kill what is left of a part's process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join(5)


def _rows_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _work(part: Part, device: str, deadline: float, folder: Path, tiny: bool) -> None:
    """Run a part in this forked process, and end it at once: threads that loggers left open need not end."""
    code = 1
    try:
        _measure(part, device, deadline, folder, tiny=tiny)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _measure(part: Part, device: str, deadline: float, folder: Path, *, tiny: bool) -> None:
    """Print each row of a part, and keep it in rows.jsonl."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.chdir(folder)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from gpu_run import PartRun

    if tiny:
        importlib.import_module("torch").set_num_threads(1)
    run = PartRun(device=device, tiny=tiny, deadline=deadline, folder=folder)
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
        for row in importlib.import_module(part.module).measure(run):
            file.write(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n")
            file.flush()
            print(f"  {_said(row)}", flush=True)


def _finite(value: Any) -> Any:
    """Return a value that JSON has: a number that is none becomes a word."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _said(row: dict[str, Any]) -> str:
    """Return a row as one line."""
    if "skipped" in row:
        return f"skipped {row['what']}: {row['skipped']}"
    mark = {True: "ok     ", False: "MISSED ", None: "       "}[row.get("ok")]
    figures = " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in row.items()
        if key not in ("what", "ok", "losses") and value not in (None, "")
    )
    return f"{mark} {row['what']}: {figures}"


if __name__ == "__main__":
    sys.exit(main())
