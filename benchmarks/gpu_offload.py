"""A model whose state exceeds the device's memory trains on one device: tokens a second, and the copies hidden."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch

import tutti
from gpt_torch import GPT
from gpu_run import PartRun, Row, skipped
from gpu_subjects import next_token_loss, tokens
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.config.vocabulary import Offload

STATE_NBYTES_PER_VALUE = 16
"""Of float32 training with Adam: parameter, gradient and two moments."""

CARD_NBYTES = 24 * 2**30
"""What the suite lets itself use of a larger device, so that the state fits the host and the run its minutes."""

WIDTH, CONTEXT = 2560, 1024


def measure(run: PartRun) -> Iterator[Row]:
    """Yield a row for each kind of offload."""
    limit = card_nbytes(run)
    layers = 2 if run.tiny else -(-int(1.25 * limit) // (STATE_NBYTES_PER_VALUE * 12 * WIDTH * WIDTH))
    for offload in [kind for kind in get_args(Offload) if kind != "none"]:
        what = f"offload {offload}"
        if run.left_s() < (1 if run.tiny else 30):
            yield skipped(what, "no time was left")
            continue
        try:
            yield {"what": what, "device_limit_nbytes": limit, **train(offload, layers, run)}
        except Exception as error:
            yield {"what": what, "ok": False, "said": f"{type(error).__name__}: {error}"[:300]}


def card_nbytes(run: PartRun) -> int:
    """Limit this process to `CARD_NBYTES` of the device, and return what it may use."""
    if run.device != "cuda":
        return CARD_NBYTES
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, CARD_NBYTES / total))
    return min(total, CARD_NBYTES)


def train(offload: Offload, layers: int, run: PartRun) -> Row:
    """Train a GPT of that many layers for a few steps."""
    width, heads, context, batch = (32, 4, 16, 4) if run.tiny else (WIDTH, 20, CONTEXT, 4)
    plan = Plan(
        batch=BatchPlan(global_batch_size=batch), mesh={"shard": 1}, precision="bfloat16",
        sharding=ShardingPlan(level=3, offload=offload),
    )  # fmt: skip
    path = Path(serialization.save(plan, run.folder / f"plan-{offload}.json"))
    os.environ["TUTTI_PLAN"] = str(path)
    try:
        job = tutti.Job(global_batch_size=batch, folder=run.folder / f"offload-{offload}", progress=False)
        model = GPT(layers, width, heads, context, 256)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        values = sum(parameter.numel() for parameter in model.parameters())
        model, _, loader = job.prepare(model, optimizer, tokens(context, 256, 8 * batch), next_token_loss)
    finally:
        del os.environ["TUTTI_PLAN"]
    steps = iter(loader)
    job.step(next(steps))
    times = []
    for _ in range(2):
        began = time.perf_counter()
        float(job.step(next(steps)))
        times.append(time.perf_counter() - began)
    figures = {"parameters": values, "state_nbytes": STATE_NBYTES_PER_VALUE * values, "step_s": min(times)}
    hidden = hidden_share(lambda: job.step(next(steps)), run)
    return {**figures, "tokens_per_s": batch * context / min(times), "copies_hidden": hidden}


def hidden_share(step: Any, run: PartRun) -> float | None:
    """Return the share of the copies' time between host and device in which a kernel runs; None without a device."""
    if run.device != "cuda":
        step()
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() or () if event.device_type != torch.autograd.DeviceType.CPU]
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in events]
    copies = [(a, b) for a, b, name in spans if "HtoD" in name or "DtoH" in name]
    kernels = merged([(a, b) for a, b, name in spans if not name.startswith(("Memcpy", "Memset"))])
    total = sum(b - a for a, b in copies)
    return sum(overlap(span, kernels) for span in copies) / total if total else None


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return disjoint spans that cover the same time, in order.

    >>> merged([(2, 3), (0, 1), (0.5, 2)])
    [(0, 3)]
    """
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def overlap(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """Return how much of a span disjoint others cover.

    >>> overlap((0, 4), [(1, 2), (3, 9)])
    2
    """
    return sum(max(0, min(span[1], end) - max(span[0], start)) for start, end in others)
