"""Samples a second of 1 to 16 ranks on the CPU's cores: tutti beside DistributedDataParallel."""

import json
import os
from collections.abc import Iterator

from gpu_run import SCRIPT, PartRun, Row, last_line, skipped

RANKS = (1, 2, 4, 8, 16)


def measure(run: PartRun) -> Iterator[Row]:
    """Yield a row for each number of ranks that has cores."""
    cores = len(os.sched_getaffinity(0))
    for ranks in (1,) if run.tiny else RANKS:
        what = f"digits on {ranks} CPU ranks"
        if ranks > cores:
            yield skipped(what, f"this machine has {cores} cores")
        elif run.left_s() < 15:
            yield skipped(what, "no time was left")
        else:
            yield one(what, ranks, run)


def one(what: str, ranks: int, run: PartRun) -> Row:
    """Train by tutti and by DistributedDataParallel, one after the other."""
    row: Row = {"what": what, "ranks": ranks}
    size = ["--tiny", "--steps", "4"] if run.tiny else ["--steps", "24", "--batch", "1024"]
    starts = {
        "tutti": ["-m", "tutti", "run", "--nproc", str(ranks), "--no-predict"],
        "ddp": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)],
    }
    for name, start in starts.items():
        report = run.folder / f"scaling-{name}-{ranks}.json"
        script = [str(SCRIPT), "digits", *size, "--report", str(report), *(["--ddp"] if name == "ddp" else [])]
        process = run.start([*start, *script], CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        code, text = run.output(process, 60)
        if code != 0:
            return row | {"ok": False, "said": f"{name}: {last_line(text)}"}
        row[f"{name}_samples_per_s"] = json.loads(report.read_text(encoding="utf-8"))["samples_per_s"]
    return row | {"ratio": row["tutti_samples_per_s"] / row["ddp_samples_per_s"]}
