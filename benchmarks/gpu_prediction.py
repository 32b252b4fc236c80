"""Predicted steps of 12 models beside a plain PyTorch loop: time, memory of tensors, memory of the allocator."""

import functools
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tutti
from gpu_run import Row, skipped
from gpu_subjects import ADAM, LARGE, SGD, SMALL, Subject, images, next_token_loss, tokens
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, Plan
from tutti.config.prediction import Prediction
from tutti.config.vocabulary import Precision
from tutti.errors import TuttiError
from tutti.profile.catalog import cluster_from_parts

TIME_ERROR, MEMORY_ERROR, LEAST_MEMORY = 0.10, 0.05, 0.98
"""Aims: mean relative errors of time and of allocated memory, and the smallest ratio of predicted to allocated."""

TRACED_SAMPLES = 4
MOST_STEPS, LEAST_STEPS, WARMUP = 30, 3, 3
PREDICTING = 0.6
"""Largest fraction of a model's seconds after which its steps are still timed; later they get the least number."""


class Encoder(nn.Module):
    """A transformer encoder as BERT has it: tokens, learned positions, layers that normalise after, a head."""

    def __init__(self, layers: int, width: int, heads: int, length: int, words: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(x) + self.positions))


class VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al. 2020): patches, positions, layers that normalise before, the mean, a head."""

    def __init__(self, layers: int, width: int, heads: int, image: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros((image // patch) ** 2, width))
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.patches(x).flatten(2).mT + self.positions).mean(1))


class BasicBlock(nn.Module):
    """ResNet's block of two convolutions beside a shortcut (He et al. 2015)."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inside, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)),
        )
        shortcut = nn.Sequential(nn.Conv2d(inside, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.shortcut = nn.Identity() if stride == 1 and inside == width else shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet18(nn.Sequential):
    """Stages of two basic blocks; four of width 64 and up are ResNet-18 (11.7 M parameters)."""

    def __init__(self, stages: int, width: int, classes: int) -> None:
        blocks, inside = [], width
        for stage in range(stages):
            for number in range(2):
                blocks.append(BasicBlock(inside, width << stage, 2 if stage and not number else 1))
                inside = width << stage
        super().__init__(
            *(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes)),
        )


P = functools.partial


def _language(model: Callable[[], nn.Module], length: int, words: int, batch: int) -> Subject:
    return Subject(model=model, data=P(tokens, length, words), loss=next_token_loss, optimizer=ADAM, batch=batch)


def _vision(model: Callable[[], nn.Module], size: int, classes: int, optimizer: Any, batch: int) -> Subject:
    return Subject(
        model=model, data=P(images, size, 3, classes), loss=F.cross_entropy, optimizer=optimizer, batch=batch
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model in the size of a GPU and tiny.

    Attributes:
        channels_last: its convolutions and images are in that memory format.
    """

    name: str
    large: Subject
    small: Subject
    precision: Precision = "bfloat16"
    channels_last: bool = False


def _case(name: str, subject: str, **changes: Any) -> Case:
    return Case(name=name, large=LARGE[subject], small=SMALL[subject], **changes)


def _medium() -> Subject:
    from gpt_torch import GPT

    return _language(P(GPT, 24, 1024, 16, 1024, 50304), 1024, 50304, 4)


def cases() -> tuple[Case, ...]:
    """Return the models, in order of worth."""
    bert = _language(P(Encoder, 12, 768, 12, 512, 30522), 512, 30522, 16)
    vit = _vision(P(VisionTransformer, 12, 768, 12, 224, 16, 1000), 224, 1000, ADAM, 64)
    resnet18 = _vision(P(ResNet18, 4, 64, 1000), 224, 1000, SGD, 128)
    return (
        _case("GPT-2 small", "gpt"),
        _case("ResNet-50", "resnet"),
        _case("ResNet-50, channels last", "resnet", channels_last=True),
        Case(name="BERT base", large=bert, small=_language(P(Encoder, 2, 16, 2, 12, 40), 12, 40, 8)),
        Case(name="ViT-B/16", large=vit, small=_vision(P(VisionTransformer, 2, 16, 2, 16, 8, 10), 16, 10, ADAM, 8)),
        Case(name="ResNet-18", large=resnet18, small=_vision(P(ResNet18, 2, 8, 10), 32, 10, SGD, 8)),
        _case("U-Net 3d", "unet"),
        _case("LSTM, float32", "lstm", precision="full"),
        _case("DLRM, float32", "dlrm", precision="full"),
        _case("mixture of experts", "moe"),
        Case(name="GPT-2 medium", large=_medium(), small=SMALL["gpt"]),
        _case("ResNet-50, float32", "resnet", precision="full"),
    )


def predict_part(device: str, seconds: float) -> Iterator[Row]:
    """Yield a row for each model, each within its share of the seconds, and one for their mean errors.

    Args:
        device: kind of the device. On "cpu" this is a rehearsal: tiny sizes, stated rates, and no aims.
        seconds: how long all of it may take.
    """
    deadline, rows = time.monotonic() + seconds, list[Row]()
    cluster, every = _cluster(device), cases()
    for number, case in enumerate(every):
        left = deadline - time.monotonic()
        if left < 2:
            yield skipped(case.name, "no time was left")
            continue
        row = _row(case, torch.device(device), cluster, left / (len(every) - number))
        rows.append(row)
        yield row
    yield _summary([row for row in rows if "step_s" in row], rehearsal=device == "cpu")


def _cluster(device: str) -> ClusterSpec:
    """Return this machine as `tutti probe --quick` sees it; in a rehearsal, a stated host."""
    if device == "cpu":
        from matrix.foreseen import HOST

        return HOST
    with tempfile.TemporaryDirectory() as folder:
        return tutti.probe(quick=True, output=Path(folder) / "cluster.json")


def _row(case: Case, device: torch.device, cluster: ClusterSpec, share_s: float) -> Row:
    """Predict and measure one model; what fails is a row that says so."""
    began = time.monotonic()
    subject = case.small if device.type == "cpu" else case.large
    try:
        spec = _described(case, subject)
        prediction = _prediction(case, subject, spec, cluster)
        left = share_s - (time.monotonic() - began)
        measured = _measured(case, subject, device, left if left > (1 - PREDICTING) * share_s else 0.0)
    except (RuntimeError, TuttiError) as error:
        return {"model": case.name, "ok": False, "said": str(error).splitlines()[0]}
    finally:
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
    row = {"model": case.name, "predicted_step_s": prediction.step_time_s.value, **measured}
    row["time_ratio"] = row["predicted_step_s"] / row["step_s"]
    if device.type == "cpu":  # a rehearsal of what torch would report on a card
        prediction = _prediction(case, subject, spec, cluster_from_parts("card", "H100-SXM5-80GB"))
    return row | _memory_figures(prediction, row)


def _memory_figures(prediction: Prediction, row: Row) -> Row:
    """Return predicted memory of a card beside what a row measured; without a measurement, only whether it is a number.

    Args:
        prediction: on a GPU.
        row: with "allocated_nbytes" and "reserved_nbytes" where a GPU was measured.
    """
    if prediction.allocator is None:
        return {"ok": None}
    allocated, reserved = prediction.allocator.allocated.value, prediction.allocator.reserved.value
    figures: Row = {"predicted_allocated_nbytes": allocated, "predicted_reserved_nbytes": reserved}
    if "allocated_nbytes" not in row:
        return figures | {"ok": math.isfinite(row["time_ratio"]) and 0 < allocated <= reserved}
    figures["allocated_ratio"] = allocated / row["allocated_nbytes"]
    figures["reserved_ratio"] = reserved / row["reserved_nbytes"]
    return figures | {"ok": figures["allocated_ratio"] >= LEAST_MEMORY}


def _described(case: Case, subject: Subject) -> ModelSpec:
    """Describe the model on shapes alone, with its memory under autocast where that is used."""
    from tutti.profile import describe_model

    with torch.device("meta"):
        model = subject.model()
    inputs, target = (tensor[:TRACED_SAMPLES] for tensor in subject.data(TRACED_SAMPLES)[:])
    autocast = torch.bfloat16 if case.precision == "bfloat16" else None
    spec = describe_model(
        model, (inputs,), {}, target, subject.loss, subject.optimizer(model.parameters()),
        samples=TRACED_SAMPLES, autocast=autocast,
    )  # fmt: skip
    return replace(spec, channels_last=case.channels_last)


def _prediction(case: Case, subject: Subject, spec: ModelSpec, cluster: ClusterSpec) -> Prediction:
    """Predict the step on one device."""
    from tutti.cost_model import predict

    batch = BatchPlan(global_batch_size=subject.batch)
    return predict(spec, cluster, Plan(batch=batch, mesh={"replicate": 1}, precision=case.precision))


def _measured(case: Case, subject: Subject, device: torch.device, seconds: float) -> Row:
    """Train with a plain loop; returns the median step, and the peaks of memory after a warm-up."""
    on_cpu = device.type == "cpu"
    layout = torch.channels_last if case.channels_last else torch.preserve_format
    with device:
        model = subject.model().to(memory_format=layout)
    sparse = any(getattr(module, "sparse", False) for module in model.modules())  # which fused kernels do not take
    optimizer = subject.optimizer(model.parameters(), **({} if sparse else {"fused": True}))
    inputs, target = (tensor.to(device) for tensor in subject.data(subject.batch)[:])
    if case.channels_last:
        inputs = inputs.to(memory_format=layout)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=case.precision == "bfloat16")

    def step() -> None:
        optimizer.zero_grad()
        with autocast:
            loss = subject.loss(model(inputs), target)
        loss.backward()
        optimizer.step()

    times, deadline = list[float](), time.monotonic() + seconds
    while len(times) < WARMUP + LEAST_STEPS or (len(times) < WARMUP + MOST_STEPS and time.monotonic() < deadline):
        began = time.perf_counter()
        step()
        if not on_cpu:
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - began)
    row: Row = {"step_s": statistics.median(times[WARMUP:]), "batch": subject.batch, "steps": len(times)}
    if not on_cpu:
        row["allocated_nbytes"] = torch.accelerator.max_memory_allocated()
        row["reserved_nbytes"] = torch.accelerator.max_memory_reserved()
        torch.accelerator.reset_peak_memory_stats()
    return row


def _summary(rows: list[Row], *, rehearsal: bool) -> Row:
    """Return the mean errors of time and memory over the models, and the smallest ratio of memory."""
    if not rows:
        return skipped("mean errors", "no model was measured")
    found: Row = {"model": "mean errors", "models": len(rows)}
    found["time_error"] = statistics.mean(abs(row["time_ratio"] - 1) for row in rows)
    if rehearsal:
        return found
    for kind in ("allocated", "reserved"):
        found[f"{kind}_error"] = statistics.mean(abs(row[f"{kind}_ratio"] - 1) for row in rows)
    found["least_allocated_ratio"] = min(row["allocated_ratio"] for row in rows)
    reached = found["time_error"] <= TIME_ERROR and found["allocated_error"] <= MEMORY_ERROR
    return {**found, "ok": reached and found["least_allocated_ratio"] >= LEAST_MEMORY}
