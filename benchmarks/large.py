"""A GPT larger than one rank should hold: planned, built without memory, stepped; peaks beside the prediction.

Parameters are bfloat16 and divided among the ranks (level 3), and so are gradients and AdamW's two states: 8 bytes
a parameter in all. In addition a rank needs memory for a few blocks at a time (`beside`). Run this script while
nothing else runs, because it needs the whole machine:

    python benchmarks/large.py --layers 20 --width 2048 --ranks 4
"""

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks"), str(ROOT / "examples")]

import gpt_tutti  # noqa: E402
import record  # noqa: E402
import tutti  # noqa: E402
from harness import run_ranks  # noqa: E402
from tutti.comm.shared_segment import attached_resident_nbytes  # noqa: E402
from tutti.config import serialization  # noqa: E402
from tutti.config.plan import BatchPlan, Plan, ShardingPlan  # noqa: E402
from tutti.parallel.preview import explain_layout  # noqa: E402
from tutti.parallel.sharding.sharded_gradients import MAX_PENDING_SUMS  # noqa: E402
from tutti.trainer.deferred_init import build_on_meta  # noqa: E402

CONTEXT, SAMPLES = 64, 8


def gpt(layers: int, width: int) -> nn.Module:
    """Return the example's GPT with parameters in bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return gpt_tutti.GPT(layers, width, width // 64, CONTEXT)
    finally:
        torch.set_default_dtype(before)


def plan_of(ranks: int) -> Plan:
    return Plan(batch=BatchPlan(global_batch_size=SAMPLES), mesh={"shard": ranks}, sharding=ShardingPlan(level=3))


def beside(block_nbytes: int) -> int:
    """Return the bytes beside the divided states at the peak, in the backward of a block.

    They are the block, the block that is being gathered and its copy, the gradients, and the pending sums, sent
    and received.
    """
    return block_nbytes * (1 + 2 + 1 + 2 * MAX_PENDING_SUMS)


def predicted(layers: int, width: int, ranks: int) -> dict[str, int]:
    """Return the predicted parameters, and the peak bytes of a rank, from shapes alone."""
    model, _ = build_on_meta(lambda: gpt(layers, width))
    explained = explain_layout(model, plan_of(ranks))
    block = sum(p.numel() * p.element_size() for p in model.blocks[0].parameters())
    states = max(explained.state_nbytes_per_rank)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "states_nbytes": states,
        "beside_nbytes": beside(block),
        "peak_nbytes": states + beside(block),
    }


def resident(key: str) -> int:
    """Return VmRSS (now) or VmHWM (the peak since `forget_peak`) of this process in bytes, without memory shared by
    others.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key)) - attached_resident_nbytes()


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def warm_up(width: int) -> None:
    """Load the libraries and allocate their scratch memory, with one block of the same width."""
    model = gpt(1, width)
    tokens = torch.zeros(2, CONTEXT, dtype=torch.long)
    gpt_tutti.loss_fn(model(tokens), tokens).backward()


def train(layers: int, width: int, ranks: int, steps: int) -> dict[str, Any]:
    """On one rank: build, prepare and step; returns bytes beyond those of the process before, seconds and losses."""
    os.nice(10)
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan_of(ranks), Path.cwd() / f"plan-{os.getpid()}.json"))
    warm_up(width)
    start, figures, began = resident("VmRSS"), {}, time.perf_counter()

    def note(name: str) -> None:
        figures[f"{name}_peak_nbytes"] = resident("VmHWM") - start
        figures[f"{name}_s"] = round(time.perf_counter() - began, 2)
        forget_peak()

    job = tutti.Job(global_batch_size=SAMPLES, keep_checkpoints=0)
    model = job.build(lambda: gpt(layers, width))
    note("built")
    tokens = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, _, loader = job.prepare(model, optimizer, data, gpt_tutti.loss_fn)
    note("prepared")
    figures["losses"] = [job.step(batch) for _ in job.epochs(steps) for batch in loader]
    note("stepped")
    figures["rest_nbytes"] = resident("VmRSS") - start
    figures["process_nbytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - attached_resident_nbytes()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"layers": 20, "width": 2048, "ranks": 4, "steps": 3, "timeout": 3000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    load = record.load()
    expected = predicted(args.layers, args.width, args.ranks)
    print(json.dumps(expected), file=sys.stderr)
    ranks = run_ranks(train, args.ranks, args.layers, args.width, args.ranks, args.steps, timeout_s=args.timeout)
    peak = max(rank["stepped_peak_nbytes"] for rank in ranks)
    result = {"predicted": expected, "ranks": ranks, "summary": {"peak_over_predicted": peak / expected["peak_nbytes"]}}
    print(record.write("large", result, vars(args), load, quick=args.width < 1024))
    print(json.dumps(result["summary"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
