"""A training script for `tutti verify` and `tutti run`: any subject of the GPU suite. Without tutti: --ddp.

python benchmarks/gpu_script.py gpt --steps 20 --report out.json
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

import tutti  # noqa: E402
from gpu_subjects import LARGE, Subject, subject_of  # noqa: E402

WARMUP = 3
"""Steps that are not timed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=list(LARGE))
    parser.add_argument("--tiny", action="store_true", help="the size for comparisons and rehearsals")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=0, help="samples of a step over all ranks")
    parser.add_argument("--microbatches", type=int, default=0)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--ddp", action="store_true", help="plain PyTorch under torchrun instead of tutti")
    parser.add_argument("--report", type=Path, help="file for time and memory")
    args = parser.parse_args()
    subject = subject_of(args.subject, tiny=args.tiny)
    batch = args.batch or subject.batch
    report = with_ddp(subject, batch, args.steps) if args.ddp else with_tutti(subject, batch, args)
    if args.report is not None and report:
        args.report.write_text(json.dumps(report), encoding="utf-8")


def with_tutti(subject: Subject, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train with tutti; returns the report on rank 0."""
    from tutti.trainer.run_end import peak_memory_nbytes

    job = tutti.Job(global_batch_size=batch, precision=args.precision, num_microbatches=args.microbatches or None)
    model = subject.model()
    data = subject.data(batch * args.steps)
    model, _, loader = job.prepare(model, subject.optimizer(model.parameters()), data, subject.loss)
    times = timed(((lambda batch=batch: job.step(batch)) for batch in loader), job.device)
    return report_of(times, batch, job.device, peak_memory_nbytes(job.device)) if job.is_main else {}


def with_ddp(subject: Subject, batch: int, steps: int) -> dict[str, Any]:
    """Train with DistributedDataParallel on the CPU; returns the report on rank 0."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(subject.model())
    optimizer = subject.optimizer(model.parameters())
    data = subject.data(batch * steps)
    loader = DataLoader(data, batch_size=batch // ranks, sampler=DistributedSampler(data))

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        subject.loss(model(x), y).backward()
        optimizer.step()

    times = timed(((lambda pair=pair: step(*pair)) for pair in loader), torch.device("cpu"))
    main_rank = dist.get_rank() == 0
    dist.destroy_process_group()
    return report_of(times, batch, torch.device("cpu"), 0) if main_rank else {}


def timed(steps: Iterable[Any], device: torch.device) -> list[float]:
    """Run the steps; returns the seconds of each, waiting for the device after it."""
    times = []
    for step in steps:
        began = time.perf_counter()
        step()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - began)
    return times


def report_of(times: list[float], batch: int, device: torch.device, peak_nbytes: int) -> dict[str, Any]:
    """Return the figures of a run: median step, samples a second, and its peaks of memory."""
    kept = times[WARMUP:] or times
    reserved = torch.accelerator.max_memory_reserved(device) if device.type != "cpu" else peak_nbytes
    step_s = statistics.median(kept)
    return {
        "step_s": step_s,
        "samples_per_s": batch / step_s,
        "allocated_nbytes": peak_nbytes,
        "reserved_nbytes": reserved,
    }


if __name__ == "__main__":
    main()
