"""Steps by tutti beside a hand-written loop, Accelerate and Lightning Fabric: in turns, medians, synchronisations."""

import importlib.util
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import tutti
from gpu_run import PartRun, Row, skipped
from gpu_subjects import Subject, subject_of

CASES = (("gpt", False), ("gpt", True), ("resnet", False), ("resnet", True))
"""(subject, whether it is compiled)."""

AIM = 1.01
"""Largest ratio to the hand-written loop."""

WARMUP, BLOCK, ROUNDS = 6, 8, 5
WAITS = frozenset(
    {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "hipStreamSynchronize"}
)
"""Calls of the runtime in which the host waits for the device."""

Step = Callable[[], Any]


def measure(run: PartRun) -> Iterator[Row]:
    """Yield a row for each case and loop."""
    for name, compiled in CASES[:1] if run.tiny else CASES:
        case = f"{name}, bf16{', compiled' if compiled else ''}"
        if run.left_s() < (2 if run.tiny else 25):
            yield skipped(case, "no time was left")
            continue
        yield from compare(case, subject_of(name, tiny=run.tiny), compiled, run)


def compare(case: str, subject: Subject, compiled: bool, run: PartRun) -> Iterator[Row]:
    """Time the loops in turns: block after block of each, so that a clock that changes reaches all alike."""
    steps: dict[str, Step] = {}
    for name, make in LOOPS.items():
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
            yield skipped(f"{case}: {name}", f"{PACKAGES[name]} is not installed")
            continue
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            steps[name] = make(subject, compiled, run)
    warm, block, rounds = (1, 1, 2) if run.tiny else (WARMUP, BLOCK, ROUNDS)
    for step in steps.values():
        block_s(step, warm, run.device)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            samples[name].append(block_s(step, block, run.device))
    plain = statistics.median(samples["plain"])
    for name, step in steps.items():
        took = statistics.median(samples[name])
        ratios = [a / b for a, b in zip(samples[name], samples["plain"], strict=True)]
        ratio = statistics.median(ratios)
        row = {"what": f"{case}: {name}", "step_ms": took * 1e3, "plain_ms": plain * 1e3, "ratio": ratio}
        row |= {"host_waits_a_step": host_waits(step, run.device)}
        yield row | ({"ok": ratio <= AIM} if name == "tutti" and not run.tiny else {})


def block_s(step: Step, count: int, device: str) -> float:
    """Return the seconds of a step in a block of `count`, which ends when the device has done them."""
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    _synchronize(device)
    return (time.perf_counter() - began) / count


def host_waits(step: Step, device: str, count: int = 4) -> float | None:
    """Return how often a step makes the host wait for the device, by the profiler; None without a device."""
    if device != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    _synchronize(device)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            step()
    events = profile.events() or ()
    return sum(event.name in WAITS for event in events) / count


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def _model(subject: Subject) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = subject.model()
    if subject.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, subject.optimizer(model.parameters())


def _loader(subject: Subject, run: PartRun) -> DataLoader[Any]:
    workers = 0 if run.tiny else 4
    data = subject.data(8 * subject.batch)
    return DataLoader(
        data, batch_size=subject.batch, shuffle=True, num_workers=workers, pin_memory=run.device == "cuda",
        persistent_workers=workers > 0, drop_last=True,
    )  # fmt: skip


def _endless(loader: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def plain(subject: Subject, compiled: bool, run: PartRun) -> Step:
    """A hand-written loop."""
    model, optimizer = _model(subject)
    device = torch.device(run.device)
    model.to(device)
    forward = torch.compile(model) if compiled else model
    batches = _endless(_loader(subject, run))

    def step() -> Any:
        x, y = (part.to(device, non_blocking=True) for part in next(batches))
        if subject.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(run.device, torch.bfloat16):
            loss = subject.loss(forward(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class ChannelsLast(nn.Module):
    """A model that takes its images in the memory format in which convolutions are fastest."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.contiguous(memory_format=torch.channels_last))


def by_tutti(subject: Subject, compiled: bool, run: PartRun) -> Step:
    """The same by tutti, as the tutorial writes it."""
    job = tutti.Job(
        global_batch_size=subject.batch, precision="bfloat16", compile=compiled,
        folder=run.folder / f"tutti-{time.monotonic_ns()}", progress=False,
    )  # fmt: skip
    model, optimizer = _model(subject)
    model = ChannelsLast(model) if subject.channels_last else model
    data = subject.data(8 * subject.batch)
    workers = {} if run.tiny else {"num_workers": 4}
    _, _, loader = job.prepare(model, optimizer, data, subject.loss, **workers)
    batches = _endless(loader)
    return lambda: job.step(next(batches))


def by_accelerate(subject: Subject, compiled: bool, run: PartRun) -> Step:
    """The same by Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=run.device == "cpu")
    model, optimizer = _model(subject)
    model = ChannelsLast(model) if subject.channels_last else model
    model = torch.compile(model) if compiled else model
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(subject, run))
    batches = _endless(loader)

    def step() -> Any:
        x, y = next(batches)
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = subject.loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def by_fabric(subject: Subject, compiled: bool, run: PartRun) -> Step:
    """The same by Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=run.device, devices=1, precision="bf16-mixed")
    model, optimizer = _model(subject)
    model = ChannelsLast(model) if subject.channels_last else model
    model = torch.compile(model) if compiled else model
    model, optimizer = fabric.setup(model, optimizer)
    batches = _endless(fabric.setup_dataloaders(_loader(subject, run)))

    def step() -> Any:
        x, y = next(batches)
        optimizer.zero_grad()
        loss = subject.loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


LOOPS: dict[str, Callable[[Subject, bool, PartRun], Step]] = {
    "plain": plain,
    "tutti": by_tutti,
    "accelerate": by_accelerate,
    "fabric": by_fabric,
}
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning"}
