"""Repeats the published scaling experiment small: batch against F1 and time, with LARS, LAMB and SGD tuned alike.

    python examples/bigearthnet/study.py runs/study            # trains; some 15 minutes on 2 free cores
    python examples/bigearthnet/study.py runs/study --predict  # the published batches on 8 to 128 V100, predicted

Each optimizer gets the same number of trials, on one rank with the smallest batch, judged on the validation split. Its
rate then follows its rule (linear; square root for LAMB) to the larger batches, whose runs on two ranks see the test
split once. Every run has its report, and runs of one optimizer are compared by `tutti report`.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from generate import generate
from pack import pack

TRAIN = Path(__file__).with_name("train_tutti.py")
SIZE = ["--labels", "19", "--layers", "14", "--width", "8", "--epochs", "6", "--workers", "1"]
BATCHES = (32, 96, 288)
RATES = {"lars": (10, 30, 90), "lamb": (0.03, 0.1, 0.3), "sgd": (1, 3, 9)}
"""Rates for 256 samples that are tried, each about three times the one before."""

PUBLISHED = ((512, 8, 0.78, 49_400), (8_192, 128, 0.74, 3_400), (16_384, 128, 0.64, 2_800), (32_768, 128, 0.43, 2_500))
"""Sedona, IGARSS tutorial 2021: batch, GPUs, F1, seconds."""

TRAINING_PATCHES = 269_695
"""Patches of the published training split."""


def tutti(*words: object) -> str:
    command = [sys.executable, "-m", "tutti.cli.main", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # one thread a rank, so that one and two ranks compare
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[2:])}\n{done.stdout}{done.stderr}")
    return done.stdout or done.stderr  # a report for people goes to stderr where stdout is no terminal


def train(folder: Path, data: Path, ranks: int, *options: object) -> dict[str, Any]:
    """Train and return the run's report, which is made once and kept."""
    path = folder / "report" / "report.json"
    if not path.exists():
        began = time.perf_counter()
        tutti("run", "--nproc", ranks, "--folder", folder, TRAIN, data, *SIZE, *options)
        tutti("report", folder)
        print(f"{folder.name}: {time.perf_counter() - began:.0f} s", flush=True)
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def evaluated(folder: Path) -> dict[str, float]:
    """Return what the run's last evaluation gave, by metric."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    values: dict[str, float] = [row for row in rows if row["kind"] == "evaluate"][-1]["values"]
    return values


def tuned(root: Path, data: Path, optimizer: str) -> tuple[float, list[str]]:
    """Return the rate that was best on the validation split, and what reports should say about the search."""
    trials = []
    for rate in RATES[optimizer]:
        options = ("--optimizer", optimizer, "--lr", rate, "--batch-size", BATCHES[0], "--tuning")
        report = train(root / f"tune-{optimizer}-{rate}", data, 1, *options, "--validate-every", 6)
        value, cost = report["quality"]["test_value"]["value"], report["device_seconds"]["value"]
        trials.append({"rate": rate, "validation micro F1": value, "core seconds": cost})
        print(f"{optimizer} {rate}: validation micro F1 {value:.3f}", flush=True)
    log = root / f"tune-{optimizer}.json"
    log.write_text(json.dumps(trials, indent=1))
    facts = {
        "tuning.trials": len(trials),
        "tuning.device_seconds": sum(trial["core seconds"] for trial in trials),
        "tuning.space": f"rate in {RATES[optimizer]} at batch {BATCHES[0]}",
        "tuning.search_log_sha256": hashlib.sha256(log.read_bytes()).hexdigest(),
    }
    best = max(trials, key=lambda trial: trial["validation micro F1"])["rate"]
    return best, [word for name, value in facts.items() for word in ("--fact", f"{name}={value}")]


def study(root: Path) -> None:
    """Train all runs that are not there yet, print the table, and compare the runs of each optimizer."""
    data = root / "packed"
    if not data.exists():
        generate(root, 600)
        pack(root, data, splits=root / "splits")
    rows = []
    for optimizer in RATES:
        rate, facts = tuned(root, data, optimizer)
        runs = []
        for batch in BATCHES:
            folder = root / f"{optimizer}-{batch}"
            options = ("--optimizer", optimizer, "--lr", rate, "--batch-size", batch, "--validate-every", 0)
            report = train(folder, data, 2, *options, *facts)
            rows.append((optimizer, rate, batch, report, evaluated(folder)["macro_f1"]))
            runs.append(folder)
        (root / f"compare-{optimizer}.txt").write_text(tutti("report", *runs))
    print("\n| optimizer | rate for 256 | batch | steps | test micro F1 | macro F1 | time | findings |")
    print("|---|---|---|---|---|---|---|---|")
    for optimizer, rate, batch, report, macro in rows:
        codes = ", ".join(dict.fromkeys(finding["code"] for finding in report["findings"]))
        print(
            f"| {optimizer} | {rate:g} | {batch} | {report['steps']['value']} | "
            f"{report['quality']['test_value']['value']:.3f} | {macro:.3f} | {report['time']['wall']['value']:.1f} s | "
            f"{codes} |"
        )
    for optimizer in RATES:
        print(f"\n{(root / f'compare-{optimizer}.txt').read_text()}")


def predict(root: Path) -> None:
    """Print predicted step and training times on V100, without waiting for data, beside the published times."""
    print("| batch | V100 | predicted step | predicted 90 epochs | published F1 | published time |")
    print("|---|---|---|---|---|---|")
    for batch, count, f1, seconds in PUBLISHED:
        plan = root / f"v100-{count}-{batch}.json"
        script = (TRAIN, root / "packed", "--batch-size", batch)
        cluster = f"{count // 4}x4:v100-sxm2-16gb,nvlink2,2*ib-edr"
        if not plan.exists():
            tutti("plan", "--cluster", cluster, "--mesh", f"replicate={count}", "--output", plan, *script)
        found = json.loads(tutti("predict", "--json", "--cluster", cluster, plan, *script))
        step, steps = found["step_time_s"], 90 * -(-TRAINING_PATCHES // batch)
        part = 1 - found["phases"]["data"] / step["value"]  # a step waits for data as long as this machine would need
        value, low, high = (part * step[name] for name in ("value", "low", "high"))
        training = f"{steps * value:,.0f} s ({steps * low:,.0f} to {steps * high:,.0f} s)"
        print(f"| {batch:,} | {count} | {1000 * value:.0f} ms | {training} | {f1} | {seconds:,} s |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--predict", action="store_true", help="predict the published runs instead of training")
    args = parser.parse_args()
    (predict if args.predict else study)(args.folder)


if __name__ == "__main__":
    main()
